"""Intervals against brute force over small integers, where every unit cell is covered or not."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.clock import Stopwatch, clip_intervals, union_ms, within

moments = st.integers(0, 30)
intervals = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))), max_size=12)


def cells(pairs: list[tuple[float, float]]) -> set[int]:
    return {cell for start, end in pairs for cell in range(int(start), int(end))}


@given(intervals)
def test_union_counts_overlaps_once(pairs: list[tuple[float, float]]) -> None:
    assert union_ms(pairs) == len(cells(pairs))


@given(intervals, moments, moments)
def test_clipping_keeps_exactly_what_lies_inside(pairs: list[tuple[float, float]], start: int, end: int) -> None:
    clipped = clip_intervals(pairs, start, end)
    assert cells(clipped) == cells(pairs) & set(range(start, end))
    assert all(start <= a < b <= end for a, b in clipped)


@given(intervals, st.randoms())
def test_the_order_of_intervals_does_not_matter(pairs: list[tuple[float, float]], random: object) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert union_ms(shuffled) == union_ms(pairs)


def test_no_interval_covers_nothing() -> None:
    assert union_ms([]) == 0.0
    assert clip_intervals([], 0, 10) == []


def test_a_paused_stopwatch_stands_still_and_goes_on_from_where_it_was() -> None:
    watch = Stopwatch(elapsed_s=5.0)
    assert watch.elapsed_s == 5.0
    watch.start()
    time.sleep(0.02)
    watch.pause()
    stopped = watch.elapsed_s
    assert stopped >= 5.02
    time.sleep(0.02)
    assert watch.elapsed_s == stopped
    watch.start()
    time.sleep(0.01)
    assert watch.elapsed_s > stopped


def test_a_call_is_given_up_after_a_while_and_its_errors_are_raised() -> None:
    assert within(10, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 / 0)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: time.sleep(1))
