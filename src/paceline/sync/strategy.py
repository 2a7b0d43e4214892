"""The one mechanism that every strategy is: three verbs around a step.

    for i, micro_batch in enumerate(micro_batches):       # none, on a rank that was dealt none
        with sync.accumulate(last=i == len(micro_batches) - 1):
            loss(micro_batch).backward()                  # communicates on the last micro-step only
    gradients = sync.reduce()                             # summed over ranks: all of them (ddp), my share (zero)
    update(gradients)
    sync.publish()                                        # what the others must know after the update

The loss is divided by the token count of the whole world's step before backward, so gradients are summed, never
averaged: a mean of means is wrong as soon as ranks have different numbers of tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from paceline.base.errors import UserError
from paceline.sync.ddp import BucketedSync
from paceline.sync.naive import NaiveSync
from paceline.world.config import ParallelConfig
from paceline.world.group import Group


class Strategy(Protocol):
    """How gradients become the same on all ranks."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Entered around forward and backward of a micro-batch."""
        ...

    def reduce(self) -> list[torch.Tensor]:
        """Returns the gradients this rank is to update with, summed over ranks, as few flat tensors.

        Each parameter's `.grad` is a view into one of them. Collective: every rank calls it once a step, also one
        that had no micro-batch.
        """
        ...

    def publish(self) -> None:
        """Collective, after the update: makes what other ranks own of it known. Nothing where all ranks own all."""
        ...


def make_strategy(config: ParallelConfig, model: nn.Module, group: Group) -> Strategy:
    """Returns the strategy the config names, attached to the model's parameters."""
    makers: dict[str, Callable[[], Strategy]] = {
        "ddp": lambda: BucketedSync(model, group, bucket_bytes=int(config.bucket_mb * 2**20)),
        "naive": lambda: NaiveSync(model, group),
    }
    if config.strategy not in makers:
        raise UserError(f"parallel.strategy is '{config.strategy}'; it must be one of {', '.join(makers)}")
    return makers[config.strategy]()
