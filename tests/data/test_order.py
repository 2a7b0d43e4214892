"""The order of data: a bijection at any size, that looks random also at tiny sizes, and is a pure function."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_data import sequence_ids

from paceline.data import order
from paceline.data.order import Int64s, ids_at

KEYS = st.integers(0, 2**63 - 1)
MAX_SIZE = 1 << 62


def permute(index: Int64s, size: int, key: int) -> Int64s:
    return order.permute(index, size, order.round_keys_of([key]))


def orders(size: int, keys: Sequence[int]) -> Int64s:
    """(len(keys), size): what each key makes of 0..size-1."""
    round_keys = order.round_keys_of(np.repeat(keys, size).tolist())
    return order.permute(np.tile(np.arange(size), len(keys)), size, round_keys).reshape(len(keys), size)


@given(st.integers(1, 5000), KEYS)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 65535, 65536, 65537, 10**6 + 3])
def test_permute_is_a_bijection_at_the_edges(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, 5)), np.arange(size))


@given(st.integers(1, MAX_SIZE), KEYS, st.data())
def test_large_sizes_stay_inside_and_apart_and_an_element_does_not_depend_on_the_others(
    size: int, key: int, data: st.DataObject
) -> None:
    asked = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50)))
    found = permute(np.array(asked), size, key)
    assert found.min() >= 0
    assert found.max() < size
    assert len(set(found.tolist())) == len(asked)
    assert [int(permute(np.array([i]), size, key)[0]) for i in asked[:5]] == found[:5].tolist()


def test_permute_keeps_its_values() -> None:
    """A run that is resumed under a later paceline must see the same data: these numbers never change."""
    assert permute(np.arange(10), 10, 1).tolist() == [6, 1, 4, 2, 3, 0, 9, 5, 8, 7]
    assert permute(np.array([0, 1, 10**17]), 10**18, 42).tolist() == [
        848256033837609230,
        709066326381292545,
        355344477635315262,
    ]
    assert sequence_ids(1337, 98, 6, 100).tolist() == [39, 9, 14, 1, 36, 58]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_permutations_are_equally_frequent(size: int) -> None:
    """Chi-square over all size! orders: over 3,000 keys every one appears about as often as the others."""
    num_keys = 3000
    seen = Counter(map(tuple, orders(size, range(0, num_keys * 7919, 7919)).tolist()))
    every = list(permutations(range(size)))
    expected = num_keys / len(every)
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in every)
    freedom = len(every) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # mean + 5 standard deviations


@pytest.mark.parametrize("size", [5, 12, 50])
def test_each_place_gets_each_element_equally_often(size: int) -> None:
    num_keys = 1500
    found = orders(size, range(num_keys))
    table = np.array([np.bincount(found[:, place], minlength=size) for place in range(size)])
    expected = num_keys / size
    chi_square = float(((table - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [1000, 4096, 99_991, 300_000])
def test_a_large_permutation_looks_random(size: int) -> None:
    index, found = np.arange(size), permute(np.arange(size), size, 99)
    assert abs(np.abs(found - index).mean() / size - 1 / 3) < 0.02  # mean displacement of a random permutation
    assert (np.abs(np.diff(found)) == 1).sum() < 15  # expected 2, Poisson: neighbours do not stay neighbours
    assert (found == index).sum() < 12  # expected 1 fixed point
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / size**0.5
    cells = np.histogram2d(index, found, bins=10)[0]  # where it comes from says nothing of where it goes
    assert ((cells - size / 100) ** 2 / (size / 100)).sum() < 81 + 5 * (2 * 81) ** 0.5


def test_neighbouring_keys_have_nothing_in_common() -> None:
    a, b = permute(np.arange(10_000), 10_000, 1), permute(np.arange(10_000), 10_000, 2)
    assert (a == b).sum() < 12
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


@given(st.integers(0, 100), st.integers(1, 60), st.integers(0, 500), st.lists(st.integers(0, 40), max_size=8))
def test_sequence_ids_do_not_depend_on_how_they_are_asked_for(
    seed: int, size: int, start: int, parts: list[int]
) -> None:
    whole = sequence_ids(seed, start, sum(parts), size)
    begins = np.cumsum([start, *parts])
    asked = [sequence_ids(seed, int(begin), part, size) for begin, part in zip(begins, parts, strict=False)]
    assert whole.tolist() == [i for part in asked for i in part.tolist()]


@given(st.integers(0, 100), st.integers(1, 60), st.lists(st.integers(0, 10**12), max_size=20))
def test_ids_at_any_positions_are_those_one_by_one(seed: int, size: int, positions: list[int]) -> None:
    """Of any epochs, in any order."""
    found = ids_at(seed, np.array(positions, dtype=np.int64), size)
    assert found.tolist() == [int(sequence_ids(seed, position, 1, size)[0]) for position in positions]


def test_ids_at_refuses_what_is_outside() -> None:
    for positions, size in (([-1], 5), ([0], 0)):
        with pytest.raises(ValueError):
            ids_at(0, np.array(positions), size)


def test_each_epoch_is_an_order_of_its_own() -> None:
    ids = sequence_ids(3, 0, 5 * 200, 200).reshape(5, 200)
    assert np.array_equal(np.sort(ids, axis=1), np.tile(np.arange(200), (5, 1)))
    assert all((ids[i] == ids[j]).sum() < 10 for i in range(5) for j in range(i))
    assert (sequence_ids(3, 0, 200, 200) == sequence_ids(4, 0, 200, 200)).sum() < 10
