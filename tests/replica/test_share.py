"""A sharded source: every sample once an epoch, at any world size, and no rank reads another's."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import run_ranks
from simulated import SimulatedRank
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.base.errors import UserError
from paceline.data.order import ids_at
from paceline.replica.batch import Batch, num_rows
from paceline.replica.share import Share, share
from paceline.world.runtime import World

IDLE_RANKS = "ignore:a step has fewer micro-batches"  # many of the simulated worlds have more ranks than that
pytestmark = pytest.mark.filterwarnings(IDLE_RANKS)


class Counted(Dataset[int]):
    """The numbers 0 .. size-1, which notes those that were read."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def of_step(batch: Batch) -> list[list[int]]:
    return [micro_batch.tolist() for micro_batch in batch.draw()]


def passes(shares: list[Share], number: int = 1) -> list[list[list[list[list[int]]]]]:
    """[pass][step][rank][micro-batch] -> samples, of ranks that go in step."""
    found = []
    for _ in range(number):
        steps = [[of_step(batch) for batch in one] for one in shares]
        assert len({len(ranks) for ranks in steps}) == 1, "a rank has fewer steps than another"
        found.append([list(ranks) for ranks in zip(*steps, strict=True)])
    return found


def micro_batches(step: list[list[list[int]]]) -> list[list[int]]:
    """All of a step, whoever has them."""
    return list(itertools.chain.from_iterable(step))


sizes = st.integers(1, 60)
small = st.integers(1, 17)


