"""Keys: a function of every part and its place, the same on every machine."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from paceline.base.seeds import key

parts = st.lists(st.integers() | st.text(alphabet="-01aä€\0\n"), max_size=4)


@given(parts, parts)
def test_other_parts_give_another_key(some: list[int | str], others: list[int | str]) -> None:
    alike = [(type(part), part) for part in some] == [(type(part), part) for part in others]
    assert (key(*some) == key(*others)) == alike


@given(parts)
def test_a_key_has_63_bits(some: list[int | str]) -> None:
    assert 0 <= key(*some) < 2**63


def test_a_number_is_not_its_digits() -> None:
    assert key(1, "order") != key("1", "order")


def test_keys_never_change_between_machines_and_versions() -> None:
    """These figures decide every run's data order and weights: a change here breaks every old checkpoint's resume."""
    text = "from paceline.base.seeds import key; print(key(1337, 'order', 0), key(1337, 'init', 'norm.weight'))"
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert [int(word) for word in said.split()] == [key(1337, "order", 0), key(1337, "init", "norm.weight")]
    assert key(1337, "order", 0) == 1143457060960687279
