"""The `ddp` strategy: all-reduces of gradient buckets, behind the backward that fills them. See buckets.py.

Why own buckets and not torch's DistributedDataParallel: docs/design/0001-own-buckets.md.
"""

from contextlib import AbstractContextManager

import torch
from torch import nn

from paceline.base.ownership import Slice
from paceline.optim.optimizer import Piece
from paceline.sync.buckets import Bucket, Buckets, backward_order, cut, first_not_finite
from paceline.sync.whole import full, whole_pieces, whole_weights
from paceline.world.group import Group


class BucketedSync:
    """Every rank makes the whole update. Communication a step: 2 (n-1)/n times the gradients' bytes, on the last
    micro-step only."""

    shards_weights = False
    shards_state = False
    lockstep = False

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int):
        self._model = model
        buckets = [Bucket(chunk) for chunk in cut(backward_order(model), bucket_bytes)]
        self._buckets = Buckets(buckets, launch=lambda bucket: group.start_all_reduce(bucket.flat))

    def pieces(self) -> list[Piece]:
        return whole_pieces(self._model)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return self._buckets.accumulate(last)

    def reduce(self) -> list[torch.Tensor]:
        self._buckets.finish()
        return [bucket.flat for bucket in self._buckets.buckets]

    def total(self, amount: float) -> float:
        return amount

    def not_finite(self) -> tuple[str | None, bool | None]:
        buckets = self._buckets.buckets
        return first_not_finite(buckets, [(0, bucket.flat.numel()) for bucket in buckets])

    def publish(self) -> None:
        self._buckets.empty()

    def settle(self) -> None: ...

    def weights(self) -> dict[Slice, torch.Tensor]:
        return whole_weights(self._model)

    def full_weights(self) -> dict[str, torch.Tensor]:
        return full(self._model)
