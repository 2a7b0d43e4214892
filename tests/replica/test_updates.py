"""Optimizers that update slices of parameters."""

import contextlib
import copy
import warnings

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from paceline.base.errors import UserError
from paceline.optim.optimizer import ParamSlice
from paceline.replica.replica import Replica
from paceline.replica.updates import Updates
from paceline.world.runtime import World


def test_state_that_there_was_is_cut_as_its_parameter_is() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adagrad(model.parameters())
    optimizer.state[model.weight]["sum"] = torch.arange(6.0).view(2, 3)
    mine = ParamSlice("weight", model.weight.shape, 2, 5, nn.Parameter(torch.zeros(3)))
    Updates(model, [optimizer]).adopt([mine])
    assert optimizer.param_groups[0]["params"] == [mine.parameter]
    assert list(optimizer.state) == [mine.parameter]
    assert optimizer.state[mine.parameter]["sum"].tolist() == [2.0, 3.0, 4.0]


def on_ranks(world: World) -> list[str]:
    """A schedule on a rank that owns no slice; and state that is loaded after the replica was made."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    replica = Replica(model, optimizer, world, strategy="zero")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            replica.train(torch.randn(2, 4) + world.rank, lambda x: model(x).square().mean())
            schedule.step()
    said = [str(each.message) for each in caught if "lr_scheduler" in str(each.message)]
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for strategy in ("zero", "ddp"):
        Replica(plain, optimizer, world, strategy=strategy)  # type: ignore[arg-type]
        try:
            optimizer.load_state_dict(copy.deepcopy(state))
        except UserError as error:
            said.append(f"{strategy}: {error}")
        optimizer = torch.optim.AdamW(plain.parameters())
    return said


@pytest.mark.filterwarnings("ignore")
def test_schedules_and_states_on_ranks_that_own_a_part() -> None:
    """torch warned of the schedule on one rank; the state ended in an error of shapes inside the update."""
    for said in run_ranks(on_ranks, 2):
        assert len(said) == 1
        assert "zero: test_updates.py:" in said[0]
        assert "optimizer.load_state_dict came after the Replica was made" in said[0]


def losses_in_autocast(world: World, is_one: bool) -> list[float]:
    """Of two steps, in one context of autocast for both, or one for each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.5), world)
    losses = []
    with torch.autocast("cpu", torch.bfloat16, enabled=is_one):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(replica.train(torch.ones(2, 4), lambda x: model(x).float().square().mean()).loss)
    return losses


def test_an_update_within_a_scripts_autocast_has_its_effect(world: World) -> None:
    """The next step read copies of the weights from before the update: torch keeps them until the outermost context
    ends."""
    losses = losses_in_autocast(world, is_one=False)
    assert losses[1] < losses[0]
    assert losses_in_autocast(world, is_one=True) == losses


def evaluated_in_autocast(world: World) -> list[list[float]]:
    """Local steps and evaluations, in one context of autocast for all, or one for each."""
    losses: list[list[float]] = []
    for is_one in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        replica = Replica(model, optimizer, world, strategy="local", sync_every=8)
        rows = torch.arange(16.0).view(4, 4) / 16

        def loss_of(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x).float().square().mean()

        losses.append([])
        with torch.autocast("cpu", torch.bfloat16) if is_one else contextlib.nullcontext():
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    losses[-1].append(replica.train(rows, loss_of).loss)
                with torch.autocast("cpu", torch.bfloat16):
                    losses[-1].append(replica.evaluate(TensorDataset(rows), loss_of, batch_size=4))
    return losses


def test_an_evaluation_within_a_scripts_autocast_leaves_no_weights_of_its_own() -> None:
    """Mutation: the next step reads copies of the weights that ranks have in common, which an evaluation made."""
    for of_each, of_all in run_ranks(evaluated_in_autocast, 2):
        assert of_all == of_each