@given(sizes, small, small, st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 99))
@example(12, 4, 2, 2, False, True, 0)  # all batches are complete: drop_last drops none
def test_every_sample_once_an_epoch_in_batches_that_know_nothing_of_the_world(
    size: int, batch_size: int, micro: int, world_size: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    if drop_last and size < batch_size:
        return
    given = {"batch_size": batch_size, "micro_batch_size": micro, "shuffle": shuffle, "drop_last": drop_last}
    data = [Counted(size) for _ in range(world_size)]
    world = [share(one, SimulatedRank(rank, world_size), seed=seed, **given) for rank, one in enumerate(data)]
    (alone,) = [share(Counted(size), SimulatedRank(), seed=seed, **given)]
    whole = size // batch_size * batch_size if drop_last else size
    for epoch, (ours, theirs) in enumerate(zip(passes(world, 2), passes([alone], 2), strict=True)):
        assert len(ours) == len(alone) == len(world[0])
        expected = list(range(size)) if not shuffle else ids_at(seed, np.arange(size) + epoch * size, size).tolist()
        for number, (step, other) in enumerate(zip(ours, theirs, strict=True)):
            assert micro_batches(step) == micro_batches(other)
            batch = expected[number * batch_size : (number + 1) * batch_size]
            assert list(itertools.chain.from_iterable(micro_batches(step))) == batch
            assert all(len(micro_batch) == micro for micro_batch in micro_batches(step)[:-1])
            counts = [len(of_rank) for of_rank in step]
            assert max(counts) - min(counts) <= 1
        drawn = Counter(itertools.chain.from_iterable(itertools.chain.from_iterable(map(micro_batches, ours))))
        assert len(drawn) == whole
        assert set(drawn.values()) <= {1}
    assert sum(len(one.read) for one in data) == 2 * whole  # nothing was read for another rank


@given(sizes, small, small, st.integers(1, 7), st.integers(1, 7), st.integers(0, 200), st.integers(0, 9))
def test_a_resume_in_another_world_goes_on_exactly(
    size: int, batch_size: int, micro: int, before: int, after: int, stop: int, seed: int
) -> None:
    def world(world_size: int) -> list[Share]:
        return [
            share(
                Counted(size), SimulatedRank(rank, world_size), batch_size=batch_size, micro_batch_size=micro, seed=seed
            )
            for rank in range(world_size)
        ]

    def stream(shares: list[Share], count: int) -> list[list[list[int]]]:
        """The next steps, over passes."""
        found: list[list[list[int]]] = []
        while len(found) < count:
            for ranks in zip(*(one.resumed() for one in shares), strict=True):
                found.append([samples for of_rank in ranks for samples in of_step(of_rank)])
                if len(found) == count:
                    break
        return found

    stop %= 3 * -(-size // batch_size)
    straight = stream(world(1), stop + 5)
    first, second = world(before), world(after)
    began = stream(first, stop)
    states = [json.loads(json.dumps(one.state_dict())) for one in first[:1]]
    for one in second:
        one.load_state_dict(states[0])
    assert began + stream(second, 5) == straight


def documents(lengths: dict[int, int], opened: list[int]) -> Callable[[int, int], Iterator[int]]:
    """Lane i gives 100 i, 100 i + 1, ...; as many as it is long."""

    def lane(number: int, num_lanes: int) -> Iterator[int]:
        opened.append(number)
        assert num_lanes == len(lengths)
        return iter(range(100 * number, 100 * number + lengths[number]))

    return lane


def lanes_on_ranks(world: Any, lengths: dict[int, int], stop: int) -> tuple[Any, Any, list[int]]:
    opened: list[int] = []
    lanes = share(documents(lengths, opened), world, batch_size=len(lengths), micro_batch_size=2)
    whole = [of_step(batch) for batch in lanes]
    mine = list(opened)
    resumed = share(documents(lengths, opened), world, batch_size=len(lengths), micro_batch_size=2)
    for _ in zip(range(stop), resumed, strict=False):
        pass
    other = share(documents(lengths, opened), world, batch_size=len(lengths), micro_batch_size=2)
    other.load_state_dict(resumed.state_dict() | {"step": stop})
    rest = [of_step(batch) for batch in other]
    whole_batches = share(documents(lengths, []), world, batch_size=len(lengths), drop_last=True)
    assert len(list(whole_batches)) == min(lengths.values())
    return whole, rest, mine


LENGTHS = {0: 4, 1: 0, 2: 7, 3: 4, 4: 1}


def test_lanes_give_each_sample_once_and_a_rank_runs_its_own(real: list["Seen"]) -> None:
    results, lengths = [seen.lanes for seen in real], LENGTHS
    steps = [[samples for whole, _, _ in results for samples in whole[number]] for number in range(7)]
    assert [len(whole) for whole, _, _ in results] == [7] * len(real)  # the longest lane
    assert lanes_on_ranks(SimulatedRank(), lengths, 2)[0] == steps  # and alone
    pairs = [(0, 1), (2, 3), (4,)]
    expected = [
        [row for row in ([100 * i + step for i in pair if step < lengths[i]] for pair in pairs) if row]
        for step in range(7)
    ]
    assert steps == expected
    assert [[samples for _, rest, _ in results for samples in rest[number]] for number in range(5)] == expected[2:]
    assert sorted(itertools.chain.from_iterable(mine for _, _, mine in results)) == [0, 1, 2, 3, 4]


def test_lanes_are_told_epoch_and_seed_where_they_ask() -> None:
    def lane(number: int, num_lanes: int, epoch: int, *, seed: int) -> Iterator[tuple[int, int, int]]:
        yield from [(number, epoch, seed)] * 2

    lanes = share(lane, SimulatedRank(), batch_size=2, seed=5, collate_fn=list)
    assert list(lanes.flat()) == [[(0, 0, 5), (1, 0, 5)]] * 2
    assert list(lanes.flat()) == [[(0, 1, 5), (1, 1, 5)]] * 2
    with pytest.raises(TypeError, match="known at its end"):
        len(lanes)
    assert lanes.epoch == 2


class Odd(Sampler[int]):
    """Draws from torch's, numpy's and random's global generators, and knows the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield (random.randrange(9) + np.random.randint(9) + int(torch.randint(9, ()))) % self.size


class ByLength(Sampler[list[int]]):
    """Batches of any size."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3], [], [4, 5, 6, 7, 8])


def samplers_on_ranks(world: Any) -> dict[str, Any]:
    torch.manual_seed(world.rank)  # what a script did: samplers must agree all the same
    random.seed(world.rank)
    np.random.seed(world.rank)
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(world.rank)
    odd, data = Odd(9), Counted(9)
    for name, loader in {
        "weighted": DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 9, 9, generator=generator)),
        "odd": DataLoader(data, 4, sampler=odd),
        "by length": DataLoader(data, batch_sampler=ByLength()),
    }.items():
        batches = share(loader, world)
        found[name] = [[of_step(batch) for batch in batches]]
        second: list[Any] = []
        for batch in batches:
            second.append(of_step(batch))
            if len(second) == 1:
                state = json.loads(json.dumps(batches.state_dict()))
        found[name].append(second)
        here = random.getstate(), torch.get_rng_state().tolist()
        resumed = share(loader, world)
        resumed.load_state_dict(state)
        assert [of_step(batch) for batch in resumed] == second[1:]
        assert here == (random.getstate(), torch.get_rng_state().tolist())  # a resume gives them back
    assert odd.epoch == 1
    return found


