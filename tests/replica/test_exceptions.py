"""A loop that an exception left in the middle of a step, as a stopped cell of a notebook does, can be run again."""

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Call, run_calls
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.base.errors import UserError
from paceline.world.runtime import World

MOMENTS = ("before a backward pass", "after one of two", "after the last")


def losses(world: World, strategy: str, moment: str) -> list[float]:
    """The losses of two passes, of which an exception left the first one at this moment of its first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    rounds = {"sync_every": 2} if strategy == "local" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = paceline.Replica(model, optimizer, world, strategy=strategy, **rounds)
    x = torch.randn(16, 4)
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
    assert len(said) == (moment in MOMENTS[1:] and world.is_main)
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the functions below return on each of two ranks."""
    calls = {"compare": Call(compare), "unfreeze": Call(unfreeze, tmp_path_factory.mktemp("run"), False)}
    return run_calls(calls | {strategy: Call(shared_encoder, strategy) for strategy in ("ddp", "zero")}, 2)


def compare(world: World) -> None:
    for strategy in ("naive", "ddp", "zero", "local", "fsdp"):
        expected = losses(world, strategy, "")
        assert len(expected) == 2
        for moment in MOMENTS if strategy == "ddp" else MOMENTS[1:2]:
            assert losses(world, strategy, moment) == expected, (strategy, moment)


def test_the_next_loop_drops_its_gradients_and_trains_as_a_first_one_does(two_ranks: dict[str, list[Any]]) -> None:
    assert two_ranks["compare"] == [None, None]


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
    with pytest.warns(UserWarning, match="its gradients are dropped"):
        step = replica.step(x)
    step.backward(model(x).mean())
    assert model[0].weight.grad is not None
    step.finish()


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


# ---- what leaves a replica usable ----

