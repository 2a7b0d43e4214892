"""The `fsdp` and `hsdp` strategies: weights, gradients and optimizer state are sharded, for models that do not fit on a
device.

torch's `fully_shard` (FSDP2; Zhao et al., arXiv 2304.11277) gathers a block's weights before the block runs and frees
them afterwards. Here it sums gradients, and its shards become slices as in other strategies. It communicates in every
forward and backward, so all ranks must make equally many passes.

`hsdp` shards within a host and replicates between hosts: weights are gathered over the host's fast links only, and over
the network goes an all-reduce of each rank's sharded gradients. Ranks with the same place on their hosts hold the same
slices, and update them alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.optim.optimizer import ParamSlice
from paceline.sync.strategy import Strategy
from paceline.world.group import DistributedGroup
from paceline.world.side import all_gather_for_torch, all_reduce_for_torch, reduce_scatter_for_torch


class FullySharded(Strategy):
    """Communication of a step with b micro-batches and s bytes of weights: b s (n-1)/n for the weights in forward, the
    same in backward, and s (n-1)/n for the gradients on the last one. With hsdp n is the ranks of a host, and an
    all-reduce of s/n bytes over h hosts follows: 2 s/n (h-1)/h."""

    shards_weights = True
    shards_state = updates_slices = True
    lockstep = True

    def __init__(
        self,
        model: nn.Module,
        group: DistributedGroup,
        device: torch.device,
        stages: Sequence[nn.Module],
        hosts: Sequence[Sequence[int]] = (),
    ):
        """stages: modules that are gathered and freed one after the other, such as a model's blocks. hosts: the ranks
        of each, equally many, of which each host holds all weights; none: all ranks hold them together."""
        super().__init__(model, group)
        self._sums = _SumsBefore(group)
        self._between: dist.ProcessGroup | None = None
        if len(hosts) > 1:
            grid = DeviceMesh(device.type, torch.tensor(hosts), mesh_dim_names=("host", "place"))
            mesh, self._between = grid["place"], grid.get_group("host")
            group.beside += [mesh.get_group(), self._between]
            self.num_copies, self.copy = len(hosts), grid.get_local_rank("host")
            self._holders = list(zip(*hosts, strict=True))
        else:
            mesh = init_device_mesh(device.type, (group.size,))
        for module in (*stages, model):
            fully_shard(module, mesh=mesh)
        for module in (*stages, model):
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)  # gradients are sums, see strategy.py
            # A plain sum: Gloo lacks the default, a pre-scaled one.
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_custom_reduce_scatter(self._sums)  # type: ignore[arg-type]  # what it calls is there
            sharded.set_custom_all_gather(_Gather(group))  # type: ignore[arg-type]
            if self._between is not None:
                sharded.set_all_reduce_hook(partial(all_reduce_for_torch, group, process_group=self._between))
        self._parameters = {
            name: cast(DTensor, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._slices = [_slice(name, parameter, mesh) for name, parameter in self._parameters.items()]

    def slices(self) -> list[ParamSlice]:
        return [mine for mine in self._slices if mine.start < mine.stop]

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        cast(FSDPModule, self._model).set_requires_gradient_sync(last)
        yield

    def reduce(self) -> list[torch.Tensor]:
        gradients = []
        for mine, parameter in zip(self._slices, self._parameters.values(), strict=True):
            gradient = parameter.grad
            local = torch.zeros_like(mine.parameter) if gradient is None else cast(DTensor, gradient).to_local()
            mine.parameter.grad = local.reshape(-1)
            gradients.append(mine.parameter.grad)
        return gradients

    def full_gradients(self) -> list[torch.Tensor]:
        return [mine.parameter.grad for mine in self._slices if mine.parameter.grad is not None]

    def changed_gradients(self) -> list[torch.Tensor]:
        return self.reduce()

    def not_finite(self) -> tuple[str | None, bool | None]:
        bad = (
            s.name for s in self._slices if s.parameter.grad is not None and not bool(s.parameter.grad.isfinite().all())
        )
        return next(bad, None), self._sums.not_finite()

    def publish(self) -> None:
        for mine, parameter in zip(self._slices, self._parameters.values(), strict=True):
            parameter.grad = mine.parameter.grad = None
        self._sums.clear()

    def on_all_ranks(self) -> dict[str, torch.Tensor]:
        return {}

    def copied(self) -> tuple[dict[str, torch.Tensor], Sequence[Sequence[int]]]:
        mine = {part.name: part.parameter.detach() for part in self._slices}
        return (mine, self._holders) if self.num_copies > 1 else ({}, ())

    def full_weights(self) -> Mapping[str, torch.Tensor]:
        return _Gathered(self._parameters)


class _Gathered(Mapping[str, torch.Tensor]):
    """Sharded parameters by name, each gathered when it is read: together they may not fit on a device."""

    def __init__(self, parameters: Mapping[str, DTensor]):
        self._parameters = parameters

    def __getitem__(self, name: str) -> torch.Tensor:
        return cast(DTensor, self._parameters[name].detach()).full_tensor()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


class _Collective:
    """A collective that `fully_shard` begins; the group's watchdog sees it."""

    def __init__(self, group: DistributedGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Collective):
    """torch's all-gather of a block's weights."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return all_gather_for_torch(self._group, output_tensor, input_tensor, group, async_op)


class _SumsBefore(_Collective):
    """torch's reduce-scatter of a block's gradients. It first records this rank's own sum, which shows later whose
    gradient was not finite. Costs one read of the gradients."""

    def __init__(self, group: DistributedGroup) -> None:
        super().__init__(group)
        self._sums: list[torch.Tensor] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._sums.append(input_tensor.sum())
        return reduce_scatter_for_torch(self._group, output_tensor, input_tensor, group, op, async_op)

    def not_finite(self) -> bool | None:
        """Whether this rank's own gradients were not finite; None if nothing was summed, in a world of one."""
        return any(not bool(value.isfinite()) for value in self._sums) if self._sums else None

    def clear(self) -> None:
        self._sums.clear()


def _slice(name: str, parameter: DTensor, mesh: DeviceMesh) -> ParamSlice:
    """Returns this rank's rows: torch assigns ceil(rows / ranks) consecutive rows to each rank."""
    rows, width = parameter.shape[0], parameter.shape[1:].numel()
    run, place = -(-rows // mesh.size()), mesh.get_local_rank()
    first, last = (min(rows, run * rank) for rank in (place, place + 1))
    local = cast(DTensor, parameter.detach()).to_local().view(-1)
    assert local.numel() == (last - first) * width
    return ParamSlice(name, parameter.shape, first * width, last * width, nn.Parameter(local))
