"""What a script may change after it made a Replica or began a save, what a Replica refuses at once, and that nothing of
it stays in memory when the script needs it no more."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Call, run_calls
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.base import faults
from paceline.base.errors import UserError
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import World, open_world

STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "zero"},
    {"strategy": "local", "sync_every": 2},
    {"strategy": "naive"},
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def made(world: World, model: nn.Module, **settings: Any) -> paceline.Replica:
    world.calls.reducing = None
    return paceline.Replica(model, torch.optim.AdamW(model.parameters(), lr=0.1), world, **settings)


def train(replica: paceline.Replica) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(replica.num_steps))
    replica.train(x, lambda x: replica.model(x).square().mean())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the functions below return on each of two ranks; most of them assert by themselves."""
    folder = tmp_path_factory.mktemp("ranks")
    calls = {each.__name__: Call(each) for each in (call_parts, multiply_loss, refuse)}
    return run_calls(
        calls
        | {"drop_rounded": Call(drop_rounded, opened=False)}
        | {
            each.__name__: Call(each, folder / each.__name__)
            for each in (change_after_save, freeze_later, kept_in_memory)
        },
        2,
    )


def change_after_save(world: World, folder: Path) -> None:
    for settings in STRATEGIES:
        replica, ema, notes = made(world, net(), **settings), net(), {"values": [1]}
        checkpoints = paceline.Checkpoints(folder / settings["strategy"], net=replica, ema=ema, notes=notes)
        train(replica)
        right = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
        averaged = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
        faults.install(
            world.rank, world.world_size, 0, f"rank={world.rank} step=1 phase=save.copy kind=sleep seconds=0.1"
        )
        checkpoints.save()
        with torch.no_grad():
            for tensor in (*replica.model.parameters(), *ema.parameters()):
                tensor.zero_()
            for optimizer in replica.optimizers:
                for state in optimizer.state.values():
                    state["exp_avg"].fill_(7.0)
            notes["values"].append(2)
        checkpoints.finish()
        world.barrier()
        checkpoints.restore()
        for name, tensor in replica.state_dict().items():
            assert torch.equal(tensor, right[name]), (settings, name)
        assert all(torch.equal(tensor, averaged[name]) for name, tensor in ema.state_dict().items())
        states = [state["exp_avg"] for optimizer in replica.optimizers for state in optimizer.state.values()]
        assert notes == {"values": [1]}
        assert not any(bool((state == 7.0).any()) for state in states)


def test_a_save_is_of_its_step_whatever_the_script_changes_next(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: a save that returns before its thread has copied."""
    assert two_ranks["change_after_save"] == [None, None]


def freeze_later(world: World, folder: Path) -> None:
    for settings in STRATEGIES:
        model = net()
        replica = made(world, model, **settings)
        checkpoints = paceline.Checkpoints(folder / settings["strategy"], net=replica)
        train(replica)
        train(replica)
        replica.merge()  # local: else the ranks' own weights still move towards each other
        model[0].requires_grad_(False)
        train(replica)
        checkpoints.save()
        checkpoints.finish()
        world.barrier()
        right = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
        checkpoints.restore()
        assert all(torch.equal(tensor, right[name]) for name, tensor in replica.state_dict().items()), settings
        model[0].requires_grad_(True)
        train(replica)


def test_weights_that_are_frozen_later_are_saved(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: `requires_grad` read at a save, where slices are those of the start."""
    assert two_ranks["freeze_later"] == [None, None]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 64)


def call_parts(world: World) -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = paceline.Replica(model, optimizer, world, strategy="zero", blocks=list(model.blocks))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = block(x)
        return model.head(x).square().mean()

    for _ in range(2):
        replica.train(torch.ones(2, 64), loss_of)
        assert all(bucket.gathering is None for bucket in replica.sync.buckets)  # type: ignore[attr-defined]


