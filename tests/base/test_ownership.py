"""Ownership is arithmetic: every element once, shares as they should be, and as equal as they can be."""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.base.ownership import Slice, assign, borders, cut, fill

weights = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9)
costs = st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=30)
num_parts = st.integers(1, 9)


@st.composite
def whole_tensors(draw: st.DrawFn) -> list[Slice]:
    """A few tensors, each as one slice that need not start at 0; some are empty."""
    sizes = draw(st.lists(st.integers(0, 200), max_size=8))
    starts = [draw(st.integers(0, 50)) for _ in sizes]
    return [Slice(f"t{i}", start, start + size) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))]


def elements(slices: list[Slice]) -> list[tuple[str, int]]:
    return [(item.name, i) for item in slices for i in range(item.start, item.stop)]


# ---- borders ----


@given(st.integers(0, 10**12), weights)
def test_borders_hold_every_element_once_and_each_part_its_share_to_the_element(num: int, given: list[float]) -> None:
    found = borders(num, given)
    assert found[0] == 0
    assert found[-1] == num
    assert len(found) == len(given) + 1
    assert all(low <= high for low, high in itertools.pairwise(found))
    shares = [weight / sum(given) for weight in given] if sum(given) > 0 else [1 / len(given)] * len(given)
    for (low, high), share in zip(itertools.pairwise(found), shares, strict=True):
        assert abs((high - low) - num * share) <= 1 + 1e-9 * num


@given(st.integers(0, 10**9), num_parts)
def test_equal_weights_give_parts_that_differ_by_one_element_at_most(num: int, parts: int) -> None:
    for weight in (0.0, 3.0):
        sizes = [high - low for low, high in itertools.pairwise(borders(num, [weight] * parts))]
        assert max(sizes) - min(sizes) <= 1


def test_a_weight_of_nothing_gets_nothing_and_few_elements_leave_parts_empty() -> None:
    assert borders(10, [1, 0, 1]) == [0, 5, 5, 10]
    assert borders(7, [0, 1]) == [0, 0, 7]
    assert borders(1, [1, 1, 1])[-1] == 1
    assert borders(0, [1, 2]) == [0, 0, 0]


# ---- deal ----


@given(costs, num_parts)
def test_every_item_has_an_owner_and_nobody_more_than_the_mean_and_the_costliest(given: list[float], n: int) -> None:
    owners = assign(given, n)
    assert len(owners) == len(given)
    assert all(0 <= owner < n for owner in owners)
    loads = [math.fsum(cost for cost, owner in zip(given, owners, strict=True) if owner == rank) for rank in range(n)]
    assert max(loads) <= sum(given) / n + max(given, default=0.0) + 1e-3


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
@example([1, 1, 2], 2)  # in this order: 1 + 2 and 1
def test_the_most_that_a_rank_gets_is_within_four_thirds_of_the_best_deal(given: list[int], n: int) -> None:
    owners = assign(given, n)
    most = max(sum(c for c, owner in zip(given, owners, strict=True) if owner == rank) for rank in range(n))
    best = min(
        max(sum(c for c, owner in zip(given, other, strict=True) if owner == rank) for rank in range(n))
        for other in itertools.product(range(n), repeat=len(given))
    )
    assert most <= (4 / 3 - 1 / (3 * n)) * best + 1e-9


def test_ties_go_to_the_lower_rank() -> None:
    assert assign([1, 1, 1, 1], 3) == [0, 1, 2, 0]
    assert assign([], 3) == []


# ---- fill ----


@given(weights, st.floats(0, 1e7))
def test_all_that_is_poured_is_given_out_and_levels_the_lowest(loads: list[float], amount: float) -> None:
    poured = fill(loads, amount)
    assert all(part >= 0 for part in poured)
    assert math.isclose(math.fsum(poured), amount, rel_tol=1e-9, abs_tol=1e-6 * (1 + max(loads)))
    levels = [load + part for load, part in zip(loads, poured, strict=True)]
    wet = [level for level, part in zip(levels, poured, strict=True) if part > 0]
    if wet:
        assert max(wet) - min(wet) <= 1e-6 * (1 + max(wet))  # who got something stands at one level
        assert all(level >= max(wet) - 1e-6 * (1 + max(wet)) for level in levels)  # and nobody below it


def test_pouring_fills_valleys_first() -> None:
    assert fill([3, 0, 1], 3) == pytest.approx([0, 2, 1])
    assert fill([5, 0], 2) == [0, 2]
    assert fill([0, 0], 1) == [0.5, 0.5]


# ---- slices ----


@given(whole_tensors(), num_parts)
def test_cutting_keeps_every_element_once_in_order_and_parts_differ_by_one(slices: list[Slice], parts: int) -> None:
    found = cut(slices, parts)
    assert len(found) == parts
    assert elements([item for part in found for item in part]) == elements(slices)
    assert all(item.num_elements > 0 for part in found for item in part)
    sizes = [sum(item.num_elements for item in part) for part in found]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_an_overlap_is_what_both_sets_of_elements_have(a: int, b: int, c: int, d: int, same: bool) -> None:
    one, other = Slice("w", min(a, b), max(a, b)), Slice("w" if same else "v", min(c, d), max(c, d))
    wanted = set(elements([one])) & set(elements([other]))
    found = one.overlap(other)
    assert set(elements([found] if found else [])) == wanted
    assert one.overlap(other) == other.overlap(one)
