"""Gradients summed over ranks: every strategy, at any bucket size, agrees with one process with the whole batch."""

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from paceline.base.errors import UserError
from paceline.base.ownership import Slice
from paceline.replica.replica import Replica
from paceline.sync.buckets import Bucket, BucketedSync
from paceline.sync.layout import backward_order, cut, owned_by_all
from paceline.sync.make import make_strategy
from paceline.sync.naive import NaiveSync
from paceline.sync.replicas import overall
from paceline.sync.strategy import Strategy
from paceline.sync.zero import ShardedSync
from paceline.world.config import ParallelConfig
from paceline.world.group import DistributedGroup, Group, LocalGroup
from paceline.world.runtime import World

BUCKET_BYTES = (1, 200, 1 << 30)
WHOLE = {"first.weight": 3.0, "sometimes.weight": 2.0, "last.weight": 1.0}  # updated whole, at these costs


class Net(nn.Module):
    """float64 with a few float32 parameters; one parameter nobody uses, one that only some micro-batches use."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7).double()
        self.narrow = nn.Linear(7, 7)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.sometimes = nn.Linear(7, 7).double()
        self.frozen = nn.Parameter(torch.ones(7, dtype=torch.float64), requires_grad=False)
        self.last = nn.Linear(7, 2).double()

    def forward(self, x: torch.Tensor, detour: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.frozen
        x = x + self.narrow(x.float()).double()
        if detour:
            x = x + self.sometimes(x)
        return self.last(torch.tanh(x)).square().sum()


def micro_batch(index: int) -> torch.Tensor:
    return torch.randn(2 + index % 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def run_micro_batches(net: nn.Module, indices: list[int], sync: Strategy | None) -> None:
    for i, index in enumerate(indices):
        loss = lambda index=index: net(micro_batch(index), index % 2 == 0) / 17  # noqa: E731
        if sync is None:
            loss().backward()
        else:
            with sync.accumulate(last=i == len(indices) - 1):
                loss().backward()


def whole_batch(count: int) -> dict[str, torch.Tensor]:
    """The oracle: one process, no strategy, every micro-batch."""
    net = Net()
    run_micro_batches(net, list(range(count)), None)
    return {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in net.named_parameters()
        if p.requires_grad
    }


def strategies(group: Group) -> dict[str, tuple[nn.Module, Strategy]]:
    made: dict[str, tuple[nn.Module, Strategy]] = {}
    for size in BUCKET_BYTES:
        net = Net()
        made[f"ddp {size}"] = (net, BucketedSync(net, group, size))
        net = Net()
        made[f"zero {size}"] = (net, ShardedSync(net, group, size, {}))
    net = Net()
    made["zero, some whole"] = (net, ShardedSync(net, group, BUCKET_BYTES[1], WHOLE))
    net = Net()
    made["naive"] = (net, NaiveSync(net, group))
    return made


def on_ranks(world: World) -> dict[str, Any]:
    """Gradients of each strategy at several micro-batch counts, two steps each (buffers are used again)."""
    gradients: dict[Any, dict[Slice, torch.Tensor]] = {}
    counts = (1, world.world_size + 1)
    for name, (net, sync) in strategies(world.group).items():
        slices = sync.slices()
        for count, attempt in itertools.product(counts, (1, 2)):
            run_micro_batches(net, list(range(world.rank, count, world.world_size)), sync)
            flat = sync.reduce()
            gradients[name, count, attempt] = {
                Slice(mine.name, mine.start, mine.stop): gradient_of(mine.parameter).reshape(-1).clone()
                for mine in slices
            }
            by_storage = {f.untyped_storage().data_ptr() for f in flat}
            inside = all(gradient_of(p.parameter).untyped_storage().data_ptr() in by_storage for p in slices)
            assert inside, "a gradient is no view into what reduce returned"
            assert sum(f.numel() for f in flat) == sum(mine.stop - mine.start for mine in slices)
            sync.publish()
            sync.end_step()
            assert all(p.grad is None for p in net.parameters())
        sync.wait_for_params()
    group = world.group
    found = {name: communication(name, group) for name in ("ddp", "zero")}
    return {"gradients": gradients, "counts": counts, "communication": found, "digests": replicas(world)}


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def communication(name: str, group: Group) -> dict[str, Any]:
    """How many transfers there were after each micro-step, in reduce and in publish."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    sync = make_strategy(ParallelConfig(strategy=name, bucket_mb=0.0003), net, group)  # type: ignore[arg-type]
    group.take_traffic()

    def num_transfers() -> int:
        group.barrier()
        under_way = group._traffic.transfers if isinstance(group, DistributedGroup) else []
        deadline = time.monotonic() + 60
        while any(not transfer.is_over for transfer in under_way) and time.monotonic() < deadline:
            time.sleep(0.001)  # what no other rank keeps any more ends by itself
        return len(group.take_traffic().transfers)

    seen = []
    for i in range(3):
        with sync.accumulate(last=i == 2):
            net(torch.ones(2, 8)).sum().backward()
        seen.append(num_transfers())
    sync.reduce()
    seen.append(num_transfers())
    sync.publish()
    sync.end_step()
    seen.append(num_transfers())
    return {"seen": seen, "buckets": len(list(cut(backward_order(net), 314)))}


