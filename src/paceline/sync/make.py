"""Makes the strategy that a config names."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from paceline.sync.buckets import BucketedSync
from paceline.sync.local import LocalSync
from paceline.sync.naive import NaiveSync
from paceline.sync.strategy import Strategy
from paceline.sync.zero import ShardedSync
from paceline.world.config import SHARDS_WEIGHTS, ParallelConfig
from paceline.world.group import DistributedGroup, Group


def make_strategy(
    config: ParallelConfig,
    model: nn.Module,
    group: Group,
    unsplit_costs: Mapping[str, float] | None = None,
    stages: Sequence[nn.Module] = (),
    read_as: Mapping[str, torch.dtype] | None = None,
    rounded_gradients: Collection[str] = (),
) -> Strategy:
    """Returns the strategy, attached to the model's parameters. config: says which, not auto. unsplit_costs and what
    follows: see ShardedSync."""
    costs = unsplit_costs or {}
    shares_memory = group.shares_memory and config.wire == "exact"
    bucket_bytes = config.bucket_bytes(next(model.parameters()).device.type, shares_memory=shares_memory)
    if config.strategy in SHARDS_WEIGHTS and isinstance(group, DistributedGroup):
        from paceline.sync.fsdp import FullySharded  # takes half a second to import

        hosts = group.hosts.ranks if config.strategy == "hsdp" else ()
        return FullySharded(model, group, stages, costs, hosts, read_as)
    if config.strategy == "local" and group.size > 1:
        return LocalSync(model, group, bucket_bytes, config.sync_every, config.wire)
    if config.strategy == "naive":
        return NaiveSync(model, group)
    if config.strategy != "zero":  # ddp, or one process, which has nobody to share weights with: no rounding either
        assert config.strategy in ("ddp", "local", *SHARDS_WEIGHTS), config.strategy
        return BucketedSync(model, group, bucket_bytes)
    if shares_memory or config.wire not in ("exact", "bf16"):
        # Rounding takes longer than to copy all bits; a codec sends fewer.
        read_as, rounded_gradients = None, ()
    is_padded = group.is_queued and config.wire in ("exact", "bf16")
    return ShardedSync(
        model, group, bucket_bytes, costs, stages, read_as, rounded_gradients, config.wire, is_padded=is_padded
    )
