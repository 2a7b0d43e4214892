"""`paceline bench loader`: the cost of a rank's batches, which does not depend on the world size.

`Loader.micro_batches` reads everything in the calling thread, from files in the page cache. Ranks of larger worlds are
simulated: a loader takes rank and world size as integers. For comparison a wrapper draws the sequences of all ranks and
keeps its own, as one must with a loader without ranks.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import rich.table

from paceline.data.blend import Blend
from paceline.data.loader import Loader
from paceline.data.plan import BatchPlan
from paceline.data.sequences import Sequences
from paceline.record.console import table

WORLDS = (1, 8, 64, 1024)
_ROUNDS = 7  # worlds take turns in each, since a machine's speed may drift
_SEED = 1337
_DRAWN_SEQUENCES = 2048  # least number for the wrapper, which reads 1000 times as much in a world of 1024


@dataclass(frozen=True)
class Rate:
    tokens_per_s: float
    us_per_batch: float
    mb_per_s: float  # read from files, in 10^6 bytes


@dataclass(frozen=True)
class WorldCost:
    """The cost of a sequence on one rank of a world; every rank has equally many a step in every world."""

    world_size: int
    cpu_us_per_sequence: float
    bytes_per_sequence: float
    drawn_cpu_us_per_sequence: float  # the wrapper that draws all sequences of a step and keeps its own
    drawn_bytes_per_sequence: float


@dataclass(frozen=True)
class LoaderReport:
    data: str
    batch: int
    seq_len: int
    rate: Rate
    worlds: tuple[WorldCost, ...]


def measure(
    blend: Blend,
    sequences: Sequences,
    *,
    batch: int = 8,
    steps: int = 500,
    worlds: Sequence[int] = WORLDS,
    say: Callable[[str], None] = lambda _: None,
) -> LoaderReport:
    """Returns rates and costs of micro-batches of `batch` sequences, one a rank and step, in some seconds. `sequences`
    are `blend.training(...)`; after their end they begin again in another order."""
    say("bench: one rank")
    rate = _rate(blend, Loader(sequences, BatchPlan(batch, batch, 1), 0, _SEED), steps)
    loaders = [Loader(sequences, BatchPlan(batch * size, batch, size), size // 2, _SEED) for size in worlds]
    own: list[list[tuple[float, float]]] = [[] for _ in loaders]
    for number in range(_ROUNDS + 1):
        say(f"bench: worlds, round {number} of {_ROUNDS}")
        for costs, loader in zip(own, loaders, strict=True):
            costs.append(_cost(blend, loader, steps, batch))
    rows = []
    for size, loader, costs in zip(worlds, loaders, own, strict=True):
        say(f"bench: drawing everything in a world of {size}")
        cpu_us, num_bytes = (statistics.median(values) for values in zip(*costs[1:], strict=True))
        everything = Loader(sequences, BatchPlan(batch * size, batch, 1), 0, _SEED)
        drawn = _cost(blend, everything, max(1, _DRAWN_SEQUENCES // (batch * size)), batch, keep=loader.rank)
        rows.append(WorldCost(size, cpu_us, num_bytes, *drawn))
    return LoaderReport(blend.name, batch, sequences.seq_len, rate, tuple(rows))


def _rate(blend: Blend, loader: Loader, steps: int) -> Rate:
    times, before = [], _bytes_read(blend)
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for step in range(steps):
            loader.micro_batches(step)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[1:])
    tokens = steps * loader.plan_at(0).global_batch_size * loader.seq_len
    num_bytes = (_bytes_read(blend) - before) / len(times)
    return Rate(tokens / seconds, 1e6 * seconds / steps, num_bytes / seconds / 1e6)


def _cost(blend: Blend, loader: Loader, steps: int, batch: int, keep: int = 0) -> tuple[float, float]:
    """Returns CPU microseconds and bytes read, for each sequence that is kept: one micro-batch a step."""
    bytes_before, cpu_before = _bytes_read(blend), time.process_time()
    for step in range(steps):
        _ = loader.micro_batches(step)[keep]
    cpu_s = time.process_time() - cpu_before
    return 1e6 * cpu_s / (steps * batch), (_bytes_read(blend) - bytes_before) / (steps * batch)


def _bytes_read(blend: Blend) -> int:
    return sum(dataset.train.bytes_read for dataset in blend.datasets)


def summary(report: LoaderReport) -> str:
    rate = report.rate
    return (
        f"{report.data}: {rate.tokens_per_s / 1e6:.1f}M tokens/s in one thread, {rate.us_per_batch:.0f} us for "
        f"{report.batch} sequences of {report.seq_len}, {rate.mb_per_s:.0f} MB/s read"
    )


def worlds_table(report: LoaderReport) -> rich.table.Table:
    columns = ["world size", "CPU us a sequence", "bytes", "drawing all: CPU us", "bytes"]
    rows = [
        [
            f"{row.world_size}",
            f"{row.cpu_us_per_sequence:.2f}",
            f"{row.bytes_per_sequence:.0f}",
            f"{row.drawn_cpu_us_per_sequence:.1f}",
            f"{row.drawn_bytes_per_sequence:.0f}",
        ]
        for row in report.worlds
    ]
    return table("What a sequence costs its rank, and a wrapper that draws all and keeps its own", columns, rows)
