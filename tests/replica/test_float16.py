"""float16, whose gradients overflow beyond 65,504."""

import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss

from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.world.runtime import World

_TOKENS = 512  # of a row, so a row weighs as much


def rows_of_step(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first step has a single row: of two ranks one has none."""
    generator = torch.Generator().manual_seed(number)
    num_rows = 1 if number == 0 else 4
    return torch.randn(num_rows, _TOKENS, 4, generator=generator), torch.randn(
        num_rows, _TOKENS, 2, generator=generator
    )


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trained_by_tokens(world: World) -> tuple[list[bool], torch.Tensor]:
    model, optimizer = linear()
    replica = Replica(model, optimizer, world, dtype="float16")
    skipped = []
    for number in range(3):
        x, y = rows_of_step(number)
        own = range(world.rank, len(x), world.world_size)
        step = replica.step(Batch([(x[row : row + 1], y[row : row + 1]) for row in own]))
        for inputs, targets in step:
            step.backward(mse_loss(model(inputs).float(), targets), weight=_TOKENS)
        skipped.append(bool(step.finish().skipped))
    return skipped, model.weight.detach()


def plain() -> torch.Tensor:
    model, optimizer = linear()
    for number in range(3):
        x, y = rows_of_step(number)
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def test_weights_in_tokens_cost_no_first_update() -> None:
    """Finds a first step whose losses are divided by 1: its gradients overflow, and the update is skipped. Finds also
    a rank without a micro-batch that takes no part in the estimate: the other waits for it."""
    for skipped, weight in run_ranks(trained_by_tokens, 2):
        assert skipped == [False] * 3
        assert torch.allclose(weight, plain(), atol=2e-3)
