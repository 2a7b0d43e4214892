"""Strategies keep the memory of a model's parameters: its order of elements, and its values where a script puts others
in a parameter's place. Each case is compared with the same training in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Call, run_calls
from torch import nn

import paceline
from paceline.base.errors import UserError
from paceline.world.runtime import World

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero": {"strategy": "zero"},
    "local": {"strategy": "local", "sync_every": 2},
    "naive": {"strategy": "naive"},
    "fsdp": {"strategy": "fsdp"},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.03, fused=True),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),  # has state from the start
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.03),
}
PAIRS = [(strategy, optimizer) for strategy in ("ddp", "zero") for optimizer in OPTIMIZERS]
PAIRS += [("local", "AdamW fused"), ("naive", "AdamW fused"), ("fsdp", "AdamW fused"), ("fsdp", "Adagrad fused")]
RESUMED = {("ddp", "AdamW fused"), ("ddp", "Adagrad fused"), ("local", "AdamW fused")}  # saves take their time
REPLACES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "data": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "other values": lambda model: [setattr(p, "data", p.data * 0.5) for p in model.parameters()],
    "a vector": lambda model: nn.utils.vector_to_parameters(
        torch.cat([p.detach().reshape(-1) for p in model.parameters()]) * 0.5, model.parameters()
    ),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
}


REPLACED = [("ddp", name) for name in REPLACES] + [("zero", "other values"), ("zero", "channels_last")]
REPLACED += [("local", "other values")]  # not fsdp: DTensors ignore an assignment to `.data`; naive's memory is torch's


class Net(nn.Module):
    """A convolution and a matrix that is stored transposed."""

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.matrix = nn.Parameter(torch.randn(6, 16).t())
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x).flatten(1)) @ self.matrix


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, 4, 4, generator=generator), torch.randn(6, 6, generator=generator)


def plain(optimizer: str, replaced_by: str, num_steps: int) -> dict[str, torch.Tensor]:
    """The oracle. Its model is not stored in another order: only values count."""
    model = Net(channels_last=False)
    model.matrix.data = model.matrix.data.contiguous()
    made = OPTIMIZERS[optimizer](model.parameters())
    for step in range(num_steps):
        if step == 2 and replaced_by != "channels_last":
            REPLACES[replaced_by](model)
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        made.step()
        made.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def own_rows(world: World, strategy: str, tensor: torch.Tensor) -> torch.Tensor:
    """With local each rank has all rows, so that its curve is the plain one."""
    n, rank = world.world_size, world.rank
    return tensor if strategy == "local" else tensor[len(tensor) * rank // n : len(tensor) * (rank + 1) // n]


def trained(
    world: World, strategy: str, optimizer: str, replaced_by: str = "nothing", folder: Path | None = None
) -> dict[str, torch.Tensor]:
    """Returns the weights after 5 steps. folder: the last 2 steps are made by a new replica that resumes."""
    world.calls.reducing = None

    def begun() -> tuple[Net, paceline.Replica, paceline.Checkpoints | None]:
        model = Net(channels_last=True)
        replica = paceline.Replica(model, OPTIMIZERS[optimizer](model.parameters()), world, **STRATEGIES[strategy])
        checkpoints = None if folder is None else paceline.Checkpoints(folder, net=replica)
        if checkpoints is not None:
            checkpoints.restore()
        return model, replica, checkpoints

    model, replica, checkpoints = begun()
    for step in range(5):
        if step == 2:
            REPLACES[replaced_by](model)
        if step == 3 and checkpoints is not None:
            checkpoints.save()
            checkpoints.finish()
            world.barrier()
            model, replica, _ = begun()
        rows = tuple(own_rows(world, strategy, each) for each in batch(step))
        replica.train(rows, lambda x, y: nn.functional.mse_loss(model(x), y))  # noqa: B023
    replica.merge()
    return {name: tensor.detach().clone() for name, tensor in replica.state_dict().items()}


def largest_error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - right[name]).detach().abs().max()) for name in right)


def keep_strides(world: World, folder: Path) -> dict[str, float]:
    errors = {}
    for strategy, optimizer in PAIRS:
        where = folder / f"{strategy} {optimizer}" if (strategy, optimizer) in RESUMED else None
        errors[f"{strategy}, {optimizer}"] = largest_error(
            trained(world, strategy, optimizer, folder=where), plain(optimizer, "nothing", 5)
        )
    return errors


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the functions of this file return on each of two ranks; most of them assert by themselves."""
    functions = (replace_data, change_rounded, convert, mixed_layouts, start_alike)
    calls = {each.__name__: Call(each) for each in functions}
    return run_calls(calls | {"keep_strides": Call(keep_strides, tmp_path_factory.mktemp("ranks"))}, 2)


