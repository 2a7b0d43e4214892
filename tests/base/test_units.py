"""Quantities for people: every format is right at its borders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (999, "999"), (1000, "1k"), (1234567, "1.23M"), (124e6, "124M"), (10**10, "10G"), (2.5, "2.5")],
        *[(999.4, "999"), (999.7, "1k"), (999_499, "999k"), (999_500, "1M"), (999_999_999, "1G"), (999.7e12, "1,000T")],
    ],
)
def test_counts_have_three_digits_and_an_si_suffix(value: float, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_are_binary(num_bytes: int, text: str) -> None:
    assert units.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.2, "3.2s"), (75, "1m15s"), (59.4, "59s"), (59.6, "1m00s"), (7384, "2h03m"), (3599.7, "1h00m"), (3600, "1h00m")],
)
def test_durations_carry_into_the_next_unit(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@given(st.floats(min_value=1000, max_value=1e15))
def test_a_shown_count_is_within_half_a_percent_of_the_value(value: float) -> None:
    text = units.count(value).replace(",", "")
    assert "e" not in text
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[text[-1]]
    assert float(text[:-1]) * scale == pytest.approx(value, rel=0.0051)


@given(st.integers(0, 10**6))
def test_no_duration_shows_sixty_of_anything(seconds: int) -> None:
    assert "60" not in units.duration(seconds).split("h")[-1]
