"""`paceline bench scaling`: what a second rank, or a second host, brings; measured, and told where the rest went.

Every line of the table is `paceline train`, run as people run it, and read off its metrics.jsonl. Each rank has as many
threads as every other and is pinned to cores of its own, in every world. What a world is held against:

    alone       one rank; the ideal of n ranks is n times its tokens/s, of as many as there are cores for
    apart       n such ranks at once that know nothing of each other. They share what no program can divide: memory
                bandwidth, caches, clock rate, heat. What they lack of the ideal is the machine's doing
    together    the n ranks of one world. What they lack of `apart` is the price of being one: waiting for each other,
                and, where the batch is divided, what each rank still does in full

so efficiency = machine x synchronisation. Strong scaling keeps the step's batch and divides it; weak scaling keeps a
rank's share. All worlds take their turn in each round, so that a machine that grows slower is fair to all.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.base import units
from paceline.base.errors import RunError
from paceline.bench import runs
from paceline.bench.scaling_worlds import Failed, Starter
from paceline.config import Config, to_toml
from paceline.record.console import Console

Kind = Literal["strong", "weak"]
WARM_UP_STEPS = 3  # left out: the first step allocates, the next two still find their pace
_APART_MS = 1000.0  # ranks apart begin at about the same moment: of each so much is left out at either end
_LEAST_BENT = 0.9  # of the ideal; below it a table has a bend worth a word
LOCAL_RANKS_OF_A_PROBE = 2  # loopback is the same for any two


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is measured, and with what each rank computes."""

    config: Config
    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]  # ranks on this machine; 1 first
    cores: tuple[int, ...]  # one hardware thread of each core; none: ranks are not pinned (GPUs, macOS)
    threads: int
    device: Literal["cpu", "cuda"]
    has_gpu: bool = False  # beside the CPU ranks
    hosts: int = 0  # of the lab; 0: no such row
    host_ranks: int = 1
    rates: tuple[str, ...] = ()
    steps: int = 12
    rounds: int = 3

    @property
    def batch(self) -> int:
        """Sequences in a step of one rank alone."""
        train = self.config.train
        return train.global_batch_size or max(1, round(train.global_batch_tokens / self.config.data.seq_len))

    @property
    def num_places(self) -> int:
        """Ranks for which there are cores."""
        return max(1, len(self.cores) // self.threads) if self.cores else self.counts[-1]


@dataclass(frozen=True, kw_only=True)
class World:
    """One thing to measure."""

    kind: Kind
    ranks: int
    batch: int  # sequences in a step of the whole world
    hosts: int = 1
    rate: str = ""  # of the lab's links
    is_apart: bool = False  # as many worlds of one
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def label(self) -> str:
        """For people."""
        if self.hosts > 1:
            return f"{self.hosts} hosts, {self.rate}"
        noun = "GPU" if self.device == "cuda" else "rank"
        return f"{self.ranks} {noun}{'s'[: self.ranks > 1]}{' apart' if self.is_apart else ''}"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a world: medians over its steps after the warm-up."""

    tokens_per_s: float  # of ranks apart this is all there is
    step_ms: float = 0.0
    comm_ms: float = 0.0  # a collective was under way on rank 0
    exposed_ms: float = 0.0  # of it, what a rank stood still for; mean over ranks
    spread_ms: float = 0.0  # between the rank that came first to the collective and the one that came last
    comm_bytes: float = 0.0  # that a rank sends


@dataclass(frozen=True, kw_only=True)
class Row:
    """One world against its ideal: medians over the rounds. Where it could not be measured only `problem` counts."""

    kind: Kind
    label: str
    ranks: int
    hosts: int
    rate: str
    batch: int
    shares_cores: bool
    problem: str = ""
    tokens_per_s: float = 0.0
    rounds_tokens_per_s: tuple[float, ...] = ()
    ideal_tokens_per_s: float = 0.0
    efficiency: float | None = None  # of the ideal, a fraction; None: of another kind of device
    machine: float | None = None  # the ranks apart, of the ideal
    step_ms: float = 0.0
    comm_ms: float = 0.0
    exposed_ms: float = 0.0
    spread_ms: float = 0.0
    comm_bytes: float = 0.0
    link_bytes_per_s: float | None = None  # payload, each way while both ways are busy; None: not measured

    @property
    def synchronisation(self) -> float | None:
        """The ranks together, of the ranks apart, a fraction."""
        return self.efficiency / self.machine if self.efficiency is not None and self.machine else None

    @property
    def computed_comm_ms(self) -> float | None:
        """What the bytes take at the link's bandwidth."""
        return 1e3 * self.comm_bytes / self.link_bytes_per_s if self.link_bytes_per_s and self.ranks > 1 else None

    @property
    def exposed_frac(self) -> float:
        """Of the step."""
        return self.exposed_ms / self.step_ms if self.step_ms else 0.0

    @property
    def spread_frac(self) -> float:
        """Of the step."""
        return self.spread_ms / self.step_ms if self.step_ms else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values; fractions and times that follow from others included."""
        derived = ("synchronisation", "computed_comm_ms", "exposed_frac", "spread_frac")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class Scaling:
    """The whole measurement."""

    setup: Setup
    rows: tuple[Row, ...]
    machine: str
    seconds: float

    def of(self, kind: Kind) -> list[Row]:
        """Returns the rows of one kind, in order."""
        return [row for row in self.rows if row.kind == kind]

    def sentences(self) -> list[str]:
        """Returns, for each kind, where it bends and why, in words."""
        return [where_it_bends(self.of(kind)) for kind in self.setup.kinds]


def worlds(setup: Setup) -> list[World]:
    """Returns everything that is to be measured, each once: one rank is the same in both kinds, and ranks apart know of
    no hosts."""
    found: list[World] = []
    for world in (world for kind in setup.kinds for world in of_kind(setup, kind)):
        found.append(_as_measured(world))
        if world.ranks > 1:
            found.append(_apart(setup, world.ranks))
    return list(dict.fromkeys(found))


def of_kind(setup: Setup, kind: Kind) -> list[World]:
    """Returns the worlds of one table, in its order."""
    found = [_world(setup, kind, ranks) for ranks in setup.counts]
    many = setup.hosts * setup.host_ranks
    found += [_world(setup, kind, many, hosts=setup.hosts, rate=rate) for rate in setup.rates if setup.hosts]
    return [*found, _world(setup, kind, 1, device="cuda")] if setup.has_gpu else found


def _world(setup: Setup, kind: Kind, ranks: int, **more: Any) -> World:
    batch = setup.batch * (ranks if kind == "weak" else 1)
    return World(kind=kind, ranks=ranks, batch=batch, **{"device": setup.device, **more})


def _apart(setup: Setup, ranks: int) -> World:
    """Each as if it were alone, so that nothing differs from that but the company: the same for both kinds."""
    return World(kind="strong", ranks=ranks, batch=setup.batch * ranks, is_apart=True, device=setup.device)


def _as_measured(world: World) -> World:
    """The world that stands for this one: where one rank is the whole world there is but one kind."""
    if world.ranks > 1 or world.kind == "strong":
        return world
    return World(kind="strong", ranks=1, batch=world.batch, device=world.device)


# ---- measuring ----


@dataclass
class Found:
    """What the rounds gave so far."""

    samples: dict[World, list[Sample]] = field(default_factory=dict)
    problems: dict[World, str] = field(default_factory=dict)
    links: dict[tuple[int, str], float | None] = field(default_factory=dict)  # by hosts and rate


def measure(setup: Setup, console: Console, machine: str) -> Scaling:
    """Returns the table of scaling of this machine; some minutes. Raises RunError where one rank alone fails: the ideal
    of everything else. Another world that fails, or that this machine refuses, says so in its row."""
    began = time.monotonic()
    todo, found = worlds(setup), Found()
    with runs.tidy(), tempfile.TemporaryDirectory(prefix="paceline-scaling-") as scratch:
        starter = Starter(Path(scratch), cores=setup.cores, threads=setup.threads)
        with console.progress(len(todo) * setup.rounds, transient=True):
            for number in range(setup.rounds):
                for place, world in enumerate(todo):
                    _tell(console, setup, number * len(todo) + place, len(todo), world, began)
                    _take(setup, starter, world, found)
    return Scaling(setup, tuple(tabulate(setup, found)), machine, time.monotonic() - began)


def _tell(console: Console, setup: Setup, done: int, of: int, world: World, began: float) -> None:
    facts = f"{world.kind}, {world.label}"
    if done >= of:  # a round has shown how long one takes
        left = (time.monotonic() - began) / done * (of * setup.rounds - done)
        facts += f"  {units.duration(left)} left"
    console.advance(done, f"round {1 + done // of} of {setup.rounds}", facts)


def _take(setup: Setup, starter: Starter, world: World, found: Found) -> None:
    """Measures a world once. What cannot run is not tried again."""
    if world in found.problems:
        return
    try:
        found.samples.setdefault(world, []).append(_sample(setup, starter, world, found))
        link = (world.hosts, world.rate)
        if world.ranks > 1 and not world.is_apart and link not in found.links:
            found.links[link] = _link(starter, world)
    except Failed as error:
        found.problems[world] = str(error)
        if world.ranks == 1 and world.device == setup.device:
            raise RunError(f"one rank alone, against which all else is measured, failed: {error}") from None


def _sample(setup: Setup, starter: Starter, world: World, found: Found) -> Sample:
    """Trains a world for some steps and returns what its records say."""
    seq_len = setup.config.data.seq_len
    if world.is_apart:
        margin = math.ceil(_APART_MS / _alone(setup, found)[-1].step_ms)
        text = to_toml(_config(setup, world, setup.batch, 2 * margin))
        trained = starter.train_apart(text, world.ranks, world.device)
        return Sample(tokens_per_s=sum(_summary(run, setup.batch * seq_len, margin).tokens_per_s for run in trained))
    text = to_toml(_config(setup, world, world.batch))
    if world.hosts > 1:
        run = starter.train_in_lab(text, world.hosts, world.ranks // world.hosts, world.rate)
    else:
        run = starter.train(text, world.ranks)
    return _summary(run, world.batch * seq_len)


def _link(starter: Starter, world: World) -> float | None:
    """Bytes a second between two ranks of this world; None where that could not be measured."""
    try:
        if world.hosts > 1:
            return starter.bandwidth_in_lab(world.hosts, world.rate)
        return starter.bandwidth(min(world.ranks, LOCAL_RANKS_OF_A_PROBE))
    except Failed:
        return None


def _config(setup: Setup, world: World, batch: int, more_steps: int = 0) -> Config:
    """The config of a run that does nothing but steps."""
    config = setup.config.replace(
        "train",
        steps=setup.steps + more_steps,
        tokens=0,
        tokens_per_param=0.0,
        time_budget=0.0,
        global_batch_size=batch,
        global_batch_tokens=0,
        device_batch_size=min(setup.config.train.device_batch_size, batch),
        eval_every=-1,
        sample_tokens=0,
        stop_at_step=0,
        stop_after=0.0,
        init_from="",
    )
    config = config.replace("checkpoint", every=0, keep_best=False).replace("log", every=1)
    return config.replace(
        "parallel", threads=setup.threads, device=world.device, check_every=0, interface="", expect_ranks=0
    )


def _summary(run: Path, tokens: int, margin: int = 0) -> Sample:
    """What a run's steps say, without the warm-up and so many more at either end. tokens: of a step."""
    rows = runs.training_rows(run)
    steady = rows[WARM_UP_STEPS + margin : len(rows) - margin]
    if not steady:
        raise Failed(f"it left {len(rows)} steps in metrics.jsonl")

    def median(values: list[float]) -> float:
        return float(statistics.median(values))

    step_ms = median([row["step_ms"] for row in steady])
    return Sample(
        tokens_per_s=1e3 * tokens / step_ms,
        step_ms=step_ms,
        comm_ms=median([row["comm_ms"] for row in steady]),
        exposed_ms=median([statistics.fmean(row["rank_exposed_comm_ms"]) for row in steady]),
        spread_ms=median([max(row["rank_compute_ms"]) - min(row["rank_compute_ms"]) for row in steady]),
        comm_bytes=median([row["comm_bytes"] for row in steady]),
    )


# ---- rows ----


def tabulate(setup: Setup, found: Found) -> list[Row]:
    """Returns the rows of all tables from what was measured."""
    return [_row(setup, found, world) for kind in setup.kinds for world in of_kind(setup, kind)]


def _row(setup: Setup, found: Found, world: World) -> Row:
    row = Row(
        kind=world.kind,
        label=world.label,
        ranks=world.ranks,
        hosts=world.hosts,
        rate=world.rate,
        batch=world.batch,
        shares_cores=bool(setup.cores) and world.ranks > setup.num_places,
    )
    measured = _as_measured(world)
    samples = found.samples.get(measured, [])
    if measured in found.problems or not samples:
        return replace(row, problem=found.problems.get(measured, "not measured"))
    # Of one round, in which both were measured within minutes, and then the median of the rounds' ratios.
    ideals = [min(world.ranks, setup.num_places) * one.tokens_per_s for one in _alone(setup, found)]
    apart = found.samples.get(_apart(setup, world.ranks), [])
    row = replace(
        row,
        tokens_per_s=_median(samples, "tokens_per_s"),
        rounds_tokens_per_s=tuple(sample.tokens_per_s for sample in samples),
        ideal_tokens_per_s=statistics.median(ideals),
        step_ms=_median(samples, "step_ms"),
        comm_ms=_median(samples, "comm_ms"),
        exposed_ms=_median(samples, "exposed_ms"),
        spread_ms=_median(samples, "spread_ms"),
        comm_bytes=_median(samples, "comm_bytes"),
        link_bytes_per_s=found.links.get((world.hosts, world.rate)),
    )
    if world.device != setup.device:
        return row
    return replace(row, efficiency=_ratio(samples, ideals), machine=_ratio(apart, ideals) if apart else None)


def _alone(setup: Setup, found: Found) -> list[Sample]:
    """One rank, of each round."""
    return found.samples[_as_measured(_world(setup, "strong", 1))]


def _median(samples: list[Sample], name: str) -> float:
    return float(statistics.median(getattr(sample, name) for sample in samples))


def _ratio(samples: list[Sample], ideals: list[float]) -> float:
    return statistics.median(sample.tokens_per_s / ideal for sample, ideal in zip(samples, ideals, strict=False))


# ---- words ----


def where_it_bends(rows: Sequence[Row]) -> str:
    """Returns the reading of one kind's rows: up to where they follow the ideal, and what holds back those that do not,
    the largest cause of each."""
    kind = rows[0].kind
    compared = [row for row in rows if row.efficiency is not None and row.ranks > 1 and not row.problem]
    if not compared:
        return f"{kind} scaling: no world of several ranks was measured"
    bent = [row for row in compared if (row.efficiency or 0.0) < _LEAST_BENT]
    if not bent:
        last = compared[-1]
        return f"{kind} scaling does not bend up to {last.label}: {last.efficiency:.0%} of the ideal"
    said = "; ".join(f"at {row.label} ({row.efficiency:.0%} of the ideal): {_cause(row)}" for row in bent)
    return f"{kind} scaling bends {said}"


def _cause(row: Row) -> str:
    """What takes most of what this row lacks of its ideal."""
    if row.shares_cores:
        return f"{row.ranks} ranks share the cores of fewer, so that each more is one more to wait for"
    company = 1 - (row.machine or 1.0)
    waits = max(0.0, row.exposed_frac - row.spread_frac)
    rest = 1 - (row.efficiency or 0.0) - company - row.exposed_frac
    what = "the network" if row.hosts > 1 else "the other ranks' gradients"
    causes = {
        f"a step waits {waits:.0%} of its time for {what}: {_all_reduce(row)}": waits,
        f"a step waits {row.spread_frac:.0%} of its time for the rank that is last": row.spread_frac,
        f"it is the machine that the ranks share, not their synchronisation: {row.ranks} separate runs at once reach "
        f"{row.machine or 0:.0%}": company,
        f"{rest:.0%} of a step go to what ranks neither divide nor wait for: the update, a step's fixed costs, and "
        "carrying gradients on cores that compute": rest,
    }
    return max(causes, key=lambda cause: causes[cause])


def _all_reduce(row: Row) -> str:
    hidden = _ms(max(0.0, row.comm_ms - row.exposed_ms))
    computed = f" ({_ms(row.computed_comm_ms)} by the link's bandwidth)" if row.computed_comm_ms else ""
    size = units.size(row.comm_bytes)
    return f"a rank's {size} take {_ms(row.comm_ms)} ms{computed}, of which compute hides {hidden}"


def _ms(value: float) -> str:
    """Milliseconds in three figures, or whole ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def physical_cores(limit: int) -> tuple[int, ...]:
    """Returns one hardware thread of each core that this process may use, at most so many; none where a process cannot
    be pinned (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    first: dict[str, int] = {}
    for thread in sorted(os.sched_getaffinity(0)):
        path = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
        first.setdefault(path.read_text().strip() if path.exists() else str(thread), thread)
    return tuple(first.values())[:limit]
