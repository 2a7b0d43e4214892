"""Mixtures: every data set's sequences come in order and without a gap, and every prefix has the weights' shares."""

from fractions import Fraction
from math import floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_data import prepare_small

from paceline.base.errors import UserError
from paceline.data.mixture import Blend, counts, locate, shares_of

WEIGHTS = st.lists(st.floats(1e-2, 1e3), min_size=1, max_size=6)
AWKWARD = [
    (1.0,),
    (1, 1),
    (1 / 3, 2 / 3),
    (1, 1, 1),
    (0.999, 0.001),
    (0.001, 0.999),
    (1e-4, 1, 1e-4),
    (0.7, 0.2, 0.1),
    (2**0.5, 3**0.5, 5**0.5, 7**0.5),
    tuple(1 / (i + 1) for i in range(12)),
]


def fractions(weights: tuple[float, ...] | list[float]) -> list[Fraction]:
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@given(WEIGHTS, st.integers(1, 2000))
def test_each_data_set_is_counted_in_order_and_without_a_gap(weights: list[float], num_positions: int) -> None:
    own = shares_of(weights)
    sources, indices = locate(own, np.arange(num_positions))
    assert sources.dtype == indices.dtype == np.int64
    for source in range(len(weights)):
        mine = indices[sources == source]
        assert np.array_equal(mine, np.arange(mine.size))
        assert counts(own, num_positions)[source] == mine.size
    assert sum(counts(own, num_positions)) == num_positions


@given(WEIGHTS, st.integers(1, 2000))
def test_every_prefix_has_the_shares(weights: list[float], num_positions: int) -> None:
    """Data set i to within (i + 1) / 2 positions, and 2**-30 of the prefix for each share that was rounded."""
    sources, _ = locate(shares_of(weights), np.arange(num_positions))
    lengths = np.arange(1, num_positions + 1)
    for number, share in enumerate(fractions(weights)):
        counted = np.cumsum(sources == number)
        off = np.abs(counted - float(share) * lengths)
        assert (off <= (number + 1) / 2 + 1e-9 + len(weights) * lengths * 2.0**-30).all()


@pytest.mark.parametrize("weights", AWKWARD)
def test_shares_are_the_weights_within_a_hundredth_of_a_percent_over_100_000(weights: tuple[float, ...]) -> None:
    sources, _ = locate(shares_of(weights), np.arange(100_000))
    for number, share in enumerate(fractions(weights)):
        assert abs((sources == number).mean() - float(share)) < 1e-4


@given(WEIGHTS.filter(lambda weights: len(weights) > 1), st.integers(0, 2**62 - 1))
def test_far_out_it_is_the_exact_arithmetic_of_whole_numbers(weights: list[float], position: int) -> None:
    """Against Python's unbounded integers, up to 2**62."""
    own = shares_of(weights)
    expected, rest = len(weights) - 1, position
    for number in range(len(weights) - 1):
        share = Fraction(round(weights[number] / sum(weights[number:]) * 2**30), 2**30)
        before, after = (floor(share * n + Fraction(1, 2)) for n in (rest, rest + 1))
        if after > before:
            expected, rest = number, before
            break
        rest -= before
    sources, indices = locate(own, np.array([position]))
    assert (int(sources[0]), int(indices[0])) == (expected, rest)
    assert counts(own, position)[expected] == rest


@given(WEIGHTS, st.lists(st.integers(0, 2**62 - 1), max_size=40))
def test_a_position_does_not_depend_on_the_others_asked_for(weights: list[float], positions: list[int]) -> None:
    own = shares_of(weights)
    together = locate(own, np.array(positions, dtype=np.int64))
    for i, position in enumerate(positions):
        alone = locate(own, np.array([position]))
        assert [int(a[0]) for a in alone] == [int(a[i]) for a in together]


@given(st.integers(0, 2**62 - 1))
def test_one_data_set_has_every_position(position: int) -> None:
    sources, indices = locate(shares_of([0.3]), np.array([position]))
    assert (int(sources[0]), int(indices[0])) == (0, position)


@given(WEIGHTS, st.floats(1e-3, 1e3))
def test_weights_need_no_sum_and_the_order_moves_only_neighbours(weights: list[float], factor: float) -> None:
    counted = counts(shares_of(weights), 10_000)
    scaled = counts(shares_of([weight * factor for weight in weights]), 10_000)
    assert max(abs(a - b) for a, b in zip(counted, scaled, strict=True)) <= 1
    backwards = counts(shares_of(weights[::-1]), 10_000)[::-1]
    assert max(abs(a - b) for a, b in zip(counted, backwards, strict=True)) <= len(weights)


def test_the_pattern_stays() -> None:
    """A run that is resumed under a later paceline must see the same data: these values never change."""
    assert locate(shares_of([1, 1]), np.arange(6))[0].tolist() == [0, 1, 0, 1, 0, 1]
    sources, indices = locate(shares_of([0.5, 0.3, 0.2]), np.arange(10))
    assert sources.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
    assert indices.tolist() == [0, 0, 1, 0, 2, 1, 3, 1, 4, 2]
    sources, indices = locate(shares_of([0.7, 0.2, 0.1]), np.array([10**6 + 7, 10**18, 2**62 - 1]))
    assert sources.tolist() == [0, 0, 0]
    assert indices.tolist() == [700005, 700000000186264515, 3228180213758164991]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "not all numbers above 0"),
        ([1, 0], r"the weights 1, 0 of the datasets are not all"),
        ([1, -2], "not all numbers above 0"),
        ([1, float("nan")], "not all numbers above 0"),
        ([1, float("inf")], "not all numbers above 0"),
        ([1, 1e-7], "below a millionth of all"),
        ([1e308, 1e308], "below a millionth of all"),
    ],
)
def test_bad_weights_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shares_of(weights)


def test_the_set_that_is_read_most_decides_how_often_a_mixture_is_read(tmp_path: Path) -> None:
    """Half of a run from a set of 1% of the tokens reads it many times, whatever the sum is (mutation: num_tokens)."""
    big = prepare_small(tmp_path / "big", [[1] * 1998], name="big")
    tiny = prepare_small(tmp_path / "tiny", [[1] * 18], name="tiny")
    for weights, name, tokens in (((1.0, 1.0), "tiny", 36), ((199.0, 1.0), "big", 1998 / 0.995)):
        blend = Blend.open([(big, weights[0]), (tiny, weights[1])])
        found, epoch = blend.read_most(blend.training(3, cache=tmp_path))
        assert (found.name, epoch) == (name, pytest.approx(tokens))
    alone = Blend.open([(big, 3.0)])
    assert alone.read_most(alone.training(3, cache=tmp_path))[1] == 1998


def test_an_epoch_of_packed_rows_is_the_rows(tmp_path: Path) -> None:
    """Two long documents make two rows of 11 tokens; the rest of them, 1990 of the stream's 2012, is never read."""
    long = prepare_small(tmp_path / "long", [[1] * 1000, [2] * 1010])
    blend = Blend.open([(long, 1.0)])
    training = blend.training(10, packing="bestfit", cache=tmp_path)
    assert blend.read_most(training)[1] == training.sources[0].num_sequences * 10 == 20
