"""A shared loader gives what the plain one would have given: the same samples, order, augmentation, generators."""

import json
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from simulated import SimulatedRank
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from paceline.replica.share import share
from paceline.world.runtime import World

States = tuple[Any, ...]


class Augmented(Dataset[tuple[int, int, int]]):
    """Sample i is (i, two numbers drawn at random); in workers alone, the random ones may be left out elsewhere."""

    def __init__(self, in_process: bool = True) -> None:
        self.in_process = in_process

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        if not self.in_process and get_worker_info() is None:
            return index, 0, 0
        return index, int(torch.randint(1 << 30, ())), int(np.random.randint(1 << 30))


class Counting(Sampler[int]):
    """Each pass has another order: by a count that it keeps, or by a generator of its own."""

    def __init__(self, own: np.random.Generator | None = None) -> None:
        self.own, self.count = own, 0

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        yield from (np.arange(13) * self.count % 13 if self.own is None else self.own.permutation(13)).tolist()


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


DATA = Augmented()
WEIGHTS = [0.1 * (1 + number % 5) for number in range(13)]
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=generator(3)),
    "drop_last": lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=37)),
    "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(2, 12))),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler(WEIGHTS, 17, generator=generator(5))),
    "batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(13)), 5, drop_last=True)),
    "counting": lambda: DataLoader(DATA, 4, sampler=Counting()),
    "own numpy generator": lambda: DataLoader(DATA, 4, sampler=Counting(np.random.default_rng(3))),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, **WORKERS),
    "persistent": lambda: DataLoader(DATA, 4, shuffle=True, persistent_workers=True, **WORKERS),
}
Steps = list[list[list[int]]]  # [step][column] -> values
PASSES = 2


def seed(number: int = 7) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def states() -> States:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def put_back(found: States) -> None:
    torch.set_rng_state(found[0])
    np.random.set_state(found[1])
    random.setstate(found[2])


def read(batches: Any, steps: Steps) -> None:
    """One pass, with draws such as dropout's between the steps."""
    for batch in batches:
        steps.append([column.tolist() for column in batch])
        torch.rand(3)
        np.random.rand()


@pytest.mark.parametrize("name", LOADERS)
def test_one_process_reads_what_the_plain_loader_gives(name: str) -> None:
    """D4."""
    plain: Steps = []
    seed()
    loader = LOADERS[name]()
    for _ in range(PASSES):
        read(loader, plain)
    after = states()
    shared: Steps = []
    seed()
    batches = share(LOADERS[name](), SimulatedRank())
    for _ in range(PASSES):
        read(batches.flat(), shared)
    assert shared == plain
    assert str(states()) == str(after)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n == "workers" else ()) for n in LOADERS])
