"""What a rank's part of a step costs in worlds of 1, 8 and 64: `paceline.share` against drawing everything.

Every rank has 16 samples a step in every world, so what a rank does should not grow. Ranks of larger worlds are
simulated: `share` is told a rank and a world size, and a group that answers for this rank alone. What the ranks say to
each other, 16 bytes a step for samplers and lanes, is left out. All runs in one thread of one process, CPU time of the
process counts, and worlds take turns, so that a machine whose speed drifts is fair to all. Sources:

- a data set: images of 32 x 32 with three colours, made from their number, cropped and flipped at random;
- a DataLoader over it (no workers: their CPU time would not be this process's), shuffled;
- the same by a sampler with weights, whose numbers every rank draws all of: it grows, and by how much is shown;
- a function that packs documents of random lengths into rows of 1,025 tokens on the fly.

Beside each the way that draws everything: the batch of the whole world is read, or packed, and 16 of it are kept.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate

from paceline.replica.share import share
from paceline.world.calls import Calls
from paceline.world.group import Group, LocalGroup

WORLDS = (1, 8, 64)
PER_RANK, ROW_TOKENS, VOCAB, MEAN_DOCUMENT = 16, 1025, 50257, 400
NUM_SAMPLES = 1 << 20
Batches = Iterator[Any]


@dataclass(frozen=True)
class Simulated:
    """A rank in the middle of a world that is not there."""

    rank: int
    world_size: int
    group: Group = field(default_factory=lambda: LocalGroup(torch.device("cpu")))
    calls: Calls = field(default_factory=Calls)


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Sample i from its number; a crop and a flip at random, as image classifiers train with."""

    def __init__(self) -> None:
        self._pool = np.random.default_rng(0).integers(0, 256, (1024, 3, 40, 40), dtype=np.uint8)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left, flip = torch.randint(8, (3,)).tolist()
        crop = torch.from_numpy(self._pool[index % 1024, :, top : top + 32, left : left + 32])
        image = (crop.float() - 127.5) / 127.5
        return image.flip(2) if flip % 2 else image, index % 10


def documents(generator: np.random.Generator) -> Iterator[np.ndarray[Any, Any]]:
    """Token ids, documents of 400 on the mean, without end."""
    while True:
        yield generator.integers(0, VOCAB, 1 + int(generator.exponential(MEAN_DOCUMENT)))


def packed_rows(generator: np.random.Generator) -> Iterator[torch.Tensor]:
    """Rows of 1,025 tokens, one document after the other."""
    left = np.empty(0, np.int64)
    for document in documents(generator):
        left = np.concatenate([left, document])
        while left.size >= ROW_TOKENS:
            yield torch.from_numpy(left[:ROW_TOKENS])
            left = left[ROW_TOKENS:]


def lane(number: int, num_lanes: int) -> Iterator[torch.Tensor]:
    """The rows that are at this place of every batch."""
    return packed_rows(np.random.default_rng((0, number)))


def loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader(Images(), batch_size, shuffle=True)


def weighted(batch_size: int) -> DataLoader[Any]:
    return DataLoader(Images(), batch_size, sampler=WeightedRandomSampler(torch.ones(NUM_SAMPLES), NUM_SAMPLES))


def own(source: Callable[[int], Any], world_size: int) -> Batches:
    """A rank's steps by `share`, without end."""
    given: dict[str, Any] = {"micro_batch_size": PER_RANK}
    made = source(PER_RANK * world_size)
    if not isinstance(made, DataLoader):
        given["batch_size"] = PER_RANK * world_size
    batches = share(made, Simulated(world_size // 2, world_size), **given)
    while True:
        yield from batches.flat()


def drawn_loader(make: Callable[[int], DataLoader[Any]], world_size: int) -> Batches:
    """The batch of all ranks is read, and this rank's part of it kept."""
    begin = world_size // 2 * PER_RANK
    while True:
        for images, labels in make(PER_RANK * world_size):
            yield images[begin : begin + PER_RANK], labels[begin : begin + PER_RANK]


def drawn_rows(_: Any, world_size: int) -> Batches:
    """All rows are packed, and this rank's kept."""
    rows, begin = packed_rows(np.random.default_rng(0)), world_size // 2 * PER_RANK
    while True:
        batch = list(islice(rows, PER_RANK * world_size))
        yield default_collate(batch[begin : begin + PER_RANK])


SOURCES: dict[str, tuple[Callable[[int], Any], Callable[[Any, int], Batches]]] = {
    "data set": (lambda _: Images(), lambda _, world_size: drawn_loader(loader, world_size)),
    "DataLoader, shuffled": (loader, drawn_loader),
    "DataLoader, WeightedRandomSampler": (weighted, drawn_loader),
    "function that packs on the fly": (lambda _: lane, drawn_rows),
}


def cpu_us_a_step(batches: Batches, steps: int) -> float:
    began = time.process_time()
    for _ in range(steps):
        next(batches)
    return 1e6 * (time.process_time() - began) / steps


def measure(name: str, rounds: int, steps: int) -> None:
    make, drawn = SOURCES[name]
    sides: dict[tuple[str, int], tuple[Batches, int]] = {}
    for world_size in WORLDS:
        sides["own", world_size] = own(make, world_size), steps
        sides["drawn", world_size] = drawn(make, world_size), max(1, steps // world_size // 4)
    times: dict[tuple[str, int], list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 1):  # the first is not counted: it opens what is read, and fills caches
        for side, (batches, count) in sides.items():
            times[side].append(cpu_us_a_step(batches, count))
    medians = {side: statistics.median(values[1:]) for side, values in times.items()}
    for world_size in WORLDS:
        ours, all_of_it = medians["own", world_size], medians["drawn", world_size]
        print(
            f"{name if world_size == WORLDS[0] else '':<36} {world_size:>6} {ours:12.1f} "
            f"{ours / medians['own', 1]:12.3f} {all_of_it:16.1f} {all_of_it / ours:10.1f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=256, help="in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'CPU us of a rank a step':<36} {'world':>6} {'share':>12} {'of world 1':>12} {'drawing all':>16}")
    for name in SOURCES:
        measure(name, options.rounds, options.steps)


if __name__ == "__main__":
    main()
