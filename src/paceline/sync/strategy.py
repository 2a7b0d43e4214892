"""The one mechanism that every strategy is: three verbs around a step.

    for i, micro_batch in enumerate(micro_batches):       # none, on a rank that was dealt none
        with sync.accumulate(last=i == len(micro_batches) - 1):
            loss(micro_batch).backward()                  # communicates on the last micro-step only
    gradients = sync.reduce()                             # summed over ranks: all of them (ddp), my share (zero, fsdp)
    update(gradients)
    sync.publish()                                        # what the others must know after the update

The loss is divided by the token count of the whole world's step before backward, so gradients are summed, never
averaged: a mean of means is wrong as soon as ranks have different numbers of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from paceline.base.errors import UserError
from paceline.base.ownership import Slice
from paceline.optim.optimizer import Piece
from paceline.sync.ddp import BucketedSync
from paceline.sync.naive import NaiveSync
from paceline.sync.zero import ShardedSync
from paceline.world.config import ParallelConfig
from paceline.world.group import DistributedGroup, Group


class Strategy(Protocol):
    """How gradients are summed over ranks, and who updates what."""

    shards_weights: bool  # a rank holds a part of the weights only
    shards_state: bool  # a rank updates, and holds optimizer state for, its own pieces only
    lockstep: bool  # forward and backward communicate: every rank must make equally many passes

    def pieces(self) -> list[Piece]:
        """Returns what this rank updates; before an update each piece's parameter has its gradient in `.grad`."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Entered around forward and backward of a micro-batch."""
        ...

    def reduce(self) -> list[torch.Tensor]:
        """Returns the gradients this rank is to update with, summed over ranks, as few flat tensors.

        The gradients of `pieces` are views of them. Collective: every rank calls it once a step, also one that had no
        micro-batch, and before any other collective: that rank launches its buckets only here.
        """
        ...

    def total(self, amount: float) -> float:
        """Returns a sum over all gradients, from the sum over this rank's share; equal on all ranks. Collective."""
        ...

    def not_finite(self) -> tuple[str | None, bool | None]:
        """Between `reduce` and `publish`: (a parameter in this rank's share whose summed gradient is not finite, or
        None), and whether this rank's own gradients were not finite before they were summed; None: not known."""
        ...

    def publish(self) -> None:
        """Collective, after the update: makes what other ranks own of it known. Nothing where all ranks own all."""
        ...

    def settle(self) -> None:
        """Returns when the weights are what the last `publish` makes them. A forward does this by itself; whoever
        reads weights otherwise calls it first."""
        ...

    def weights(self) -> dict[Slice, torch.Tensor]:
        """Returns the weights that this rank holds, flat, in place: all, or its share where they are sharded."""
        ...

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Returns all weights by name, in their shapes. Collective where they are sharded."""
        ...


def make_strategy(
    config: ParallelConfig,
    model: nn.Module,
    group: Group,
    whole_costs: Mapping[str, float] | None = None,
    stages: Sequence[nn.Module] = (),
) -> Strategy:
    """Returns the strategy the config names, attached to the model's parameters.

    whole_costs and stages: see ShardedSync.
    """
    bucket_bytes = int(config.bucket_mb * 2**20)
    makers: dict[str, Callable[[], Strategy]] = {
        "ddp": lambda: BucketedSync(model, group, bucket_bytes),
        "zero": lambda: ShardedSync(model, group, bucket_bytes, whole_costs or {}, stages),
        "fsdp": lambda: _fully_sharded(model, group, bucket_bytes, stages),
        "naive": lambda: NaiveSync(model, group),
    }
    if config.strategy not in makers:
        raise UserError(f"parallel.strategy is '{config.strategy}'; it must be one of {', '.join(makers)}")
    return makers[config.strategy]()


def _fully_sharded(model: nn.Module, group: Group, bucket_bytes: int, stages: Sequence[nn.Module]) -> Strategy:
    if not isinstance(group, DistributedGroup):  # one process without a launcher: there is nobody to share with
        return BucketedSync(model, group, bucket_bytes)
    from paceline.sync.fsdp import FullySharded  # half a second of imports

    return FullySharded(model, group, group.device, stages)
