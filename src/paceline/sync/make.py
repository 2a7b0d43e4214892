"""Makes the strategy that a config names."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from paceline.base.errors import UserError
from paceline.sync.coded import CodedSync
from paceline.sync.ddp import BucketedSync
from paceline.sync.local import LocalSync
from paceline.sync.naive import NaiveSync
from paceline.sync.strategy import Strategy
from paceline.sync.zero import ShardedSync
from paceline.world.config import ParallelConfig
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
    """Returns the strategy, attached to the model's parameters. unsplit_costs and what follows: see ShardedSync."""
    shares_memory = group.shares_memory and config.wire == "exact"
    bucket_bytes = config.bucket_bytes(next(model.parameters()).device.type, shares_memory=shares_memory)
    sent_as = torch.bfloat16 if config.wire == "bf16" else None
    # It sends nothing through shared memory.
    sharded = partial(_fully_sharded, model, group, bucket_bytes, stages, unsplit_costs or {}, read_as)
    if shares_memory:  # rounding would take longer than to copy all bits
        read_as, rounded_gradients = None, ()
    bits = {"int8": 8, "int4": 4}
    makers: dict[str, Callable[[], Strategy]] = {
        "ddp": lambda: BucketedSync(model, group, bucket_bytes),
        "zero": lambda: (
            CodedSync(model, group, bucket_bytes, unsplit_costs or {}, stages, bits[config.wire])
            if config.wire in bits
            else ShardedSync(
                model,
                group,
                bucket_bytes,
                unsplit_costs or {},
                stages,
                read_as,
                rounded_gradients,
                sent_as,
                is_padded=group.is_queued,
            )
        ),
        "fsdp": partial(sharded, by_host=False),
        "hsdp": partial(sharded, by_host=True),
        "local": lambda: _local(config, model, group, bucket_bytes),
        "naive": lambda: NaiveSync(model, group),
    }
    if config.strategy not in makers:
        raise UserError(f"parallel.strategy is '{config.strategy}'; it must be one of {', '.join(makers)}")
    return makers[config.strategy]()


def _local(config: ParallelConfig, model: nn.Module, group: Group, bucket_bytes: int) -> Strategy:
    if group.size == 1:  # nobody to exchange weights with: no rounding either
        return BucketedSync(model, group, bucket_bytes)
    return LocalSync(model, group, bucket_bytes, config.sync_every)


def _fully_sharded(
    model: nn.Module,
    group: Group,
    bucket_bytes: int,
    stages: Sequence[nn.Module],
    unsplit_costs: Mapping[str, float],
    read_as: Mapping[str, torch.dtype] | None,
    by_host: bool,
) -> Strategy:
    if not isinstance(group, DistributedGroup):  # one process without a launcher: nothing to shard
        return BucketedSync(model, group, bucket_bytes)
    hosts = group.hosts.ranks if by_host else ()
    if len({len(ranks) for ranks in hosts}) > 1:
        raise UserError(
            f"parallel.strategy hsdp needs equally many ranks on each host, and they have {[len(r) for r in hosts]}; "
            "start as many on each, or use --parallel.strategy fsdp",
            reach="world",
        )
    from paceline.sync.fsdp import FullySharded  # takes half a second to import

    return FullySharded(model, group, group.device, stages, unsplit_costs, hosts, read_as)
