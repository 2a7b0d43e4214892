"""The measurements of `paceline bench scaling` as rows: each world against its ideal, medians over the rounds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from string import ascii_lowercase
from typing import Any

from paceline.tools.bench.scaling import Measurements, Sample
from paceline.tools.bench.worlds import Kind, Setup, World


@dataclass(frozen=True, kw_only=True)
class Row(Sample):
    """One world against its ideal: medians over the rounds. If it could not be measured, only `problem` is valid."""

    kind: Kind
    label: str
    ranks: int
    hosts: int
    rate: str
    batch: int
    shares_cores: bool
    problem: str = ""
    rounds_tokens_per_s: tuple[float, ...] = ()
    ideal_tokens_per_s: float = 0.0
    efficiency: float | None = None  # of the ideal, a fraction; None: other kind of device
    machine: float | None = None  # the separate ranks, of the ideal
    link_bytes_per_s: float | None = None

    @property
    def synchronisation(self) -> float | None:
        """The ranks of one world, of the separate ranks, a fraction."""
        return self.efficiency / self.machine if self.efficiency is not None and self.machine else None

    @property
    def computed_comm_ms(self) -> float | None:
        return 1e3 * self.comm_bytes / self.link_bytes_per_s if self.link_bytes_per_s and self.ranks > 1 else None

    @property
    def exposed_frac(self) -> float:
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0

    @property
    def spread_frac(self) -> float:
        return self.spread_ms / self.step_ms if self.step_ms else 0.0


def tabulate(setup: Setup, measured: Measurements) -> dict[Kind, list[Row]]:
    tables = {kind: [_row(setup, measured, kind, world) for world in setup.table(kind)] for kind in setup.kinds}
    if "variants" in tables:
        tables["variants"] = [*_hosts_apart(setup, measured), *tables["variants"]]
    return tables


def _hosts_apart(setup: Setup, measured: Measurements) -> list[Row]:
    """Returns a row of all hosts of the lab that exchange nothing, or of each if they have shares of a core."""
    world, rounds = setup.hosts_apart, measured.samples[setup.hosts_apart]
    if not setup.cpu:
        return [_row(setup, measured, "variants", world)]
    labels = [f"host {name} alone, {share} of a core" for name, share in zip(ascii_lowercase, setup.cpu, strict=False)]
    return [
        _row(setup, measured, "variants", world, label, [(samples[place],) for samples in rounds])
        for place, label in enumerate(labels)
    ]


def _row(
    setup: Setup,
    measured: Measurements,
    kind: Kind,
    world: World,
    label: str = "",
    rounds: list[tuple[Sample, ...]] | None = None,
) -> Row:
    """Returns one world against its ideal. rounds: its samples, if it is one host of several apart."""
    row = Row(
        kind=kind,
        label=label or world.label,
        ranks=world.ranks,
        hosts=world.hosts,
        rate=world.rate,
        batch=world.batch,
        shares_cores=bool(setup.cores) and world.ranks > setup.num_places,
    )
    samples = list(map(_all, rounds or measured.samples.get(world, [])))
    if world in measured.problems or not samples:
        return replace(row, problem=measured.problems.get(world, "not measured"))
    if kind == "variants":
        ideals = [_all(one).tokens_per_s for one in measured.samples[setup.hosts_apart]]
    else:
        places = min(world.ranks, setup.num_places)
        ideals = [places * one.tokens_per_s for (one,) in measured.samples[setup.alone]]
    apart = list(map(_all, measured.samples.get(setup.apart(world.ranks), [])))
    is_comparable = world.device == setup.device
    return replace(
        row,
        rounds_tokens_per_s=tuple(sample.tokens_per_s for sample in samples),
        ideal_tokens_per_s=statistics.median(ideals),
        efficiency=_ratio(samples, ideals) if is_comparable else None,
        machine=_ratio(apart, ideals) if is_comparable and apart else None,
        link_bytes_per_s=measured.links.get((world.hosts, world.rate)),
        **_medians(samples),
    )


def _all(samples: Sequence[Sample]) -> Sample:
    """Returns the samples of ranks apart as one of all."""
    return replace(
        samples[0],
        tokens_per_s=sum(sample.tokens_per_s for sample in samples),
        step_ms=max(sample.step_ms for sample in samples),
        sequences=tuple(count for sample in samples for count in sample.sequences),
        idle_frac=tuple(idle for sample in samples for idle in sample.idle_frac),
    )


def _medians(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the median of each measured number, and the sequences of the last round."""
    by_rank = ("sequences", "idle_frac")
    medians: dict[str, Any] = {
        item.name: float(statistics.median(getattr(sample, item.name) for sample in samples))
        for item in fields(Sample)
        if item.name not in by_rank
    }
    idle = zip(*(sample.idle_frac for sample in samples), strict=True)
    return medians | {"sequences": samples[-1].sequences, "idle_frac": tuple(map(statistics.median, idle))}


def _ratio(samples: Sequence[Sample], ideals: Sequence[float]) -> float:
    """Returns the median of the ratios, each within a round, since a machine's speed may drift."""
    return statistics.median(sample.tokens_per_s / ideal for sample, ideal in zip(samples, ideals, strict=False))