DATA = TensorDataset(torch.arange(32.0).view(8, 4) / 32, torch.ones(8, 1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def made(world: World, model: nn.Module | None = None, **settings: Any) -> paceline.Replica:
    model = model or net()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return paceline.Replica(model, torch.optim.AdamW(parameters, lr=0.01), world, **settings)


def train(replica: paceline.Replica, **loop: Any) -> list[float]:
    found = replica.steps(DATA, batch_size=2, **loop)
    return [replica.train(step, lambda x, y: nn.functional.mse_loss(replica.model(x), y)).loss for step in found]


def test_a_break_before_the_first_backward_drops_nothing(world: World) -> None:
    """It warned of gradients that were dropped, and ranks summed zeros."""
    replica = made(world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for step in replica.steps(DATA, batch_size=2):
                if step.number == 2:
                    break
                replica.train(step, lambda x, y: nn.functional.mse_loss(replica.model(x), y))
        assert len(train(replica, max_steps=3)) == 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_loop_of_its_own_goes_on_after_an_exception(world: World, moment: str) -> None:
    """It said "make optimizer and Replica anew" at each later step; replica.steps recovered from the same."""
    replica, left, (x, y) = made(world), made(world), DATA[:4]
    x, y = x.chunk(2), y.chunk(2)

    def one_step(replica: paceline.Replica, fails: bool) -> float:
        step = replica.step(paceline.Batch(list(zip(x, y, strict=True))))
        for number, (rows, sums) in enumerate(step):
            if fails and (moment == MOMENTS[0] or (moment == MOMENTS[1] and number == 1)):
                raise ValueError("a bad sample")
            step.backward(nn.functional.mse_loss(replica.model(rows), sums))
        if fails:
            raise ValueError("after the last")
        return step.finish().loss

    expected = [one_step(replica, False) for _ in range(3)]
    found = [one_step(left, False)]
    with pytest.raises(ValueError, match=r"a bad sample|after the last"):
        one_step(left, True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found += [one_step(left, False) for _ in range(2)]
    assert found == expected
    assert len([each for each in warned if "its gradients are dropped" in str(each.message)]) == (moment != MOMENTS[0])


@pytest.mark.filterwarnings("ignore:step")
def test_a_forgotten_finish_is_an_error_in_the_third_step(world: World) -> None:
    replica = made(world)
    first = replica.step(DATA[:2][0])
    first.backward(replica.model(DATA[:2][0]).mean())
    replica.step(DATA[:2][0]).backward(replica.model(DATA[:2][0]).mean())
    with pytest.raises(UserError, match=r"step 1: another step was begun since, and this one was dropped"):
        first.finish()
    with pytest.raises(UserError, match=r"two steps in a row had no step.finish\(\): call it once in each step"):
        replica.step(DATA[:2][0])


def test_after_a_stop_a_loop_says_that_it_makes_no_step_and_how_to_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later loop made none without a word. A script's loop over epochs must not go on by itself: it is to save."""
    replica = made(world)
    for step in replica.steps(DATA, batch_size=2, stop_on_signals=True):
        replica.train(step, lambda x, y: nn.functional.mse_loss(replica.model(x), y))
        signal.raise_signal(signal.SIGUSR1) if step.number == 1 else None
    assert (replica.num_steps, replica.stop_reason) == (2, "SIGUSR1 on rank 0")
    with pytest.warns(UserWarning, match=r"makes no step: a stop .*SIGUSR1.* set replica.stop_reason = None first"):
        assert train(replica, stop_on_signals=True) == []
    replica.stop_reason = None
    assert len(train(replica, max_steps=4, stop_on_signals=True)) == 2
    assert replica.stop is None
    for step in replica.steps(DATA, batch_size=2, stop_on_signals=True):
        replica.train(step, lambda x, y: nn.functional.mse_loss(replica.model(x), y))
        signal.raise_signal(signal.SIGUSR1)
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)  # a notebook: the next cell continues
    assert len(train(replica, max_steps=replica.num_steps + 2)) == 2


def shared_encoder(world: World, strategy: str) -> list[str]:
    torch.manual_seed(0)
    encoder = nn.Linear(4, 4)
    first = made(world, nn.Sequential(encoder, nn.Linear(4, 1)), strategy=strategy)
    second = made(world, nn.Sequential(encoder, nn.Linear(4, 1)), strategy=strategy)
    train(second, max_steps=1)
    with pytest.raises(UserError) as error:
        train(first, max_steps=1)
    said = [str(error.value)]
    with pytest.raises(UserError) as error:
        first.state_dict()
    return [*said, str(error.value)]


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_a_replica_that_another_replaced_says_so(two_ranks: dict[str, list[Any]], strategy: str) -> None:
    """With ddp it went on without overlap; with zero ranks waited in different collectives."""
    for said in two_ranks[strategy]:
        for text in said:
            assert "this replica ended at test_exceptions.py:" in text
            assert "put both into one nn.Module and one Replica" in text


# ---- parameters that are added, and a replica made anew ----


def unfreeze(world: World, folder: Path, is_plain: bool) -> list[float]:
    """A head alone for 4 steps, then the body, too; saved after 4, 6 and 8 steps, and continued from 6."""
    body, head = net()[0], nn.Linear(4, 1)
    model = nn.Sequential(body, nn.Tanh(), head)
    body.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    x, y = DATA.tensors

    def add_the_body() -> None:
        body.requires_grad_(True)
        optimizer.add_param_group({"params": list(body.parameters()), "lr": 1e-3})

    if is_plain:
        found = []
        for number in range(8):
            add_the_body() if number == 4 else None
            rows = slice(number % 4 * 2, number % 4 * 2 + 2)
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found
    replica = paceline.Replica(model, optimizer, world)
    checkpoints = paceline.Checkpoints(folder, net=replica)
    found = train(replica, max_steps=4, shuffle=False)
    checkpoints.save()
    add_the_body()
    replica = paceline.Replica(model, optimizer, world)
    checkpoints = paceline.Checkpoints(folder, net=replica)
    assert replica.num_steps == 4
    found += train(replica, max_steps=6, shuffle=False)
    checkpoints.save()
    checkpoints.finish()
    expected = train(replica, max_steps=8, shuffle=False)
    again = paceline.Replica(model, optimizer, world)  # of the same parameters, as a notebook's cell that runs again
    assert again.num_steps == 0
    checkpoints = paceline.Checkpoints(folder, net=again)
    assert checkpoints.restore() == 6
    assert train(again, max_steps=8, shuffle=False) == expected
    return found + expected


def test_parameters_that_are_added_train_on(two_ranks: dict[str, list[Any]], world: World, tmp_path: Path) -> None:
    """It ended in `zip() argument 2 is shorter`; steps counted from 1 again, and saves wanted a restore."""
    expected = unfreeze(None, tmp_path, True)  # type: ignore[arg-type]
    for found in (unfreeze(world, tmp_path, False), *two_ranks["unfreeze"]):
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_replica_made_anew_whose_steps_are_made_says_so(world: World) -> None:
    replica = made(world)
    train(replica, max_steps=2)
    replica.model[0].bias.requires_grad_(False)
    again = paceline.Replica(replica.model, replica.optimizers, world)
    with pytest.warns(UserWarning, match="makes no step: its steps are made. To train on, give a larger max_steps="):
        assert train(again, max_steps=2) == []
