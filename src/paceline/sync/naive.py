"""Data parallelism in its plainest form: after backward, one all-reduce for each parameter, one after the other.

Slow on purpose (nothing overlaps, each small tensor pays a round trip) and short on purpose: it is the first thing to
read, and the oracle that the overlapping strategies are held against.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.base.ownership import Slice
from paceline.optim.optimizer import Piece
from paceline.sync.whole import full, whole_pieces, whole_weights
from paceline.world.group import Group


class NaiveSync:
    """Sums each parameter's gradient over all ranks after backward. Costs 2 (n-1)/n times the gradient's bytes."""

    shards_weights = False
    shards_state = False
    lockstep = False

    def __init__(self, model: nn.Module, group: Group):
        self._model = model
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._group = group
        self._own_sums: list[torch.Tensor] = []

    def pieces(self) -> list[Piece]:
        return whole_pieces(self._model)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        yield

    def reduce(self) -> list[torch.Tensor]:
        gradients, self._own_sums = [], []
        for parameter in self._parameters.values():
            if parameter.grad is None:  # this rank had no micro-batch; it still takes part
                parameter.grad = torch.zeros_like(parameter)
            self._own_sums.append(parameter.grad.sum())
            self._group.all_reduce(parameter.grad)
            gradients.append(parameter.grad)
        return gradients

    def total(self, amount: float) -> float:
        return amount

    def not_finite(self) -> tuple[str | None, bool | None]:
        mine = not all(bool(value.isfinite()) for value in self._own_sums)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return name, mine
        return None, mine

    def publish(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def settle(self) -> None: ...

    def weights(self) -> dict[Slice, torch.Tensor]:
        return whole_weights(self._model)

    def full_weights(self) -> dict[str, torch.Tensor]:
        return full(self._model)
