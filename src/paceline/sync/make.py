"""Makes the strategy that a config names, and refuses one that the ranks' processors cannot use together."""

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
from paceline.world.config import SHARDS_WEIGHTS, ParallelConfig
from paceline.world.facts import RankFacts, unequal_kinds
from paceline.world.group import DistributedGroup, Group


def check_strategy(strategy: str, facts: Sequence[RankFacts], wire: str = "exact") -> None:
    """Raises UserError on all ranks if processors with these facts cannot use the strategy, or the wire, together."""
    if wire != "exact" and facts[0].backend == "nccl":
        raise UserError(
            f"parallel.wire is {wire}, and NCCL adds gradients as they are: use --parallel.wire exact, or "
            "--parallel.backend gloo where the network is slow",
            reach="world",
        )
    kinds = unequal_kinds(facts)
    if strategy in ("ddp", "naive", "hsdp") and kinds:
        raise UserError(
            f"with strategy {strategy} several ranks make the same update, and unequal processors round it "
            f"differently: {kinds}. Use --parallel.strategy zero (in a script: strategy='zero'), where each weight is "
            "updated on one rank and sent to the others",
            reach="world",
        )
    if strategy in SHARDS_WEIGHTS and sends_gpu_memory_by_gloo(facts):
        raise UserError(
            f"strategy {strategy} sends a GPU's memory, which backend gloo cannot: use --parallel.strategy zero, or "
            "nccl with GPUs on all ranks",
            reach="world",
        )


def sends_gpu_memory_by_gloo(facts: Sequence[RankFacts]) -> bool:
    """Whether a GPU's tensors pass through host memory, where torch's own collectives of `fsdp` do not find them."""
    return facts[0].backend == "gloo" and any(each.device == "cuda" for each in facts)


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
