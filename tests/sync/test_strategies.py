"""Gradients summed over ranks: the overlapped strategy, the naive one and one process with the whole batch agree."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from paceline.base.errors import UserError
from paceline.sync.ddp import BucketedSync
from paceline.sync.naive import NaiveSync
from paceline.sync.replicas import overall
from paceline.sync.strategy import Strategy, make_strategy
from paceline.world.config import ParallelConfig
from paceline.world.group import Group, LocalGroup
from paceline.world.runtime import World

BUCKET_BYTES = (1, 200, 3000, 1 << 30)


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


def strategies(net_of: Any, group: Group) -> dict[str, tuple[nn.Module, Strategy]]:
    made: dict[str, tuple[nn.Module, Strategy]] = {}
    for size in BUCKET_BYTES:
        net = net_of()
        made[f"ddp {size}"] = (net, BucketedSync(net, group, size))
    net = net_of()
    made["naive"] = (net, NaiveSync(net, group))
    return made


def on_ranks(world: World) -> dict[str, Any]:
    """Gradients of each strategy at several micro-batch counts, two steps each (buffers are used again)."""
    gradients: dict[Any, Any] = {}
    counts = (1, world.world_size, world.world_size + 1, 3 * world.world_size)
    for name, (net, sync) in strategies(Net, world.group).items():
        for count, attempt in itertools.product(counts, (1, 2)):
            run_micro_batches(net, list(range(world.rank, count, world.world_size)), sync)
            flat = sync.reduce()
            gradients[name, count, attempt] = {n: p.grad.clone() for n, p in net.named_parameters() if p.requires_grad}
            by_storage = {f.untyped_storage().data_ptr() for f in flat}
            inside = all(p.grad.untyped_storage().data_ptr() in by_storage for p in net.parameters() if p.requires_grad)
            assert inside, "a gradient is no view into what reduce returned"
            assert sum(f.numel() for f in flat) == sum(p.numel() for p in net.parameters() if p.requires_grad)
            sync.publish()
            assert all(p.grad is None for p in net.parameters())
    return {"gradients": gradients, "counts": counts, **communication(world), "digests": digests(world)}


def communication(world: World) -> dict[str, Any]:
    """Transfers of the overlapped strategy after each micro-step, before and after reduce."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    sync = BucketedSync(net, world.group, 300)
    world.group.take_transfers()
    during = []
    for i in range(3):
        with sync.accumulate(last=i == 2):
            net(torch.ones(2, 8)).sum().backward()
        during.append(len(world.group.take_transfers()))
    sync.reduce()
    after = len(world.group.take_transfers())
    return {"during": during, "after": after, "buckets": len(sync.buckets)}


def digests(world: World) -> dict[str, str]:
    """The replicas after five plain gradient steps, by strategy; 4 micro-batches a step."""
    found = {}
    for name, (net, sync) in strategies(Net, world.group).items():
        for _ in range(5):
            run_micro_batches(net, list(range(world.rank, 4, world.world_size)), sync)
            sync.reduce()
            with torch.no_grad():
                for parameter in net.parameters():
                    if parameter.requires_grad:
                        parameter -= 0.1 * parameter.grad
            sync.publish()
        found[name] = overall(net)
    return found


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"world-{size}")
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(on_ranks, request.param)


def test_every_strategy_and_bucket_size_gives_the_gradient_of_the_whole_batch(rows: list[dict[str, Any]]) -> None:
    """Also where a rank had no micro-batch, a parameter no gradient, and only some ranks a parameter's."""
    for count in rows[0]["counts"]:
        wanted = whole_batch(count)
        for row in rows:
            for (name, seen_count, attempt), gradients in row["gradients"].items():
                if seen_count != count:
                    continue
                for parameter, gradient in gradients.items():
                    tolerance = 1e-12 if gradient.dtype == torch.float64 and "narrow" not in parameter else 1e-5
                    assert gradient.dtype == wanted[parameter].dtype
                    # The float32 layer's rounding reaches the float64 ones below it.
                    close = torch.allclose(gradient, wanted[parameter], rtol=1e-5, atol=max(tolerance, 1e-7))
                    assert close, f"{name}, {count} micro-batches, step {attempt}: {parameter}"


def test_the_gradient_is_bit_for_bit_the_same_on_every_rank(rows: list[dict[str, Any]]) -> None:
    for key, gradients in rows[0]["gradients"].items():
        for row in rows[1:]:
            assert all(torch.equal(gradient, row["gradients"][key][name]) for name, gradient in gradients.items()), key


def test_up_to_two_ranks_all_strategies_agree_bit_for_bit(rows: list[dict[str, Any]]) -> None:
    """Two terms commute; with three the order in which a ring adds depends on the place in the buffer."""
    for (_, count, attempt), gradients in rows[0]["gradients"].items():
        naive = rows[0]["gradients"]["naive", count, attempt]
        for name, gradient in gradients.items():
            if len(rows) <= 2:
                assert torch.equal(gradient, naive[name])
            else:
                torch.testing.assert_close(gradient, naive[name], rtol=1e-5, atol=1e-7)


def test_communication_happens_on_the_last_micro_step_only_and_within_backward(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["buckets"] > 1
        assert row["during"] == [0, 0, row["buckets"]]
        assert row["after"] == 0


def test_replicas_stay_bit_identical(rows: list[dict[str, Any]]) -> None:
    for row in rows[1:]:
        assert row["digests"] == rows[0]["digests"]


# ---- in one process, over random models ----


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), bucket_bytes=st.integers(1, 400))
def test_buckets_hold_every_parameter_once_in_reverse_order_within_their_size(
    sizes: list[int], bucket_bytes: int
) -> None:
    net = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    buckets = BucketedSync(net, LocalGroup(torch.device("cpu")), bucket_bytes).buckets
    held = [parameter for bucket in buckets for parameter in bucket.parameters]
    assert [id(p) for p in held] == [id(p) for p in reversed(list(net.parameters()))]
    for bucket, after in itertools.zip_longest(buckets, buckets[1:]):
        assert bucket.flat.nbytes <= bucket_bytes or len(bucket.parameters) == 1
        if after is not None:  # no bucket is cut earlier than it had to be
            assert bucket.flat.nbytes + after.parameters[0].nbytes > bucket_bytes


def test_the_named_strategy_is_the_one_in_force() -> None:
    group = LocalGroup(torch.device("cpu"))
    assert isinstance(make_strategy(ParallelConfig(strategy="ddp"), Net(), group), BucketedSync)
    assert isinstance(make_strategy(ParallelConfig(strategy="naive"), Net(), group), NaiveSync)
    many = make_strategy(ParallelConfig(bucket_mb=0.001), nn.Linear(30, 30), group)
    assert len(many.buckets) == 2  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"parallel\.strategy is 'zero'"):
        make_strategy(ParallelConfig(strategy="zero"), Net(), group)  # type: ignore[arg-type]