def test_weights_have_arrived_when_a_step_is_finished(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: gathers under way when a script calls a part of the model, or reads weights for an average."""
    assert two_ranks["call_parts"] == [None, None]


def multiply_loss(world: World) -> None:
    thing = type("Thing", (), {})()
    dead = weakref.proxy(thing)
    del thing
    gc.collect()
    model, factor = net(), torch.tensor(2.0)
    replica = made(world, model)
    replica.train(torch.ones(2, 4), lambda x: model(x).mean() * factor)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    replica.train(torch.ones(2, 4), lambda x: scaler.scale(model(x).mean() * factor))
    del dead


def test_a_loss_times_a_tensor_needs_no_search_through_all_objects(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: a search by isinstance, which a dead weakref.proxy ends with ReferenceError."""
    assert two_ranks["multiply_loss"] == [None, None]


def refuse(world: World) -> None:
    lazy, complex_one = nn.Sequential(nn.LazyLinear(2)), nn.Linear(2, 2, dtype=torch.complex64)
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: paceline.Replica(nn.Tanh(), torch.optim.SGD([nn.Parameter(torch.ones(1))]), world), "no parameters"),
        (lambda: made(world, complex_one), "weight is of torch.complex64"),
        (lambda: paceline.Replica(lazy, torch.optim.SGD(lazy.parameters()), world), "0.weight has no shape yet"),
        (
            lambda: made(world, net(), strategy="zero", read_as={"0.wieght": torch.bfloat16}),
            "did you mean '0.weight'",
        ),
        (lambda: made(world, net(), strategy="zero", rounded_gradients=["none"]), "rounded_gradients names none"),
        (lambda: made(world, nn.Sequential(net(), net().double()), strategy="fsdp"), "torch.float32, torch.float64"),
    ]
    for mistake, said in mistakes:
        with pytest.raises(UserError, match=said):
            mistake()
    frozen = net()
    replica = made(world, frozen, strategy="fsdp")
    frozen[0].weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"0.weight was frozen after"):
        train(replica)


def test_models_that_cannot_be_replicated_are_refused_by_name(two_ranks: dict[str, list[Any]]) -> None:
    assert two_ranks["refuse"] == [None, None]


# ---- memory ----

KINDS: list[dict[str, Any]] = [
    {"strategy": "naive"},
    {"strategy": "ddp"},
    {"strategy": "zero"},
    {"strategy": "zero", "wire": "int8"},
    {"strategy": "local", "sync_every": 2},
    {"strategy": "fsdp"},
]


def train_a_while(world: World, folder: Path, kind: dict[str, Any]) -> list["weakref.ref[Any]"]:
    """Returns weak references to what nobody needs then."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = paceline.Replica(model, optimizer, world, **kind)
    checkpoints = paceline.Checkpoints(folder, net=replica)
    checkpoints.restore()
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=8)
    for step in replica.steps(loader, epochs=1):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        step.finish(max_norm=1.0)
        checkpoints.save_every(2)
    replica.evaluate(loader, lambda x, y: nn.functional.mse_loss(model(x), y))
    return [weakref.ref(each) for each in (model, optimizer, replica, replica.sync, model[0].weight)]


def kept_in_memory(world: World, folder: Path) -> list[Any]:
    """The kinds of replicas of which something is left, and what."""
    leaks = []
    for number, kind in enumerate(KINDS):
        left = train_a_while(world, folder / str(number), kind)
        train_a_while(world, folder / str(number), kind)  # as a notebook's cell that runs again
        gc.collect()
        kept = [type(each()).__name__ for each in left if each() is not None]
        leaks += [(kind, kept)] if kept else []
    return leaks


def test_ranks_free_what_nobody_needs(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: hooks, handles or a list of replicas that keep the model of an earlier cell."""
    assert two_ranks["kept_in_memory"] == [[], []]


def drop_rounded(config: ParallelConfig, environment: Environment) -> bool:
    """Whether a model has its exact weights again under a new replica, when rank 1 alone still held the one before, as
    a traceback does. Ranks with shared memory send exact weights."""
    with open_world(replace(config, shared_memory=False), environment) as world:
        model = net()
        replica = made(world, model, strategy="zero", read_as={"0.weight": torch.bfloat16})
        train(replica)
        exact = replica.state_dict()["0.weight"].clone()
        assert not torch.equal(model[0].weight, exact), "it is not rounded, so the test shows nothing"
        held = [replica] if world.rank == 1 else []
        del replica
        gc.collect()
        made(world, model)
        held.clear()
        return torch.equal(model[0].weight, exact)


def test_rounded_weights_become_exact_again_on_all_ranks(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: an exchange of exact weights that depends on a rank's garbage collector, and weights that stay rounded."""
    assert two_ranks["drop_rounded"] == [True, True]
