"""The `ddp` strategy: all-reduces of gradient buckets (buckets.py) overlap with the backward pass that fills them. Why
not torch's DistributedDataParallel: docs/design/0001-own-buckets.md."""

import torch
from torch import nn

from paceline.sync.buckets import Bucket, BucketStrategy, backward_order, cut
from paceline.world.group import Group


class BucketedSync(BucketStrategy[Bucket]):
    """Every rank makes the complete update. Sends 2 (n-1)/n times the gradients' bytes a step."""

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int):
        buckets = [Bucket(chunk, group) for chunk in cut(backward_order(model), bucket_bytes)]
        super().__init__(model, group, buckets, launch=lambda bucket: group.start_all_reduce(bucket.flat))

    def full_gradients(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]
