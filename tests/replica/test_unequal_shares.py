"""Shares of a script's batches: fixed ones for every kind of source, and shares that follow the ranks' speeds."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.base.errors import UserError
from paceline.world.runtime import World

ROWS = torch.arange(90.0).view(30, 3).sin()


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(ROWS)


def drawn(rows: Iterator[torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: torch.stack(list(itertools.islice(rows, 2)))


def samples(lane: int, num_lanes: int) -> Iterator[torch.Tensor]:
    return iter(ROWS[lane::num_lanes])


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {  # 3 steps of 8, 8, 8 rows, and one of 6
    "data set": (lambda: TensorDataset(ROWS), {"batch_size": 8, "shuffle": False}),
    "workers": (lambda: DataLoader(TensorDataset(ROWS), 8, num_workers=1), {"micro_batch_size": 2}),
    "stream": (lambda: DataLoader(Stream(), 8), {}),
    "lanes": (lambda: samples, {"batch_size": 8}),
    "a function": (lambda: drawn(itertools.cycle(ROWS)), {"micro_batches": 4, "max_steps": 3}),
}


def trained(world: World, name: str, **sharing: Any) -> tuple[list[float], list[int], float]:
    """Returns the losses, this rank's rows by step, and the mean of an evaluation."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)

    def loss_of(x: Any) -> torch.Tensor:
        return model(x[0] if isinstance(x, list) else x).square().mean()

    losses, rows = [], []
    make, given = SOURCES[name]
    source = make()
    for step in replica.steps(source, **given, **sharing):
        rows.append(0)
        for x in step:
            rows[-1] += len(x[0] if isinstance(x, list) else x)
            step.backward(loss_of(x))
        losses.append(step.finish().loss)
    given = {name: value for name, value in given.items() if name != "max_steps"}
    return losses, rows, replica.evaluate(source, loss_of, **given)


def with_shares(world: World) -> dict[str, Any]:
    return {name: trained(world, name, shares=(24, 8)) for name in SOURCES}


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_ranks(with_shares, 2)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_can_have_shares(world: World, on_ranks: list[dict[str, Any]], name: str) -> None:
    losses, rows, mean = trained(world, name)
    by_rank = [found[name] for found in on_ranks]
    for found, _, evaluated in by_rank:
        assert found == pytest.approx(losses, rel=1e-5)
        assert evaluated == pytest.approx(mean, rel=1e-5)
    assert [sum(each) for each in zip(*(rows for _, rows, _ in by_rank), strict=True)] == rows
    # 3 to 1 of 8 rows, or of 4 micro-batches of 2; of the last 6 rows 4.5 to 1.5, but lanes belong to a rank
    assert by_rank[0][1] == [6, 6, 6, {"lanes": 6}.get(name, 5)][: len(rows)]


def follows(world: World, slow_rank: int | None, num_workers: int) -> tuple[list[float], list[int], dict[str, Any]]:
    """Trains 60 steps over epochs of 22; a sequence of the slow rank takes longer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    loader = DataLoader(TensorDataset(ROWS.repeat(6, 1)[:174]), 8, num_workers=num_workers)
    batches = paceline.share(loader, world, shares="auto")
    losses, rows = [], []
    for step in replica.steps(batches, max_steps=60):
        rows.append(0)
        for (x,) in step:
            rows[-1] += len(x)
            time.sleep(len(x) * (0.02 if world.rank == slow_rank else 0.002))
            step.backward(model(x).square().mean())
        losses.append(step.finish().loss)
    return losses, rows, batches.state_dict()


@pytest.mark.long
def test_auto_follows_the_speeds_and_keeps_the_losses(world: World) -> None:
    losses, rows, _ = follows(world, None, 0)
    by_rank = run_ranks(follows, 2, 1, 2)
    for found, _, _ in by_rank:
        assert found == pytest.approx(losses, abs=1e-6)
    assert [sum(each) for each in zip(*(rows for _, rows, _ in by_rank), strict=True)] == rows
    assert by_rank[0][1][0] == by_rank[1][1][0] == 4
    assert by_rank[0][1][-1] > 4, "the shares did not follow the speeds"
    assert by_rank[0][2] == by_rank[1][2]
    assert by_rank[0][2]["shares"][0] > 4


def test_a_checkpoint_keeps_the_shares_for_a_world_of_the_same_size(world: World) -> None:
    first = paceline.share(TensorDataset(ROWS), world, batch_size=8, shares="auto")
    for shares, expected in (([8], (8,)), ([6, 2], (8,)), ([9], (8,))):
        first.load_state_dict({**first.state_dict(), "shares": shares})
        assert first.shares == expected


@pytest.mark.parametrize(
    ("source", "given", "says"),
    [
        (TensorDataset(ROWS), {"shares": (3, 1)}, "for each of 1 ranks"),
        (TensorDataset(ROWS), {"shares": (0,)}, "shares is"),
        (TensorDataset(ROWS), {"shares": "fast"}, "shares is 'fast'"),
        (samples, {"shares": "auto"}, "cannot move between ranks"),
        (Stream(), {"shares": "auto"}, "cannot move between ranks"),
    ],
)
def test_refusals(world: World, source: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        paceline.share(source, world, batch_size=8, **given)
