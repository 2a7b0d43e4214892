"""After a restore a source gives what it would have given next, or an error says what to write."""

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Call, run_calls
from simulated import SimulatedRank
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import paceline
from paceline.base.errors import UserError
from paceline.replica.share import share
from paceline.world.runtime import World

# ---- orders that depend on something which is not saved ----


class Hidden(Sampler[int]):
    """Counts where nobody looks."""

    def __init__(self) -> None:
        self.counts = [0]

    def __iter__(self) -> Iterator[int]:
        self.counts[0] += 1
        return iter((np.arange(12) * (5 if self.counts[0] % 2 else 7) % 12).tolist())


class Stream(IterableDataset[int]):
    """Continues where it was, by a count in a number or in a list."""

    def __init__(self, is_hidden: bool) -> None:
        self.count, self.hidden = 0, [0]
        self.is_hidden = is_hidden

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            yield 100 * (self.hidden[0] if self.is_hidden else self.count) + number
        self.count += 1
        self.hidden[0] += 1


def lanes(start: int) -> Callable[[int, int], Iterator[int]]:
    """Every lane reads one iterator, which begins anew with the process."""
    numbers = itertools.count(start)
    return lambda lane, num_lanes: itertools.islice(numbers, 6)


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "sampler": (lambda: DataLoader(list(range(12)), 2, sampler=Hidden()), {}, "by Hidden cannot.*set_epoch"),
    "stream": (lambda: Stream(is_hidden=True), {"batch_size": 2}, "the stream Stream cannot.*begin anew"),
    "lanes": (lambda: lanes(random.randrange(1000)), {"batch_size": 2}, "lanes cannot.*begin anew"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_order_that_is_not_repeatable_is_refused(name: str) -> None:
    """Finds: a resume that does not compare what it reads again."""
    make, sharing, message = SOURCES[name]
    batches = share(make(), SimulatedRank(), **sharing)
    list(batches)
    for batch in batches:
        list(batch.draw())
        if batches.step == 3:
            state = batches.state_dict()
            break
    anew = share(make(), SimulatedRank(), **sharing)
    anew.load_state_dict(state)
    with pytest.raises(UserError, match=f"{message}"):
        next(iter(anew))


def test_a_stream_that_counts_in_a_number_continues() -> None:
    batches = share(Stream(is_hidden=False), SimulatedRank(), batch_size=4)
    list(batches)
    between = batches.state_dict()
    assert next(x.tolist() for x in batches.flat()) == [100, 101, 102, 103]
    anew = share(Stream(is_hidden=False), SimulatedRank(), batch_size=4)
    anew.load_state_dict(between)
    assert next(x.tolist() for x in anew.flat()) == [100, 101, 102, 103]


class Crops(Dataset[float]):
    def __init__(self) -> None:
        self.generator, self.num_read = np.random.default_rng(3), 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        self.num_read += 1
        return index + float(self.generator.random())


def test_augmentation_from_a_generator_of_its_own_is_said_at_the_restore() -> None:
    batches = share(Crops(), SimulatedRank(), batch_size=2)
    next(iter(batches.flat()))
    state = batches.state_dict()
    with pytest.warns(UserWarning, match="Crops changes generator, num_read while it is read.*global generators"):
        share(Crops(), SimulatedRank(), batch_size=2).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        share(Crops(), SimulatedRank(), batch_size=2).load_state_dict(state | {"not_kept": []})


# ---- functions that draw ----


def trained(world: World, folder: str, draw: Callable[[], Any], save_at: int, **objects: Any) -> list[list[float]]:
    """This rank's micro-batches of steps up to the save, or up to step 6."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.0), world)
    checkpoints = paceline.Checkpoints(folder, net=replica, **objects)
    checkpoints.restore()
    found = []
    for step in replica.steps(draw, micro_batches=3, max_steps=6):
        for x in step:
            found.append(x.flatten().tolist())
            step.backward(model(torch.as_tensor(x)).mean())
        step.finish()
        if step.number == save_at:
            checkpoints.save()
            break
    checkpoints.finish()
    checkpoints._end()
    return found


def counting(start: int = 0) -> Callable[[], torch.Tensor]:
    numbers, rows = itertools.count(start), torch.zeros(2, 1)  # filled again and again
    return lambda: rows.fill_(float(next(numbers)))


def arrays() -> Callable[[], Any]:
    draw = counting()
    return lambda: draw().numpy().copy()


def stopped_and_resumed(world: World, folder: str) -> Any:
    whole = trained(world, f"{folder}/a", counting(), 0)
    parts = []
    for kind, make in (("tensors", counting), ("arrays", arrays)):
        parts.append(trained(world, f"{folder}/{kind}", make(), 4))
        parts[-1] += trained(world, f"{folder}/{kind}", make(), 0)
    return whole, parts


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the functions of this file return on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_calls({"resumed": Call(stopped_and_resumed, str(folder)), "buffers": Call(all_kinds)}, 2)


def test_a_function_that_begins_anew_is_called_as_often_as_before(
    world: World, two_ranks: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Finds: a resume whose steps 5 and 6 have the batches of steps 1 and 2, also where all are in one memory, and
    where they are numpy's."""
    whole, parts = stopped_and_resumed(world, str(tmp_path))
    assert parts == [whole, whole]
    assert whole == [[float(number)] * 2 for number in range(18)]
    for rank, (whole, parts) in enumerate(two_ranks["resumed"]):
        assert parts == [whole, whole], rank
        assert len(whole) == 6 * (2 - rank)


def test_a_function_whose_place_is_not_found_is_refused(world: World, tmp_path: Path) -> None:
    """It was called besides, so that calling it as often as in the loop gives another place."""
    draw, evaluated = counting(), []

    def noisy() -> torch.Tensor:
        found = draw()
        if float(found[0]) == 5:
            evaluated.append(draw())
        return found

    trained(world, str(tmp_path), noisy, 4)
    with pytest.raises(UserError, match=r"counting.*cannot continue at step 4.*lane, num_lanes.*paceline.Batch"):
        trained(world, str(tmp_path), counting(), 0)


def test_a_function_is_refused_that_has_been_called_since(world: World, tmp_path: Path) -> None:
    draw = counting()
    batches = share(draw, world, micro_batches=2)
    states = [batches.state_dict() for _ in zip(range(3), batches.resumed(), strict=False)]
    batches.load_state_dict(states[1])
    with pytest.raises(UserError, match=r"cannot continue at step 2.*has been called since"):
        next(batches.resumed())


def test_a_function_may_be_put_back_by_the_script_or_draw_a_constant(world: World, tmp_path: Path) -> None:
    def by_state(state: dict[str, int]) -> Callable[[], torch.Tensor]:
        def draw() -> torch.Tensor:
            state["next"] += 1
            return torch.full((2, 1), float(state["next"]))

        return draw

    whole_state, state = {"next": 0}, {"next": 0}
    whole = trained(world, str(tmp_path / "a"), by_state(whole_state), 0, at=whole_state)
    first = trained(world, str(tmp_path / "b"), by_state(state), 4, at=state)
    state = {"next": 0}
    assert first + trained(world, str(tmp_path / "b"), by_state(state), 0, at=state) == whole
    x = torch.ones(2, 1)
    assert len(trained(world, str(tmp_path / "c"), lambda: x, 4)) == 12
    assert len(trained(world, str(tmp_path / "c"), lambda: x, 0)) == 6


# ---- buffers that are filled again ----


def reused(kind: str) -> Callable[[], Any]:
    array = np.zeros((2, 1), dtype=np.float32)
    tensor = torch.zeros(2, 1)

    def draw() -> Any:
        numbers = np.random.randint(0, 100, size=(2, 1))
        if kind == "numpy":
            array[:] = numbers
            return torch.from_numpy(array)
        tensor.numpy()[:] = numbers
        return {"x": (tensor,)} if kind == "nested" else tensor

    return draw


def with_buffers(world: World, kind: str) -> list[list[float]]:
    np.random.seed(0)
    batches = share(reused(kind), world, micro_batches=4)
    batch = next(batches.resumed())
    return [(x["x"][0] if kind == "nested" else x).flatten().tolist() for x in batch.draw()]


def all_kinds(world: World) -> dict[str, list[list[float]]]:
    return {kind: with_buffers(world, kind) for kind in ("numpy", "torch", "nested")}


def test_a_function_may_fill_one_buffer(world: World, two_ranks: dict[str, list[Any]]) -> None:
    """Finds: micro-batches of a step on several ranks that are all the last one."""
    expected = all_kinds(world)
    assert expected["numpy"] == [[44, 47], [64, 67], [67, 9], [83, 21]]
    by_rank = two_ranks["buffers"]
    for kind in expected:
        assert [row for found in by_rank for row in found[kind]] == expected[kind]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_batch_of_one_buffer_is_refused(kind: str) -> None:
    draw = reused(kind)
    with pytest.raises(UserError, match=r"micro-batches 0 and 1 of a paceline.Batch are the same memory.*clone"):
        paceline.Batch([draw() for _ in range(3)])
    paceline.Batch([draw().clone() for _ in range(3)])
    data, mask = torch.zeros(8, 2), torch.ones(2)
    paceline.Batch([(data[:4], mask), (data[4:], mask)])
