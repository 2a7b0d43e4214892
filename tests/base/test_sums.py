"""Sums by rank: exact in any order, and a number also where a loss has overflowed."""

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.base.sums import exact_sum


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=6), st.randoms())
def test_the_order_does_not_matter(numbers: list[float], random: object) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert exact_sum(numbers) == exact_sum(shuffled)
    assert exact_sum([*numbers, 1e30, -1e30]) == exact_sum(numbers)


def test_overflow_is_no_error() -> None:
    assert math.isnan(exact_sum([math.inf, -math.inf, 1.0]))
    assert exact_sum([1e308, 1e308]) == math.inf
    assert exact_sum(iter([math.inf, 1.0])) == math.inf
    assert exact_sum([]) == 0