def replicas(world: World) -> dict[str, str]:
    """Digests after five plain gradient steps, by strategy; 4 micro-batches a step."""
    found = {}
    for name, (net, sync) in strategies(world.group).items():
        slices = sync.slices()
        for _ in range(5):
            run_micro_batches(net, list(range(world.rank, 4, world.world_size)), sync)
            sync.reduce()
            with torch.no_grad():
                for mine in slices:
                    mine.parameter.sub_(gradient_of(mine.parameter), alpha=0.1)
            sync.publish()
            sync.end_step()
        found[name] = overall(sync.full_weights())
    return found


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"world-{size}")
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, request.param)


def joined(rows: list[dict[str, Any]], key: Any) -> dict[str, torch.Tensor]:
    """The gradients of a sharded strategy, out of the shares of all ranks: every element once."""
    shares = sorted((item, gradient) for row in rows for item, gradient in row["gradients"][key].items())
    whole: dict[str, list[torch.Tensor]] = {}
    for (item, gradient), before in zip(shares, [None, *(item for item, _ in shares)], strict=False):
        start = before.stop if before is not None and before.name == item.name else 0
        assert (item.start, item.num_elements) == (start, len(gradient)), f"{key}: {item} after {before}"
        whole.setdefault(item.name, []).append(gradient)
    return {name: torch.cat(parts) for name, parts in whole.items()}


def everywhere(rows: list[dict[str, Any]], key: Any) -> list[dict[str, torch.Tensor]]:
    """All gradients, as each rank has them; once where they are sharded."""
    if key[0].startswith("zero"):
        return [joined(rows, key)]
    return [{item.name: gradient for item, gradient in row["gradients"][key].items()} for row in rows]


def test_every_strategy_and_bucket_size_gives_the_gradient_of_the_whole_batch(rows: list[dict[str, Any]]) -> None:
    """Also where a rank had no micro-batch, a parameter no gradient, and only some ranks a parameter's."""
    wanted = {count: whole_batch(count) for count in rows[0]["counts"]}
    for key in rows[0]["gradients"]:
        for gradients in everywhere(rows, key):
            assert gradients.keys() == wanted[key[1]].keys()
            for name, gradient in gradients.items():
                tolerance = 1e-12 if gradient.dtype == torch.float64 and "narrow" not in name else 1e-5
                expected = wanted[key[1]][name].reshape(-1)
                assert gradient.dtype == expected.dtype
                # The float32 layer's rounding reaches the float64 ones below it.
                close = torch.allclose(gradient, expected, rtol=1e-5, atol=max(tolerance, 1e-7))
                assert close, f"{key}: {name}"


def test_what_is_updated_whole_has_one_owner_and_the_costliest_do_not_share_one(rows: list[dict[str, Any]]) -> None:
    for key in rows[0]["gradients"]:
        if key[0] == "zero, some whole":
            held = [item for row in rows for item in row["gradients"][key] if item.name in WHOLE]
            assert sorted(item.name for item in held) == sorted(WHOLE)  # none in two parts
            owners = {
                item.name: rank for rank, row in enumerate(rows) for item in row["gradients"][key] if item.name in WHOLE
            }
            assert len(set(owners.values())) == min(len(rows), len(WHOLE))


def test_a_gradient_that_all_ranks_have_is_bit_for_bit_the_same(rows: list[dict[str, Any]]) -> None:
    for key in rows[0]["gradients"]:
        first, *others = everywhere(rows, key)
        for other in others:
            assert all(torch.equal(gradient, other[name]) for name, gradient in first.items()), key


def test_on_two_ranks_all_strategies_agree_bit_for_bit(rows: list[dict[str, Any]]) -> None:
    """Two terms commute; with three the order in which a ring adds depends on the place in the buffer."""
    for key in rows[0]["gradients"]:
        naive = everywhere(rows, ("naive", *key[1:]))[0]
        for name, gradient in everywhere(rows, key)[0].items():
            if len(rows) == 2:
                assert torch.equal(gradient, naive[name]), key
            else:
                torch.testing.assert_close(gradient, naive[name], rtol=1e-5, atol=1e-7)


