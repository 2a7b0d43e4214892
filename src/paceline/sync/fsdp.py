"""The `fsdp` strategy: weights, gradients and optimizer state are sharded, for models that do not fit on a device.

torch's `fully_shard` (FSDP2; Zhao et al., arXiv 2304.11277) does the work: it gathers a block's weights before the
block runs and lets go of them after. Here it is told to sum gradients, and its shards are given out as pieces like
those of every other strategy. It communicates in every forward and backward, so all ranks make equally many passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.base.ownership import Slice
from paceline.optim.optimizer import Piece
from paceline.world.group import Group


class FullySharded:
    """Communication a step, for b micro-steps and weights of s bytes: b s (n-1)/n for the weights in forward, as much
    in backward, and s (n-1)/n for the gradients on the last one."""

    shards_weights = True
    shards_state = True
    lockstep = True

    def __init__(self, model: nn.Module, group: Group, device: torch.device, stages: Sequence[nn.Module]):
        """stages: modules that are gathered and let go of one after the other, such as a model's blocks."""
        self._group = group
        mesh = init_device_mesh(device.type, (group.size,))
        for module in (*stages, model):
            fully_shard(module, mesh=mesh)
        self._model = cast(FSDPModule, model)
        for module in (*stages, model):
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)  # gradients are sums, see strategy.py
            # Without a pre-scaled sum, which Gloo does not have, dividing by 1 is the plain sum that we want.
            sharded.set_force_sum_reduction_for_comms(True)
        self._parameters = {
            name: cast(DTensor, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._pieces = [self._piece(name, parameter) for name, parameter in self._parameters.items()]

    def pieces(self) -> list[Piece]:
        return [piece for piece in self._pieces if piece.start < piece.stop]

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self._model.set_requires_gradient_sync(last)
        yield

    def reduce(self) -> list[torch.Tensor]:
        gradients = []
        for piece, parameter in zip(self._pieces, self._parameters.values(), strict=True):
            gradient = parameter.grad
            local = torch.zeros_like(piece.parameter) if gradient is None else _local(cast(DTensor, gradient))
            piece.parameter.grad = local.reshape(-1)
            gradients.append(piece.parameter.grad)
        return gradients

    def total(self, amount: float) -> float:
        return float(sum(row[0] for row in self._group.share([amount])))

    def not_finite(self) -> tuple[str | None, bool | None]:
        bad = (
            p.name for p in self._pieces if p.parameter.grad is not None and not bool(p.parameter.grad.isfinite().all())
        )
        return next(bad, None), None  # what a rank brought to the sum is inside torch, and gone

    def publish(self) -> None:
        for piece, parameter in zip(self._pieces, self._parameters.values(), strict=True):
            parameter.grad = piece.parameter.grad = None

    def settle(self) -> None: ...

    def weights(self) -> dict[Slice, torch.Tensor]:
        return {Slice(p.name, p.start, p.stop): p.parameter.detach() for p in self.pieces()}

    def full_weights(self) -> dict[str, torch.Tensor]:
        return {name: cast(DTensor, p.detach()).full_tensor() for name, p in self._parameters.items()}

    def _piece(self, name: str, parameter: DTensor) -> Piece:
        """This rank's rows: torch deals them out in runs of ceil(rows / ranks)."""
        rows, width = parameter.shape[0], parameter.shape[1:].numel()
        run = -(-rows // self._group.size)
        first, last = (min(rows, run * rank) for rank in (self._group.rank, self._group.rank + 1))
        local = _local(cast(DTensor, parameter.detach())).view(-1)
        assert local.numel() == (last - first) * width
        return Piece(name, parameter.shape, first * width, last * width, nn.Parameter(local))


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local()
