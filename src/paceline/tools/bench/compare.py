"""`paceline bench scaling --compare ...` and `--cpu 1.0,0.35`: variants of a run on the hosts of a lab, against hosts
that do not exchange anything.

Every round trains by all hosts as one world, in each variant, and by each host alone; these tokens/s add up to the
ideal. The hosts alone train at the same time, so that they share the machine's memory and caches as in one world: each
its part of the batch, or the whole batch if they have shares of a core (`--cpu`). So fast hosts make more steps.
"""

import os
import shlex
import signal
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rich.table

from paceline.base.errors import RunError
from paceline.base.status import RANK_VARIABLES, environment_of_one
from paceline.config import Config, to_toml
from paceline.record.balance import speeds
from paceline.record.console import Console, table
from paceline.tools.bench import runs, scaling
from paceline.tools.bench.scaling import WARM_UP_STEPS, sequences_of
from paceline.tools.bench.scaling_show import (
    command_line,
    document,
    machine,
    markdown_table,
    medians,
    medians_of,
    ratio,
)

_ADAPTING_STEPS = 40  # left out of a run with shares by speed: two changes, each after some 18 measured steps
# The shell's command that makes a host of a lab a world of one.
_ALONE = shlex.join(["exec", "env", *(f"--unset={name}" for name in RANK_VARIABLES), *runs.PACELINE, "train"])
UNLIMITED = "unlimited"  # a host that may use its cores completely
COLUMNS = ["world", "tokens/s", "of the ideal", "MB sent", "exposed ms", "step ms", "sequences", "idle, %"]
LEGEND = (
    "of the ideal: of the tokens/s of hosts that exchange nothing. MB sent: by rank 0 in a step. exposed: waiting for "
    "collectives, mean over ranks. sequences and idle: by rank; a rank is idle while it waits for other ranks or for "
    "the network."
)


@dataclass(frozen=True, kw_only=True)
class World:
    label: str
    config: Config
    is_apart: bool = False  # each host is a world of one, all at once

    @property
    def adapting_steps(self) -> int:
        """Steps of a run that are left out besides the warm-up."""
        return _ADAPTING_STEPS if self.config.parallel.shares == "auto" else 0