def test_samplers_agree_on_all_ranks_and_worlds(real: list["Seen"]) -> None:
    ranks, alone = [seen.samplers for seen in real], samplers_on_ranks(SimulatedRank())

    def flat(steps: list[Any]) -> list[list[int]]:
        return [list(itertools.chain.from_iterable(step)) for step in steps]

    for name in alone:
        for epoch in range(2):
            together = [micro_batches(step) for step in zip(*(seen[name][epoch] for seen in ranks), strict=True)]
            assert flat(together) == flat(alone[name][epoch]), name
        if name != "by length":
            assert alone[name][0] != alone[name][1], "each epoch has its own"
    assert flat(alone["by length"][0]) == [[0, 1, 2], [3], [], [4, 5, 6, 7, 8]]
    assert [len(step) for step in ranks[2]["by length"][0]] == [1, 0, 0, 1]


class OfThisRank(Sampler[int]):
    def __init__(self, rank: int, late: bool) -> None:
        self.rank, self.late = rank, late

    def __iter__(self) -> Iterator[int]:
        return iter([0, 1, 2, 3, 4, 5] if not self.late or self.rank == 0 else [0, 1, 2, 3])

    def __len__(self) -> int:
        return 6


class Moody(OfThisRank):
    def __iter__(self) -> Iterator[int]:
        return iter([self.rank, 1, 2, 3, 4, 5])


def differing_on_ranks(world: Any) -> list[str]:
    data, said = Counted(6), []
    for make in (
        lambda: share(data, world, batch_size=2, seed=world.rank),
        lambda: share(Counted(6 + world.rank), world, batch_size=2),
        lambda: share(data, world, batch_size=2, micro_batch_size=1 + world.rank),
        lambda: list(share(DataLoader(data, 2, sampler=Moody(world.rank, False)), world)),
        lambda: list(share(DataLoader(data, 2, sampler=OfThisRank(world.rank, True)), world)),
    ):
        try:
            make()
            said.append("nothing")
        except UserError as error:
            said.append(f"{error.reach}: {error}")
    return said


@dataclass(frozen=True)
class Seen:
    """By one of three real ranks."""

    lanes: tuple[Any, Any, list[int]]
    samplers: dict[str, Any]
    differing: list[str]


def see(world: World) -> Seen:
    return Seen(lanes_on_ranks(world, LENGTHS, 2), samplers_on_ranks(world), differing_on_ranks(world))


@pytest.fixture(scope="module")
def real() -> list[Seen]:
    return run_ranks(see, 3)


