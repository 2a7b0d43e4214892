"""Running statistics of batch norms, averaged over ranks after each step."""

from collections.abc import Sequence

import torch

from paceline.world.group import Group


class RunningStatistics:
    """After a step each statistic is its old value plus the mean over ranks of its change, weighted by each rank's
    share of the batch."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: Group):
        self._means = [tensor for tensor in tensors if tensor.is_floating_point()]
        self._counts = [tensor for tensor in tensors if not tensor.is_floating_point()]
        self._group = group
        self.remember()

    def remember(self) -> None:
        """Call it when the statistics are equal on all ranks."""
        self._before: torch.Tensor | None = None
        if self._means and self._group.size > 1:
            self._before = self._flat()

    def average(self, share: float) -> None:
        """share: of the batch, on this rank. Collective if the model has batch norms. Changes are summed, not values,
        so that a norm in eval() keeps its statistics bit for bit."""
        if self._before is None:
            return
        change = (self._flat() - self._before) * share if share else torch.zeros_like(self._before)
        self._group.all_reduce(change)
        begin = 0
        for tensor in self._means:
            stop = begin + tensor.numel()
            tensor.copy_((self._before[begin:stop] + change[begin:stop]).view_as(tensor))
            begin = stop
        self.remember()
        for tensor in self._counts:  # batches seen: a rank without a micro-batch has seen fewer
            self._group.all_reduce(tensor, "max")

    def _flat(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).double() for tensor in self._means])
