"""`paceline bench loader`: what feeding costs, and that it costs a rank the same in any world.

Everything is read by `Loader.micro_batches` in the calling thread, as a step without prefetching would, from files that
are in the page cache once a first round has read them. Ranks of larger worlds are simulated: a loader is told a rank
and a world size as plain integers. Beside it stands the wrapper that draws every rank's sequences and keeps its own,
which is what a loader that knows nothing of ranks comes to.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.data.blend import Blend
from paceline.data.loader import Loader, MicroBatch
from paceline.data.plan import BatchPlan
from paceline.data.sequences import Sequences

WORLDS = (1, 8, 64, 1024)
_ROUNDS = 7  # alternated over the worlds, medians shown: a machine whose speed drifts is fair to all
_DRAWN_SEQUENCES = 2048  # at least; of the wrapper, whose world of 1024 reads a thousand times as much


@dataclass(frozen=True)
class Rate:
    """What this rank's batches cost, one after the other."""

    tokens_per_s: float
    us_per_batch: float
    mb_per_s: float  # read from files, 10^6 bytes


@dataclass(frozen=True)
class WorldCost:
    """What a sequence costs one rank of a world; every rank has as many of them a step in every world."""

    world_size: int
    cpu_us_per_sequence: float
    bytes_per_sequence: float
    drawn_cpu_us_per_sequence: float  # the wrapper that draws all sequences of a step and keeps its own
    drawn_bytes_per_sequence: float


@dataclass(frozen=True)
class LoaderReport:
    """All that was measured, with what it was measured on."""

    data: str
    batch: int
    seq_len: int
    rate: Rate
    worlds: tuple[WorldCost, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists, text and numbers."""
        return {**asdict(self), "worlds": [asdict(row) for row in self.worlds]}


def measure(
    blend: Blend,
    sequences: Sequences,
    *,
    batch: int = 8,
    seed: int = 1337,
    steps: int = 500,
    worlds: Sequence[int] = WORLDS,
    say: Callable[[str], None] = lambda _: None,
) -> LoaderReport:
    """Returns rates and costs of micro-batches of `batch` sequences, one a rank and step; some seconds.

    `sequences` are `blend.training(...)`; they end where the data does, and then begin again in another order.
    """
    say("bench: one rank")
    rate = _rate(blend, Loader(sequences, BatchPlan(batch, batch, 1), 0, seed), steps)
    loaders = [Loader(sequences, BatchPlan(batch * size, batch, size), size // 2, seed) for size in worlds]
    costs: list[list[_Cost]] = [[] for _ in loaders]
    for number in range(_ROUNDS + 1):
        say(f"bench: worlds, round {number} of {_ROUNDS}")
        for found, loader in zip(costs, loaders, strict=True):
            found.append(_own(blend, loader, steps))
    rows = []
    for size, loader, found in zip(worlds, loaders, costs, strict=True):
        say(f"bench: drawing everything in a world of {size}")
        own, drawn = _median(found[1:]), _drawn(blend, loader)
        rows.append(WorldCost(size, own.cpu_us, own.num_bytes, drawn.cpu_us, drawn.num_bytes))
    return LoaderReport(blend.name, batch, sequences.seq_len, rate, tuple(rows))


@dataclass(frozen=True)
class _Cost:
    """Of a sequence that the rank keeps."""

    cpu_us: float
    num_bytes: float


def _rate(blend: Blend, loader: Loader, steps: int) -> Rate:
    times, before = [], _bytes_read(blend)
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for step in range(steps):
            loader.micro_batches(step)
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[1:])
    tokens = steps * loader.plan.global_batch_size * loader.seq_len
    num_bytes = (_bytes_read(blend) - before) / len(times)
    return Rate(tokens / seconds, 1e6 * seconds / steps, num_bytes / seconds / 1e6)


def _own(blend: Blend, loader: Loader, steps: int) -> _Cost:
    """As it is: the rank's own."""
    num_sequences = steps * loader.plan.device_batch_size
    return _cost(blend, num_sequences, lambda: _each(loader, range(steps)))


def _drawn(blend: Blend, loader: Loader) -> _Cost:
    """As a wrapper does it: all sequences of a step are made, of which the rank keeps its own."""
    plan = loader.plan
    alone = BatchPlan(plan.global_batch_size, plan.device_batch_size, 1)
    whole = Loader(loader.sequences, alone, 0, loader.seed)
    steps = range(max(1, _DRAWN_SEQUENCES // plan.global_batch_size))

    def draw() -> None:
        for step in steps:
            batches: list[MicroBatch] = whole.micro_batches(step)
            del batches[: loader.rank], batches[1:]

    return _cost(blend, len(steps) * plan.device_batch_size, draw)


def _each(loader: Loader, steps: range) -> None:
    for step in steps:
        loader.micro_batches(step)


def _cost(blend: Blend, num_sequences: int, work: Callable[[], None]) -> _Cost:
    bytes_before, cpu_before = _bytes_read(blend), time.process_time()
    work()
    cpu_s = time.process_time() - cpu_before
    return _Cost(1e6 * cpu_s / num_sequences, (_bytes_read(blend) - bytes_before) / num_sequences)


def _median(costs: list[_Cost]) -> _Cost:
    return _Cost(statistics.median(c.cpu_us for c in costs), statistics.median(c.num_bytes for c in costs))


def _bytes_read(blend: Blend) -> int:
    return sum(dataset.train.bytes_read for dataset in blend.datasets)