def test_ranks_that_share_different_things_are_told_on_all_of_them(real: list[Seen]) -> None:
    assert real[0].differing == real[1].differing == real[2].differing
    seed, size, micro, numbers, ends = real[0].differing
    assert all(text.startswith("world: ") for text in real[0].differing)  # said once, by rank 0
    assert "seed is 0 on rank 0 and 1 on rank 1" in seed
    assert "test_share.py:" in seed  # the script's line
    assert "num_samples is 6 on rank 0 and 7 on rank 1" in size
    assert "micro_batch_size is 1 on rank 0 and 2 on rank 1" in micro
    assert "Moody gives other numbers on rank 1 at step 0" in numbers
    assert "OfThisRank ends on rank 1 at step 2" in ends


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OwnIteration(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([])


NUMBERS = Counted(10)
REFUSED = {
    "generator": (lambda: (x for x in [1]), {"batch_size": 2}, "a generator cannot be shared.*num_lanes"),
    "stream shuffled": (Stream, {"batch_size": 2, "shuffle": True}, "the order of a stream is its own"),
    "loader of stream": (lambda: DataLoader(Stream(), 2), {"batch_size": 3}, "the DataLoader has batch_size=2"),
    "one by one": (lambda: DataLoader(Stream(), None), {}, "batch_size=None"),
    "columns": (lambda: {"x": torch.ones(3)}, {"batch_size": 2}, "a dict is not a list of samples.*TensorDataset"),
    "no batch": (lambda: [1, 2], {}, "needs batch_size="),
    "batch 0": (lambda: [1, 2], {"batch_size": 0}, "batch_size is 0"),
    "micro-batch 0": (lambda: [1, 2], {"batch_size": 1, "micro_batch_size": 0}, "micro_batch_size is 0"),
    "empty": (list, {"batch_size": 2}, "0 samples.*it is empty"),
    "too few": (lambda: [1], {"batch_size": 2, "drop_last": True}, "drop_last leaves none"),
    "said twice": (lambda: DataLoader(NUMBERS, 4), {"batch_size": 5}, "batch_size=5, and the DataLoader has.*=4"),
    "shuffled twice": (lambda: DataLoader(NUMBERS, 4), {"shuffle": True}, "shuffle=True, and a DataLoader says"),
    "lanes shuffled": (lambda: lambda lane, n: iter([]), {"batch_size": 4, "shuffle": True}, "the function's own"),
    "no samples": (lambda: DataLoader(NUMBERS, None), {}, "batch_size=None"),
    "own iteration": (lambda: OwnIteration(NUMBERS, 2), {}, "OwnIteration has an __iter__ of its own"),
    "shared": (lambda: share(NUMBERS, SimulatedRank(), batch_size=2), {"batch_size": 2}, "shared before"),
    "distributed": (
        lambda: DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 2, 0)),
        {},
        "a DistributedSampler, which splits samples over ranks, and so does share",
    ),
    "distributed in batches": (
        lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(DistributedSampler(NUMBERS, 2, 0), 2, False)),
        {},
        "a DistributedSampler",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused_with_what_to_give(case: str) -> None:
    make, arguments, message = REFUSED[case]
    source = make()
    with pytest.raises(UserError, match=f"(?s)^test_share.py:\\d+: .*{message}"):
        share(source, SimulatedRank(), **arguments)


def test_a_function_that_gives_no_iterator_is_named() -> None:
    def nothing(lane: int, num_lanes: int) -> int:
        return 3

    with pytest.raises(UserError, match=r"nothing\(0, 2\) gave a int"):
        next(iter(share(nothing, SimulatedRank(), batch_size=2)))  # type: ignore[arg-type]


def test_a_position_is_refused_elsewhere() -> None:
    def state(**changed: Any) -> dict[str, Any]:
        asked = {"source": Counted(10), "batch_size": 4, "seed": 1, "shuffle": True, "drop_last": False} | changed
        return share(asked.pop("source"), SimulatedRank(), **asked).state_dict()

    here = share(Counted(10), SimulatedRank(), batch_size=4, seed=1)
    here.load_state_dict(state())
    for changed, message in (
        ({"seed": 2}, "with seed 2, here it is 1"),
        ({"source": Counted(11)}, "with num_samples 11, here it is 10"),
        ({"batch_size": 5}, "with batch_size 5, here it is 4"),
        ({"shuffle": False}, "with shuffle False, here it is True"),
        ({"drop_last": True}, "with drop_last True, here it is False"),
    ):
        with pytest.raises(UserError, match=message):
            here.load_state_dict(state(**changed))
    with pytest.raises(UserError, match="with source 'lanes', here it is 'a data set'"):
        here.load_state_dict(share(lambda lane, n: iter([]), SimulatedRank(), batch_size=4, seed=1).state_dict())
    with pytest.raises(UserError, match="not the position of a share"):
        here.load_state_dict({"step": 1})
    share(Counted(10), SimulatedRank(), batch_size=4, seed=1, micro_batch_size=1).load_state_dict(state())


