"""Data parallelism in its plainest form: after backward, one all-reduce for each parameter, one after the other.

Slow on purpose (nothing overlaps, each small tensor pays a round trip) and short on purpose: it is the first thing to
read, and the oracle that the overlapping strategy is held against.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.world.group import Group


class NaiveSync:
    """Sums each parameter's gradient over all ranks after backward. Costs 2 (n-1)/n times the gradient's bytes."""

    def __init__(self, model: nn.Module, group: Group):
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._group = group

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        yield

    def reduce(self) -> list[torch.Tensor]:
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:  # this rank had no micro-batch; it still takes part
                parameter.grad = torch.zeros_like(parameter)
            self._group.all_reduce(parameter.grad)
            gradients.append(parameter.grad)
        return gradients

    def publish(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