def test_gradients_travel_on_the_last_micro_step_only_and_within_backward(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for name, found in row["communication"].items():
            buckets = found["buckets"]
            assert buckets > 1
            assert found["seen"] == [0, 0, buckets, 0, buckets if name == "zero" else 0], name


def test_replicas_stay_bit_identical(rows: list[dict[str, Any]]) -> None:
    for row in rows[1:]:
        assert row["digests"] == rows[0]["digests"]


# ---- in one process, over random models ----


@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    bucket_bytes=st.integers(1, 600),
    accumulation=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_world_of_one_gets_plain_backwards_gradient(
    widths: list[int], bucket_bytes: int, accumulation: int, seed: int
) -> None:
    def build() -> nn.Sequential:
        generator = torch.Generator().manual_seed(seed)
        net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))).double()
        for parameter in net.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        return net

    plain, synced = build(), build()
    sync = BucketedSync(synced, LocalGroup(torch.device("cpu")), bucket_bytes)
    for i in range(accumulation):
        x = torch.randn(3, widths[0], dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        plain(x).square().sum().backward()
        with sync.accumulate(last=i == accumulation - 1):
            synced(x).square().sum().backward()
    sync.reduce()
    for mine, theirs in zip(synced.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad if theirs.grad is not None else torch.zeros_like(theirs))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), bucket_bytes=st.integers(1, 400))
def test_buckets_hold_every_parameter_once_in_reverse_order_within_their_size(
    sizes: list[int], bucket_bytes: int
) -> None:
    net = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    buckets = [
        Bucket(owned_by_all(chunk), LocalGroup(torch.device("cpu"))) for chunk in cut(backward_order(net), bucket_bytes)
    ]
    held = [parameter for bucket in buckets for parameter in bucket.parameters]
    assert [id(p) for p in held] == [id(p) for p in reversed(list(net.parameters()))]
    for bucket, after in itertools.zip_longest(buckets, buckets[1:]):
        assert bucket.flat.nbytes <= bucket_bytes or len(bucket.parameters) == 1
        if after is not None:  # no bucket is cut earlier than it had to be
            assert bucket.flat.nbytes + after.parameters[0].nbytes > bucket_bytes


def test_the_named_strategy_is_the_one_in_force() -> None:
    group = LocalGroup(torch.device("cpu"))
    kinds = {"ddp": BucketedSync, "zero": ShardedSync, "naive": NaiveSync}
    kinds |= {"fsdp": BucketedSync, "hsdp": BucketedSync, "local": BucketedSync}  # nobody to share with
    for name, kind in kinds.items():
        assert type(make_strategy(ParallelConfig(strategy=name), Net(), group)) is kind  # type: ignore[arg-type]
    many = make_strategy(ParallelConfig(strategy="ddp", bucket_mb=0.001), nn.Linear(30, 30), group)
    assert len(many.reduce()) == 2


# ---- fsdp: what torch's fully_shard does not do by itself ----


class Branches(nn.Module):
    """Each of two ranks goes through a branch of its own, nobody through the third, and all twice through `again`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.again = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.again(self.again(self.branches[rank](x)).tanh()).square().mean()


def branched(world: World) -> tuple[list[dict[str, torch.Tensor]], str]:
    """Weights after two steps with fsdp and with zero; what is said of tied blocks."""
    found = []
    for strategy in ("fsdp", "zero"):
        net = Branches()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        replica = Replica(net, optimizer, world, strategy=strategy, blocks=[net.again, net.again])  # type: ignore[arg-type]
        for _ in range(2):
            replica.train(torch.ones(2, 4), lambda x, net=net: net(x, world.rank))
        found.append({name: weight.clone() for name, weight in replica.state_dict().items()})
    tied = Branches()
    tied.branches[0].weight = tied.again.weight
    with pytest.raises(UserError) as caught:
        make_strategy(ParallelConfig(strategy="fsdp"), tied, world.group, stages=[tied.again])
    return found, str(caught.value)


def test_fsdp_adds_up_what_only_some_ranks_use_and_leaves_alone_what_nobody_uses() -> None:
    for (sharded, plain), said in run_ranks(branched, 2):
        torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-6)
        unused = "branches.2.weight"
        assert torch.equal(sharded[unused], Branches().state_dict()[unused])
        assert not torch.equal(sharded["branches.0.weight"], Branches().state_dict()["branches.0.weight"])
        assert "again.weight is a parameter that two of them share, or one and the rest of the model" in said