def test_a_pass_left_by_break_is_followed_by_a_new_one_and_two_at_once_are_refused() -> None:
    """S8."""
    ordered, loader = share(Counted(6), SimulatedRank(), batch_size=2, shuffle=False), DataLoader(Counted(6), 2)
    for batches in (ordered, share(loader, SimulatedRank())):
        for _ in range(2):  # an evaluation of some batches gets the same ones each time
            for number, batch in enumerate(batches):
                assert of_step(batch) == [[2 * number, 2 * number + 1]]
                if number == 1:
                    break
            assert (batches.epoch, batches.step) == (0, 2)
            assert [micro.tolist() for micro, _ in zip(batches.flat(), range(1), strict=False)] == [[0, 1]]
        assert [of_step(batch) for batch in batches] == [[[0, 1]], [[2, 3]], [[4, 5]]]
        assert (batches.epoch, batches.step) == (1, 0)
        with pytest.raises(UserError, match="this pass is stale"):
            for _ in zip(batches, batches, strict=False):
                pass
    shuffled = share(Counted(60), SimulatedRank(), batch_size=30)
    orders = [of_step(next(iter(shuffled)))[0] for _ in range(3)]
    assert len(set(map(tuple, orders))) == 3


def test_a_step_is_no_micro_batch_and_says_what_to_write() -> None:
    """D10."""
    batches = share(TensorDataset(torch.arange(6), torch.arange(6)), SimulatedRank(), batch_size=2, shuffle=False)
    for wrong in (
        lambda: [x for x, y in batches],
        lambda: next(iter(batches))[0],
        lambda: list(next(iter(batches))),
    ):
        with pytest.raises(UserError, match=r"replica\.steps\(batches\).*batches\.flat\(\).*batches\.peek\(\)"):
            wrong()
    before = torch.get_rng_state()
    x, y = batches.peek()
    assert x.tolist() == y.tolist() == [0, 1]
    assert [x.tolist() for x, y in batches.flat()] == [[0, 1], [2, 3], [4, 5]]  # nothing was used up
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(batches.dataset, TensorDataset)


def test_a_loader_keeps_what_it_was_made_with_and_a_batch_may_be_uneven() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10) % 2)
    loader = DataLoader(data, 4, collate_fn=lambda samples: {"x": torch.stack([x for x, _ in samples])})
    ranks = [share(loader, SimulatedRank(rank, 3)) for rank in range(3)]
    steps = [[[micro["x"].tolist() for micro in batch.draw()] for batch in one] for one in ranks]
    assert steps == [[[[0, 1]], [[4, 5]], [[8]]], [[[2, 3]], [[6, 7]], [[9]]], [[], [], []]]
    whole = DataLoader(data, sampler=SequentialSampler(data), batch_size=4, drop_last=True)
    assert len(share(whole, SimulatedRank())) == len(list(share(whole, SimulatedRank()))) == len(whole)
    fewer = DataLoader(data, sampler=RandomSampler(data, num_samples=5), batch_size=4)
    assert sum(num_rows(micro) or 0 for micro in share(fewer, SimulatedRank()).flat()) == 5


@pytest.mark.parametrize("rows", [np.arange(24).reshape(8, 3), torch.arange(24).reshape(8, 3), [[0, 1]] * 8])
def test_rows_of_arrays_tensors_and_lists_are_samples(rows: Any) -> None:
    batches = list(share(rows, SimulatedRank(), batch_size=4, shuffle=False).flat())
    if isinstance(rows, list):
        assert [len(micro) for micro in batches] == [2, 2]  # torch's collation: columns
        assert [num_rows(micro) for micro in batches] == [4, 4]
    else:
        assert torch.equal(torch.cat(batches), torch.as_tensor(rows))


def test_rows_of_a_micro_batch() -> None:
    x, y = torch.zeros(5, 3), torch.zeros(5)
    for batch, rows in (
        (x, 5),
        ([x, y], 5),
        ((y, x), 5),
        ({"names": ["a"] * 5, "x": x}, 5),
        ([[x, x], y], 5),
        ((torch.tensor(1.0), x), 5),
        (np.zeros((4, 2)), 4),
        ([(torch.zeros(3, 8, 8), 1), (torch.zeros(3, 9, 9), 0)], 2),  # nobody collated them
        (["a", "b", "c"], 3),
        (torch.tensor(1.0), None),
        ("text", None),
        (7, None),
    ):
        assert num_rows(batch) == rows, batch
