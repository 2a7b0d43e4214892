"""Collectives and messages beside a Group's, which neither counts nor times them."""

import torch
import torch.distributed as dist

from paceline.world.group import DistributedGroup


class SideChannel:
    """Sends and receives CPU tensors from any thread, in its own Gloo process group. Creating it is collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when the tensor may be overwritten. Raises RuntimeError if the other rank is gone."""
        dist.send(tensor, to, group=self._group)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fills the tensor with what the source sends. Raises RuntimeError if the source is gone."""
        dist.recv(tensor, source, group=self._group)


def all_gather_for_torch(
    group: DistributedGroup, output: torch.Tensor, mine: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """The collective with which torch's `fully_shard` gathers a block's weights."""
    if borders := _borders_of_own(group, process_group, output):
        flat = output.view(-1)
        flat[borders[group.rank] : borders[group.rank + 1]].copy_(mine)
        group.start_all_gather(flat, borders).wait()
        return None
    with group.watched("an all-gather of weights"):
        work: dist.Work | None = dist.all_gather_into_tensor(output, mine, process_group, async_op)
    return work


def reduce_scatter_for_torch(
    group: DistributedGroup,
    output: torch.Tensor,
    flat: torch.Tensor,
    process_group: dist.ProcessGroup,
    op: dist.ReduceOp,
) -> None:
    """The collective with which it sums a block's gradients."""
    if borders := _borders_of_own(group, process_group, flat):
        flat = flat.view(-1)
        group.start_reduce_scatter(flat, borders).wait()
        output.copy_(flat[borders[group.rank] : borders[group.rank + 1]].view_as(output))
        return
    with group.watched("a reduce-scatter of gradients"):
        dist.reduce_scatter_tensor(output, flat, op, process_group)


def _borders_of_own(group: DistributedGroup, process_group: dist.ProcessGroup, flat: torch.Tensor) -> list[int]:
    """Returns where each rank's elements begin, and the end, for a collective of the group's own; empty for torch's.
    Over Gloo torch's reduce-scatter sends twice the bytes, and its all-gather takes 1.5 times as long on a slow link
    unless ranks begin at once (docs/LOG.md)."""
    if group.is_queued or process_group.size() != group.size:
        return []
    return [flat.numel() // group.size * rank for rank in range(group.size + 1)]


def all_reduce_for_torch(group: DistributedGroup, tensor: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """The collective that sums a block's sharded gradients over hosts, in the stream that torch chose."""
    with group.watched("an all-reduce of gradients between hosts"):
        dist.all_reduce(tensor, group=process_group)
