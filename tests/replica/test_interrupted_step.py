"""A loop that an exception left in the middle of a step, as a stopped cell of a notebook does, can be run again."""

import warnings

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.world.runtime import World

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


def compare(world: World) -> None:
    for strategy in ("naive", "ddp", "zero", "local", "fsdp"):
        expected = losses(world, strategy, "")
        assert len(expected) == 3
        for moment in MOMENTS:
            assert losses(world, strategy, moment) == expected, (strategy, moment)


def test_the_next_loop_drops_its_gradients_and_trains_as_a_first_one_does() -> None:
    run_ranks(compare, 2)