def test_gradients_and_restored_state_have_the_order_of_their_parameter(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: views of a bucket made by view_as; state restored by view(shape); Adagrad's first state, flattened; fsdp
    given parameters that are not contiguous."""
    for errors in two_ranks["keep_strides"]:
        assert {case: error for case, error in errors.items() if error > 1e-4} == {}


def replace_data(world: World) -> dict[str, float]:
    return {
        f"{strategy}, {replaced_by}": largest_error(
            trained(world, strategy, "AdamW fused", replaced_by), plain("AdamW fused", replaced_by, 5)
        )
        for strategy, replaced_by in REPLACED
    }


def test_values_put_in_a_parameters_place_are_trained(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: a strategy that never looks whether the model still has the memory that it updates."""
    for errors in two_ranks["replace_data"]:
        assert {case: error for case, error in errors.items() if error > 1e-4} == {}


def change_rounded(world: World) -> None:
    """The exact weights of zero's owners take what a script puts into the rounded ones."""
    for settings in ({"wire": "int8"}, {"read_as": {"weight": torch.bfloat16}}):
        for replace in (
            lambda model: model.load_state_dict({"weight": torch.full((8, 8), 1 / 3), "bias": torch.ones(8)}),
            lambda model: [setattr(p, "data", torch.full_like(p, 1 / 3)) for p in model.parameters()],
        ):
            torch.manual_seed(0)
            model = nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            replica = paceline.Replica(model, optimizer, world, strategy="zero", **settings)  # type: ignore[arg-type]
            for _ in range(2):
                replica.train(torch.ones(2, 8), lambda x: model(x).sum())  # noqa: B023
            replace(model)
            replica.train(torch.ones(2, 8), lambda x: model(x).sum())  # noqa: B023
            assert torch.equal(replica.state_dict()["weight"], torch.full((8, 8), 1 / 3)), settings


def test_exact_weights_take_what_a_script_puts_into_rounded_ones(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: a change in place of rounded parameters, which the next update overwrites."""
    assert two_ranks["change_rounded"] == [None, None]


def convert(world: World) -> None:
    for strategy in ("ddp", "zero", "fsdp"):
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = paceline.Replica(model, optimizer, world, **STRATEGIES[strategy])
        model.half()
        with pytest.raises(
            UserError, match=r"test_parameter_memory.py:\d+: 0\.(bias|weight) is torch\.float16.* was torch\.float32"
        ):
            replica.train(torch.ones(2, 4).half(), lambda x: model(x).mean())  # noqa: B023
        world.calls.reducing = None


def test_a_converted_model_is_refused(two_ranks: dict[str, list[Any]]) -> None:
    assert two_ranks["convert"] == [None, None]


def mixed_layouts(world: World) -> None:
    right = plain("AdamW fused", "nothing", 3)
    for strategy in ("ddp", "zero", "naive"):
        model = Net(channels_last=world.rank == 1)
        if world.rank == 1:
            model.matrix.data = model.matrix.data.contiguous()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        replica = paceline.Replica(model, OPTIMIZERS["AdamW fused"](model.parameters()), world, **STRATEGIES[strategy])
        assert largest_error(dict(model.named_parameters()), before) == 0, "broadcast in another order"
        for step in range(3):
            rows = tuple(own_rows(world, strategy, each) for each in batch(step))
            replica.train(rows, lambda x, y: nn.functional.mse_loss(model(x), y))  # noqa: B023
        assert largest_error(dict(model.named_parameters()), right) < 1e-4, strategy


def test_ranks_may_store_elements_in_different_orders(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: weights sent, or gradients summed, as they lie in each rank's memory."""
    assert two_ranks["mixed_layouts"] == [None, None]


def start_alike(world: World) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(2, 2))
    if world.rank:
        nn.init.zeros_(model[1].bias)
    world.group.take_traffic()
    paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    return int(world.group.take_traffic().num_bytes)


def test_equal_weights_are_not_sent(two_ranks: dict[str, list[Any]]) -> None:
    """Finds: a broadcast of every tensor after a comparison that found one different."""
    assert max(two_ranks["start_alike"]) < 20_000
