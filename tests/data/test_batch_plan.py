"""The plan: every sequence of a step on exactly one rank, micro-batches the same at any world size."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data.plan import BatchPlan, in_proportion

SIZES = st.integers(1, 60)


@given(SIZES, SIZES, st.integers(1, 20))
def test_laws(global_batch_size: int, device_batch_size: int, world_size: int) -> None:
    plan = BatchPlan(global_batch_size, device_batch_size, world_size)
    dealt = [plan.micro_batches(rank) for rank in range(world_size)]
    in_order = [batch for batches in dealt for batch in batches]
    assert [place for batch in in_order for place in batch] == list(range(global_batch_size))
    assert in_order == BatchPlan(global_batch_size, device_batch_size, 1).micro_batches(0)
    assert all(len(batch) == device_batch_size for batch in in_order[:-1])
    counts = [plan.num_micro_batches(rank) for rank in range(world_size)]
    assert counts == [len(batches) for batches in dealt]
    assert max(counts) - min(counts) <= 1
    assert max(counts) == plan.passes


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=12))
def test_shares(ranks: list[tuple[int, int]]) -> None:
    """Every position on one rank, in order; as few micro-batches as a rank's limit allows, of nearly equal size."""
    shares, limits = zip(*([*ranks, (1, 1)]), strict=True)
    plan = BatchPlan(sum(shares), 1, len(shares), shares, limits)
    dealt = [plan.micro_batches(rank) for rank in range(plan.world_size)]
    assert [place for batches in dealt for batch in batches for place in batch] == list(range(sum(shares)))
    assert plan.num_sequences() == list(shares)
    for batches, share, limit in zip(dealt, shares, limits, strict=True):
        sizes = [len(batch) for batch in batches]
        assert len(sizes) == math.ceil(share / limit)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert plan.passes == max(map(len, dealt))


@given(st.integers(0, 500), st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any))
def test_shares_in_proportion(total: int, weights: list[int]) -> None:
    shares = in_proportion(total, weights)
    assert sum(shares) == total
    assert all(abs(share - total * w / sum(weights)) < 1 for share, w in zip(shares, weights, strict=True))
    assert in_proportion(sum(weights), weights) == tuple(weights)


def test_the_example_of_the_docstring() -> None:
    assert BatchPlan(12, 5, 2).micro_batches(0) == [range(0, 5), range(5, 10)]
    assert BatchPlan(12, 5, 2).micro_batches(1) == [range(10, 12)]
    assert [BatchPlan(12, 5, 4).num_micro_batches(rank) for rank in range(4)] == [1, 1, 1, 0]
    plan = BatchPlan(12, 5, 2).with_shares((9, 3))
    assert plan.micro_batches(0) == [range(0, 4), range(4, 9)]
    assert plan.micro_batches(1) == [range(9, 12)]


@pytest.mark.parametrize(("sizes", "name"), [((0, 1, 1), "global-batch-size"), ((1, -2, 1), "device-batch-size")])
def test_refuses_what_is_not_positive(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(UserError, match=name):
        BatchPlan(*sizes)


@pytest.mark.parametrize("shares", [(2, 1), (2, 2, 0)])
def test_refuses_shares_of_another_batch_or_world(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        BatchPlan(4, 1, 2, shares)


def test_refuses_a_rank_outside_the_world() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        BatchPlan(4, 1, 2).micro_batches(2)


def test_data_without_batches_needs_no_torch() -> None:
    modules = ("config", "plan", "order", "dataset", "mixture", "prepare")
    code = f"import sys; from paceline.data import {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
