"""Finds the rank and the parameter of a gradient that is not finite."""

from dataclasses import dataclass

import torch
from torch import nn

from paceline.sync.strategy import Strategy
from paceline.world.group import Group


@dataclass(frozen=True)
class Trouble:
    """Where a sum of gradients became not finite."""

    parameter: str | None  # the first with such a sum; None: only the norm overflowed
    ranks: list[int] | None  # with such gradients before the sum; None: not known

    def __str__(self) -> str:
        text = f"the gradient of {self.parameter}" if self.parameter else "the gradient's norm"
        if self.ranks is None:
            return text
        return text + (f", by rank {', '.join(map(str, self.ranks))}" if self.ranks else ", by no rank alone")


def find_trouble(sync: Strategy, group: Group) -> Trouble:
    """Finds the parameter and the ranks of a gradient that is not finite. Collective, between reduce and publish."""
    rows = group.share_json(sync.not_finite())
    parameter = next((name for name, _ in rows if name), None)
    known = all(mine is not None for _, mine in rows)
    return Trouble(parameter, [rank for rank, (_, mine) in enumerate(rows) if mine] if known else None)


def poison_a_gradient(model: nn.Module) -> None:
    """Adds NaN to the first parameter's next gradient (an injected fault)."""
    parameter = next(model.parameters())
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.view(-1)[0] = torch.nan


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Flips the lowest bit of the middle element (an injected fault)."""
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[flat.numel() // 2] ^= 1
