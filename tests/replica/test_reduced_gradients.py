"""`step.reduce()`: afterwards each `.grad` is the gradient of the mean loss over the global batch, on all ranks."""

from typing import Any

import torch
from ranks import run_ranks
from torch import nn

from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.world.runtime import World

STRATEGIES: tuple[Any, ...] = ("ddp", "zero", "naive")
WEIGHTS = (3.0, 5.0, 1.0)  # of three micro-batches: on two ranks 4 and 5, and nobody knows 9 before the first backward


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def micro_batch(index: int) -> torch.Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def change(model: nn.Module) -> None:
    """All gradients clipped by value, each to a norm of its own; one replaced."""
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.06)
    model[2].bias.grad = model[2].bias.grad * 0.5


def reduced(world: World, strategy: Any) -> list[dict[str, torch.Tensor]]:
    """The gradients after `reduce`, and the weights after the update with what `change` made of them, in two steps."""
    model, found = net(), []
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world, strategy=strategy)
    for _ in range(2):
        mine = range(len(WEIGHTS))[world.rank :: world.world_size]
        step = replica.step(Batch([micro_batch(index) for index in mine]))
        for index, x in zip(mine, step, strict=True):
            step.backward(model(x).square().mean(), weight=WEIGHTS[index])
        step.reduce()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({name: gradient.clone() for name, gradient in gradients.items()})
        change(model)
        step.finish()
        found.append({name: tensor.clone() for name, tensor in replica.state_dict().items()})
    return found


def plain() -> list[dict[str, torch.Tensor]]:
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        losses = [model(micro_batch(index)).square().mean() * weight for index, weight in enumerate(WEIGHTS)]
        (sum(losses) / sum(WEIGHTS)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        change(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return found


def with_each_strategy(world: World) -> dict[str, list[dict[str, torch.Tensor]]]:
    return {strategy: reduced(world, strategy) for strategy in STRATEGIES}


def test_gradients_are_those_of_the_global_batch_and_an_update_takes_what_was_made_of_them(world: World) -> None:
    """On a rank of one and on two. Finds: buckets that were scaled before `finish`, a gradient that was replaced."""
    wanted = plain()
    for rank in (with_each_strategy(world), *run_ranks(with_each_strategy, 2)):
        for strategy, found in rank.items():
            for number, (mine, other) in enumerate(zip(found, wanted, strict=True)):
                assert mine.keys() == other.keys()
                for name, tensor in other.items():
                    torch.testing.assert_close(mine[name], tensor, msg=f"{strategy}, {number}: {name}")


def test_a_gradient_that_a_script_sets_to_none_leaves_its_parameter_as_it_is(world: World) -> None:
    """As in one process: neither momentum nor weight decay changes it."""
    for strategy in STRATEGIES:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        replica = Replica(model, optimizer, world, strategy=strategy)
        weights = []
        for number in range(3):
            step = replica.step(micro_batch(number))
            step.backward(model(micro_batch(number)).square().mean())
            step.reduce()
            if number == 1:
                model[2].weight.grad = None
            step.finish()
            weights.append({name: tensor.clone() for name, tensor in replica.state_dict().items()})
        changes = [not torch.equal(weights[n]["2.weight"], weights[n + 1]["2.weight"]) for n in range(2)]
        assert changes == [False, True], strategy
        assert not torch.equal(weights[0]["2.bias"], weights[1]["2.bias"])