def test_ranks_together_read_the_samples_of_the_plain_loader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4. Where reading draws from the script's generator, the next pass's order depends on how much one process read;
    what workers draw does not."""
    monkeypatch.setattr(DATA, "in_process", False)
    seed()
    loader = LOADERS[name]()
    plain = [batch[0].tolist() for _ in range(PASSES) for batch in loader]
    ranks: list[list[list[int]]] = []
    for rank in range(3):
        seed()
        batches = share(LOADERS[name](), SimulatedRank(rank, 3))
        ranks.append(
            [[i for part in batch.draw() for i in part[0].tolist()] for _ in range(PASSES) for batch in batches]
        )
    assert [list(chain(*step)) for step in zip(*ranks, strict=True)] == plain


@pytest.mark.parametrize("name", LOADERS)
def test_a_resume_in_the_middle_of_a_pass_reads_what_is_left(name: str) -> None:
    """D4."""
    plain: Steps = []
    seed()
    batches = share(LOADERS[name](), SimulatedRank())
    kept: list[tuple[int, str, States]] = []
    for number in range(PASSES):
        if number == 1:  # between passes
            kept.append((len(plain), json.dumps(batches.state_dict()), states()))
        for batch in batches.flat():
            plain.append([column.tolist() for column in batch])
            torch.rand(3)
            if number == 1 and batches.step == 2:
                kept.append((len(plain), json.dumps(batches.state_dict()), states()))
    after = states()
    for count, state, generators in kept:
        seed(99)
        resumed = share(LOADERS[name](), SimulatedRank())
        resumed.load_state_dict(json.loads(state))
        put_back(generators)
        rest: Steps = []
        while resumed.epoch < PASSES:
            for batch in resumed.flat():
                rest.append([column.tolist() for column in batch])
                torch.rand(3)
        columns = slice(0, 1) if name in ("workers", "persistent") else slice(0, 3)
        assert [step[columns] for step in rest] == [step[columns] for step in plain[count:]]  # workers begin anew
        assert str(states()) == str(after)


# ---- streams ----


class Stream(IterableDataset[tuple[int, int]]):
    """Numbers, each worker its own ones, each beside a random one; a shuffle buffer draws at random, too."""

    def __init__(self, size: int = 23, only: int | None = None) -> None:
        self.size, self.only = size, only

    def __iter__(self) -> Iterator[tuple[int, int]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        buffer = []
        for number in range(first, self.size, step):
            if self.only is not None and number % 2 != self.only:
                continue
            buffer.append(number)
            if len(buffer) > 3:
                yield buffer.pop(int(torch.randint(4, ()))), random.randrange(1 << 30)
        for number in buffer:
            yield number, random.randrange(1 << 30)


def stream_loader(num_workers: int) -> DataLoader[Any]:
    return DataLoader(Stream(), 4, **(WORKERS | {"num_workers": num_workers} if num_workers else {}))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_gives_the_same_samples_on_any_number_of_ranks_and_resumes(num_workers: int) -> None:
    seed()
    loader = stream_loader(num_workers)
    passes = 1 if num_workers else 2
    plain = [[column.tolist() for column in batch] for _ in range(passes) for batch in loader]
    found: dict[int, list[Any]] = {}
    for world_size in (1, 3):
        ranks = []
        for rank in range(world_size):
            seed()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                batches = share(stream_loader(num_workers), SimulatedRank(rank, world_size))
            warned = [str(warning.message) for warning in caught]
            assert [("reads all of it" in text) for text in warned] == ([True] if rank == 0 and world_size > 1 else [])
            ranks.append(
                [
                    [row for part in batch.draw() for row in zip(*part, strict=True)]
                    for _ in range(passes)
                    for batch in batches
                ]
            )
        found[world_size] = [[(int(a), int(b)) for a, b in chain(*step)] for step in zip(*ranks, strict=True)]
        assert sorted(a for step in found[world_size][: len(plain) // passes] for a, _ in step) == list(range(23))
    assert found[1] == found[3]
    if num_workers:
        assert found[1] == [list(zip(*step, strict=True)) for step in plain]
    seed()
    begun = share(stream_loader(num_workers), SimulatedRank())
    for _, _ in zip(range(2), begun.resumed(), strict=False):
        pass
    seed(99)
    resumed = share(stream_loader(num_workers), SimulatedRank())
    resumed.load_state_dict(begun.state_dict() | {"step": 2})
    rest = [[(int(a), int(b)) for a, b in zip(*part, strict=True)] for part in resumed.flat()]
    assert rest == found[1][2 : len(plain) // passes]
    assert [column.tolist() for column in resumed.peek()]


def split_by_rank(world: World) -> str:
    with pytest.raises(Exception, match="at step 0 of the epoch, unlike rank 0") as caught:
        list(share(Stream(only=world.rank), world, batch_size=4))
    return str(caught.value)


def test_a_stream_that_is_split_by_rank_already_is_refused_on_all_ranks() -> None:
    said = run_ranks(split_by_rank, 2)
    assert said[0] == said[1]
    assert "the stream Stream gives other samples on rank 1" in said[0]
    assert "remove what makes it differ by rank" in said[0]
