"""The plainest data parallelism: after backward, one all-reduce per parameter. Read it first; tests compare with it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.sync.strategy import Strategy


class NaiveSync(Strategy):
    """Sums each parameter's gradient over all ranks after backward. Sends 2 (n-1)/n times the gradients' bytes."""

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        yield

    def reduce(self) -> list[torch.Tensor]:
        for parameter in self._trained.values():
            if parameter.grad is None:  # a rank without a micro-batch still takes part
                parameter.grad = torch.zeros_like(parameter)
            self._own_sums.append(parameter.grad.sum())
            self._group.all_reduce(parameter.grad)
        return self.full_gradients()

    def full_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._trained.values() if p.grad is not None]

    def changed_gradients(self) -> list[torch.Tensor]:
        return self.full_gradients()

    def end_step(self, own_weight: float = 0.0, weight: float = 0.0) -> None:
        self._own_sums.clear()
        for parameter in self._trained.values():
            parameter.grad = None