@dataclass(frozen=True, kw_only=True)
class Setup:
    config: Config
    variants: Mapping[str, Config]  # by label
    hosts: tuple[str, ...]  # their names in the lab
    cpu: tuple[str, ...]  # by host: its share of a core, as for `paceline lab`
    rate: str
    steps: int
    rounds: int

    @property
    def has_shares(self) -> bool:
        """Whether hosts have shares of a core, so that their speeds differ."""
        return self.cpu != (UNLIMITED,) * len(self.cpu)

    @property
    def ideal(self) -> World:
        config, batch = self.config.replace("parallel", shares="equal"), sequences_of(self.config)
        if not self.has_shares:
            part = max(1, batch // len(self.hosts))
            sizes = {"global_batch_size": part, "device_batch_size": min(self.config.train.device_batch_size, part)}
            config = config.replace("train", global_batch_tokens=0, layered_micro_batches=1, **sizes)
        return World(label=f"{len(self.hosts)} hosts, no exchange", config=config, is_apart=True)

    @property
    def together(self) -> list[World]:
        return [World(label=label, config=config) for label, config in self.variants.items()]


def kinds_of_shares(config: Config) -> dict[str, Config]:
    shares = dict.fromkeys(("equal", "auto", config.parallel.shares))
    return {f"all, shares {value}": config.replace("parallel", shares=value) for value in shares}


@dataclass(frozen=True, kw_only=True)
class Sample(scaling.Sample):
    """One run of a world after its warm-up; lists are by rank."""

    sequences: tuple[int, ...]  # in the last step
    idle_frac: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Row(Sample):
    """One world: medians over the rounds, sequences of the last."""

    label: str
    ideal_frac: float  # of the tokens/s of the worlds without exchange, in the same round
    rounds_tokens_per_s: tuple[float, ...]


def measure(setup: Setup, console: Console) -> list[Row]:
    """Returns a row for each world; takes minutes. Raises RunError, with its message, if a run fails."""
    todo = [setup.ideal, *setup.together]
    samples: list[list[list[Sample]]] = [[] for _ in todo]  # by world, round and, of those apart, host
    with runs.tidy(), console.progress(None, transient=True):
        places = range(len(todo))
        for place in runs.in_turn(places, setup.rounds, console, lambda place: todo[place].label):
            try:
                samples[place].append(_train(setup, todo[place]))
            except runs.Failed as error:
                raise RunError(f"{todo[place].label}: {error}") from None
    apart, together = samples[0], [[one for (one,) in found] for found in samples[1:]]
    alone = {todo[0].label: list(map(_all, apart))}
    if setup.has_shares:
        labels = [f"host {name} alone, {share} of a core" for name, share in zip(setup.hosts, setup.cpu, strict=True)]
        alone = dict(zip(labels, map(list, zip(*apart, strict=True)), strict=True))
    ideals = [_all(found).tokens_per_s for found in apart]
    found = {**alone, **dict(zip(setup.variants, together, strict=True))}
    return [_row(label, rounds, ideals) for label, rounds in found.items()]


def _train(setup: Setup, world: World) -> list[Sample]:
    """Returns the sample of one run, or of each host's."""
    config = world.config.replace("parallel", device="cpu", interface="", expect_ranks=0)
    lab = ("lab", "--hosts", str(len(setup.hosts)), "--cpu", ",".join(setup.cpu), "--rate", setup.rate, "--")
    with tempfile.TemporaryDirectory(prefix="paceline-scaling-") as scratch:
        folder = Path(scratch)
        for host, steps in _steps(setup, world).items():
            (folder / f"{host}.toml").write_text(to_toml(runs.only_steps(config, steps)))
        names = [f"run-{host}" for host in setup.hosts] if world.is_apart else ["run"]
        train = ["train", "--config", str(folder / f"{setup.hosts[0]}.toml"), "--out", str(folder / "run")]
        if world.is_apart:
            line = f'{_ALONE} --config "{folder}/$(hostname).toml" --out "{folder}/run-$(hostname)"'
            train = ["exec", "sh", "-c", line]
        runs.run_at_once(
            [([*runs.PACELINE, *lab, *train], environment_of_one(os.environ))], folder, end_by=signal.SIGTERM
        )
        return [sample_of(runs.training_rows(folder / name), world) for name in names]


def _steps(setup: Setup, world: World) -> dict[str, int]:
    """Returns how many steps each host makes: hosts alone that are n times as fast make n times as many, so that they
    end at about the same time."""
    steps = setup.steps + world.adapting_steps
    if not (world.is_apart and setup.has_shares):
        return dict.fromkeys(setup.hosts, steps)
    cores = [1.0 if share == UNLIMITED else float(share) for share in setup.cpu]
    return {host: round(steps * core / min(cores)) for host, core in zip(setup.hosts, cores, strict=True)}


def _all(found: Sequence[Sample]) -> Sample:
    """Returns the hosts' samples as one of all."""
    return replace(
        found[0],
        tokens_per_s=sum(one.tokens_per_s for one in found),
        step_ms=max(one.step_ms for one in found),
        sequences=tuple(count for one in found for count in one.sequences),
        idle_frac=tuple(idle for one in found for idle in one.idle_frac),
    )


def sample_of(rows: Sequence[dict[str, Any]], world: World) -> Sample:
    """Returns the medians of a run's steps after the warm-up, from rows of metrics.jsonl, and the mean idle time."""
    sequences = tuple(rows[-1]["rank_sequences"]) if rows else ()
    medians = scaling.summary(rows, sum(sequences) * world.config.data.seq_len, world.adapting_steps)
    balance = speeds(rows[WARM_UP_STEPS + world.adapting_steps :])
    assert balance is not None
    return Sample(**vars(medians), sequences=sequences, idle_frac=tuple(balance.idle_frac))


def _row(label: str, samples: Sequence[Sample], ideals: Sequence[float]) -> Row:
    return Row(
        label=label,
        rounds_tokens_per_s=tuple(one.tokens_per_s for one in samples),
        ideal_frac=ratio(samples, ideals),
        sequences=samples[-1].sequences,
        idle_frac=tuple(map(statistics.median, zip(*(one.idle_frac for one in samples), strict=True))),
        **medians(samples),
    )


# ---- tables, JSON ----


def terminal_table(setup: Setup, rows: Sequence[Row]) -> rich.table.Table:
    return table(_title(setup), COLUMNS, list(map(_cells, rows)))


def _title(setup: Setup) -> str:
    cores = "" if UNLIMITED in setup.cpu else f": {', '.join(setup.cpu)} of a core"
    batch = sequences_of(setup.config)
    return f"{len(setup.hosts)} hosts{cores}, links of {setup.rate}, {batch} sequences a step"


def _cells(row: Row) -> list[str]:
    cells = [row.label, f"{row.tokens_per_s:,.0f}", f"{row.ideal_frac:.1%}"]
    sent = f"{row.comm_bytes / 1e6:.1f}" if row.comm_bytes else ""
    idle = ", ".join(f"{100 * frac:.0f}" for frac in row.idle_frac) if row.comm_bytes else ""
    exposed = f"{row.exposed_ms:.0f}" if row.comm_bytes else ""
    return [*cells, sent, exposed, f"{row.step_ms:.1f}", ", ".join(map(str, row.sequences)), idle]


def markdown(setup: Setup, rows: Sequence[Row]) -> str:
    lines = [f"**{_title(setup)}**", "", *markdown_table(COLUMNS, list(map(_cells, rows))), ""]
    return "\n".join([*lines, f"{machine()}; {medians_of(setup.rounds, setup.steps)}: `{command_line()}`", ""])


def as_json(setup: Setup, rows: Sequence[Row]) -> str:
    return document(setup, cpu=setup.cpu, rate=setup.rate, rows=list(map(asdict, rows)))
