"""Makes the strategy that a config names."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from paceline.base.errors import UserError
from paceline.sync.ddp import BucketedSync
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
) -> Strategy:
    """Returns the strategy, attached to the model's parameters. unsplit_costs and stages: see ShardedSync."""
    bucket_bytes = int(config.bucket_mb * 2**20)
    makers: dict[str, Callable[[], Strategy]] = {
        "ddp": lambda: BucketedSync(model, group, bucket_bytes),
        "zero": lambda: ShardedSync(model, group, bucket_bytes, unsplit_costs or {}, stages),
        "fsdp": lambda: _fully_sharded(model, group, bucket_bytes, stages),
        "naive": lambda: NaiveSync(model, group),
    }
    if config.strategy not in makers:
        raise UserError(f"parallel.strategy is '{config.strategy}'; it must be one of {', '.join(makers)}")
    return makers[config.strategy]()


def _fully_sharded(model: nn.Module, group: Group, bucket_bytes: int, stages: Sequence[nn.Module]) -> Strategy:
    if not isinstance(group, DistributedGroup):  # one process without a launcher: nothing to shard
        return BucketedSync(model, group, bucket_bytes)
    from paceline.sync.fsdp import FullySharded  # takes half a second to import

    return FullySharded(model, group, group.device, stages)
