"""A loop that an exception left in the middle of a step, as a stopped cell of a notebook does, can be run again."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.base.errors import UserError
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import World, open_world

MOMENTS = ("before a backward pass", "after one of two", "after the last")


def losses(world: World, strategy: str, moment: str) -> list[float]:
    """The losses of two passes, of which an exception left the first one at this moment of its first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    rounds = {"sync_every": 2} if strategy == "local" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = paceline.Replica(model, optimizer, world, strategy=strategy, **rounds)
    x = torch.randn(24, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)

    def begin_a_step() -> None:
        for step in replica.steps(loader, epochs=1, micro_batch_size=2):
            for number, (rows, sums) in enumerate(step):
                if moment == MOMENTS[0] or (moment == MOMENTS[1] and number == 1):
                    raise KeyboardInterrupt
                step.backward(nn.functional.mse_loss(model(rows), sums))
            raise KeyboardInterrupt

    if moment:
        with pytest.raises(KeyboardInterrupt):
            begin_a_step()
    found = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in replica.steps(loader, epochs=1, micro_batch_size=2):
            for rows, sums in step:
                step.backward(nn.functional.mse_loss(model(rows), sums))
            found.append(step.finish(max_norm=1.0).loss)
    said = [each for each in warned if "its gradients are dropped" in str(each.message)]
    assert len(said) == (bool(moment) and world.is_main)
    return found


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(ParallelConfig(device="cpu", threads=1), Environment()) as world:
        yield world


def compare(world: World) -> None:
    for strategy in ("naive", "ddp", "zero", "local", "fsdp"):
        expected = losses(world, strategy, "")
        assert len(expected) == 3
        for moment in MOMENTS:
            assert losses(world, strategy, moment) == expected, (strategy, moment)


def test_the_next_loop_drops_its_gradients_and_trains_as_a_first_one_does() -> None:
    run_ranks(compare, 2)


class Fails(torch.autograd.Function):
    """Its forward pass returns what it got; its backward pass fails."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_a_part_of_a_backward_pass_is_not_added_to_the_next_one(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    x = torch.ones(2, 4)
    step = replica.step(x)
    with pytest.raises(RuntimeError, match="out of memory"):
        step.backward(model[1](Fails.apply(model[0](x))).mean())
    with pytest.raises(UserError, match="failed and left a part of its gradients"):
        step.backward(model(x).mean())
    with pytest.raises(UserError, match="came before the last micro-batch had its"):
        step.finish()
    with pytest.raises(UserError, match="its gradients would be lost"):
        replica.step(x)


def cell(world: World, folder: Path, is_stopped: bool, replica: paceline.Replica | None = None) -> list[float]:
    """A notebook's cell that does everything, or all but to make the replica."""
    if replica is None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    paceline.Checkpoints(folder, net=replica).restore()
    found = []
    for step in replica.steps(DataLoader(torch.arange(32.0).view(8, 4) / 32, batch_size=4)):
        for x in step:
            step.backward(replica.model(x).square().mean())
        if is_stopped:
            raise KeyboardInterrupt
        found.append(step.finish().loss)
    return found


@pytest.mark.parametrize("keeps_replica", [True, False])
def test_a_cell_that_was_stopped_before_finish_runs_again(world: World, tmp_path: Path, keeps_replica: bool) -> None:
    expected = cell(world, tmp_path / "straight", is_stopped=False)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world) if keeps_replica else None
    with pytest.raises(KeyboardInterrupt):
        cell(world, tmp_path / "stopped", True, replica)
    with pytest.warns(UserWarning, match="its gradients are dropped"):
        assert cell(world, tmp_path / "stopped", False, replica) == expected
