"""What fsdp changes in torch's `fully_shard`: its collectives, and gradients of what a rank did not use. Names of
FSDP that are private to torch are here alone; others: `world/torch_version.py`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from paceline.base.errors import UserError
from paceline.world.group import DistributedGroup, all_gather_for_torch, reduce_scatter_for_torch
from paceline.world.torch_version import tested_text

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def block_of(module: nn.Module) -> "FSDPParamGroup | None":
    """Returns torch's record of the parameters that a sharded module gathers; None if it has none. Raises UserError if
    this version of torch names something else than we use: a renamed `_unsharded_param` would go unnoticed."""
    try:
        block: FSDPParamGroup | None = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
        for name in ("post_backward", "reduce_grads") if block is not None else ():
            getattr(block, name)
        for each in block.fsdp_params if block is not None else ():
            each.sharded_param  # noqa: B018
            if "_unsharded_param" not in type(each).__annotations__:
                raise AttributeError(f"{type(each).__name__} has no _unsharded_param")
    except AttributeError as error:
        raise UserError(
            f"strategies fsdp and hsdp do not work with torch {torch.__version__}: {error}. Install torch "
            f"{tested_text()}, or use --parallel.strategy zero (in a script: strategy='zero')",
            reach="world",
        ) from None
    return block


def gathered(each: "FSDPParam") -> torch.Tensor | None:
    """Returns a parameter in its full size; None before the first forward pass, which makes it."""
    return getattr(each, "_unsharded_param", None)


class _Collective:
    """A collective that `fully_shard` begins."""

    def __init__(self, group: DistributedGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


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
            return all_gather_for_torch(self._group, output_tensor, input_tensor, group, async_op)
        # A float32 that is sent exactly is two numbers of 16 bits.
        packed = [
            part.to(self._sent_as) if is_rounded else part.view(self._sent_as)
            for part, is_rounded in zip(torch.split(input_tensor, self._sizes), self._is_rounded, strict=True)
        ]
        message = torch.cat(packed)
        arrived = message.new_empty(group.size() * len(message))
        all_gather_for_torch(self._group, arrived, message, group, async_op=False)
        parts = torch.split(output_tensor.view(group.size(), -1), self._sizes, 1)
        columns = torch.split(arrived.view(group.size(), -1), [len(part) for part in packed], 1)
        for part, column, is_rounded in zip(parts, columns, self._is_rounded, strict=True):
            (part if is_rounded else part.view(self._sent_as)).copy_(column)
        return None


class ReduceScatter(_Collective):
    """The reduce-scatter of a block's gradients. It first records this rank's own sum, which shows later whose gradient
    was not finite. Costs one read of the gradients."""

    def __init__(self, group: DistributedGroup, own_sums: list[torch.Tensor]) -> None:
        super().__init__(group)
        self._own_sums = own_sums

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp
    ) -> None:
        self._own_sums.append(input_tensor.sum())
        reduce_scatter_for_torch(self._group, output_tensor, input_tensor, group, op)


def send_zeros_for_unused(block: "FSDPParamGroup") -> None:
    """Has each rank send a gradient for each parameter. torch leaves out what a rank did not use, and where ranks use
    different parameters it adds up one's and another's; its own switch for this is newer than 2.11."""
    post_backward = block.post_backward

    def with_zeros(*unused: Any) -> None:
        for each in block.fsdp_params if block.reduce_grads else ():
            whole = gathered(each)
            if whole is not None and whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
        post_backward(*unused)

    block.post_backward = with_zeros  # type: ignore[method-assign]
