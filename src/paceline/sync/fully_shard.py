"""What fsdp changes in torch's `fully_shard`: its collectives, and gradients of what a rank did not use."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from paceline.world.group import DistributedGroup


class _Collective:
    """A collective that `fully_shard` begins."""

    def __init__(self, group: DistributedGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _borders(self, process_group: dist.ProcessGroup, flat: torch.Tensor) -> list[int]:
        """Returns where each rank's elements begin, and the end, for a collective of the group's own; empty for
        torch's. Over Gloo torch's reduce-scatter sends twice the bytes, and its all-gather takes 1.5 times as long on
        a slow link unless ranks begin at once (docs/LOG.md)."""
        if self._group.is_queued or process_group.size() != self._group.size:
            return []
        return [flat.numel() // self._group.size * rank for rank in range(self._group.size + 1)]


class Gather(_Collective):
    """The all-gather of a block's weights, which sends those in 16 bits that are read so."""

    def __init__(self, group: DistributedGroup, sizes: Sequence[int], read_as: Sequence[torch.dtype | None]) -> None:
        """sizes: elements of a rank's part of each parameter, in torch's order. read_as: see FullySharded."""
        super().__init__(group)
        self._sent_as = next((dtype for dtype in read_as if dtype is not None and dtype.itemsize == 2), None)
        self._sizes, self._is_rounded = list(sizes), [dtype == self._sent_as for dtype in read_as]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._sent_as is None or output_tensor.dtype != torch.float32:
            return self._gather(output_tensor, input_tensor, group, async_op)
        # A float32 that is sent exactly is two numbers of 16 bits.
        packed = [
            part.to(self._sent_as) if is_rounded else part.view(self._sent_as)
            for part, is_rounded in zip(torch.split(input_tensor, self._sizes), self._is_rounded, strict=True)
        ]
        message = torch.cat(packed)
        arrived = message.new_empty(group.size() * len(message))
        self._gather(arrived, message, group, async_op=False)
        parts = torch.split(output_tensor.view(group.size(), -1), self._sizes, 1)
        columns = torch.split(arrived.view(group.size(), -1), [len(part) for part in packed], 1)
        for part, column, is_rounded in zip(parts, columns, self._is_rounded, strict=True):
            (part if is_rounded else part.view(self._sent_as)).copy_(column)
        return None

    def _gather(
        self, output: torch.Tensor, mine: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        if borders := self._borders(process_group, output):
            flat, rank = output.view(-1), self._group.rank
            flat[borders[rank] : borders[rank + 1]].copy_(mine)
            self._group.start_all_gather(flat, borders).wait()
            return None
        with self._group.watched("an all-gather of weights"):
            work: dist.Work | None = dist.all_gather_into_tensor(output, mine, process_group, async_op)
        return work


class ReduceScatter(_Collective):
    """The reduce-scatter of a block's gradients. It first records this rank's own sum, which shows later whose gradient
    was not finite. Costs one read of the gradients."""

    def __init__(self, group: DistributedGroup) -> None:
        super().__init__(group)
        self._sums: list[torch.Tensor] = []

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp
    ) -> None:
        self._sums.append(input_tensor.sum())
        if borders := self._borders(group, input_tensor):
            flat, rank = input_tensor.view(-1), self._group.rank
            self._group.start_reduce_scatter(flat, borders).wait()
            output_tensor.copy_(flat[borders[rank] : borders[rank + 1]].view_as(output_tensor))
            return
        with self._group.watched("a reduce-scatter of gradients"):
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)

    def not_finite(self) -> bool | None:
        """Whether this rank's own gradients were not finite; None if nothing was summed, in a world of one."""
        return any(not bool(value.isfinite()) for value in self._sums) if self._sums else None

    def clear(self) -> None:
        self._sums.clear()


def all_reduce_between_hosts(group: DistributedGroup, tensor: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Sums a block's sharded gradients over hosts, in the stream that torch chose."""
    with group.watched("an all-reduce of gradients between hosts"):
        dist.all_reduce(tensor, group=process_group)


def send_zeros_for_unused(block: FSDPParamGroup) -> None:
    """Has each rank send a gradient for each parameter. torch leaves out what a rank did not use, and where ranks use
    different parameters it adds up one's and another's; its own switch for this is newer than 2.11."""
    post_backward = block.post_backward

    def with_zeros(*unused: Any) -> None:
        for each in block.fsdp_params if block.reduce_grads else ():
            gathered = getattr(each, "_unsharded_param", None)  # made by the first forward pass
            if gathered is not None and gathered.requires_grad and gathered.grad is None:
                gathered.grad = torch.zeros_like(gathered)
        post_backward(*unused)

    block.post_backward = with_zeros  # type: ignore[method-assign]
