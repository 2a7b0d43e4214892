"""Rows by best fit: every position used, every segment a document's beginning, and little cropped that need not be."""

import errno
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.data import packing
from paceline.data.packing import Packing, load, pack, save

Int64s = npt.NDArray[np.int64]

LENGTHS = st.lists(st.integers(0, 40), max_size=300).map(lambda lengths: np.array(lengths, dtype=np.int64))


def web_lengths(num_documents: int, seed: int = 0) -> Int64s:
    """Log-normal, 1,000 tokens on the mean, 550 on the median: about FineWeb's."""
    drawn = np.random.default_rng(seed).lognormal(np.log(1000) - 1.1**2 / 2, 1.1, num_documents)
    return np.maximum(1, drawn).astype(np.int64)


def rows_of(packed: Packing) -> list[list[tuple[int, int]]]:
    """(document, length) of each segment of each row."""
    segments = list(zip(packed.document.tolist(), packed.length.tolist(), strict=True))
    bounds = packed.row_first.tolist()
    return [segments[a:b] for a, b in pairwise(bounds)]


def check_laws(lengths: Int64s, row_tokens: int, packed: Packing) -> None:
    rows = rows_of(packed)
    assert (packed.row_first.dtype, packed.document.dtype, packed.length.dtype) == (np.int64, np.int64, np.int32)
    assert packed.row_first[0] == 0
    assert packed.row_first[-1] == packed.document.size == packed.length.size
    assert packed.num_rows == len(rows)
    for row in rows:
        assert sum(length for _, length in row) == row_tokens
        for document, length in row[:-1]:
            assert length == lengths[document]  # only the last is cropped
        assert 0 < row[-1][1] <= lengths[row[-1][0]]
    used = packed.document.tolist()
    assert len(used) == len(set(used))
    assert packed.num_tokens == lengths.sum()
    assert packed.cropped_tokens == lengths.sum() - len(rows) * row_tokens
    assert np.delete(lengths, used).sum() < row_tokens  # what is left fills no row


@given(LENGTHS, st.integers(1, 50), st.integers(1, 100))
def test_the_laws_of_a_packing(lengths: Int64s, row_tokens: int, group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_GROUP", group)
        packed = pack(lengths, row_tokens)
        check_laws(lengths, row_tokens, packed)
        again = pack(lengths.copy(), row_tokens)
    assert rows_of(again) == rows_of(packed)


def best_fit(lengths: Sequence[int], row_tokens: int) -> list[list[tuple[int, int]]]:
    """The rule of the module's docstring, with every document looked at for every choice."""
    left = [(number, length) for number, length in enumerate(lengths) if 0 < length < row_tokens]
    rows = [[(number, row_tokens)] for number, length in enumerate(lengths) if length >= row_tokens]
    while sum(length for _, length in left) >= row_tokens:
        row: list[tuple[int, int]] = []
        while room := row_tokens - sum(length for _, length in row):
            fitting = [one for one in left if one[1] <= room]
            best = max(fitting, key=lambda one: (one[1], -one[0])) if fitting else min(left, key=lambda one: one[::-1])
            left.remove(best)
            row.append((best[0], min(best[1], room)))
        rows.append(row)
    return rows


@given(LENGTHS, st.integers(1, 50))
def test_it_is_best_fit(lengths: Int64s, row_tokens: int) -> None:
    assert rows_of(pack(lengths, row_tokens)) == best_fit(lengths.tolist(), row_tokens)


@pytest.mark.parametrize(
    ("lengths", "row_tokens", "rows", "cropped"),
    [
        ([], 5, [], 0),
        ([0, 0], 5, [], 0),
        ([4], 5, [], 4),  # fills no row
        ([5], 5, [[(0, 5)]], 0),
        ([12], 5, [[(0, 5)]], 7),
        ([3, 0, 4, 1, 2], 5, [[(2, 4), (3, 1)], [(0, 3), (4, 2)]], 0),
        ([4, 4], 5, [[(0, 4), (1, 1)]], 3),
        ([4, 3, 2], 5, [[(0, 4), (2, 1)]], 4),  # the shortest loses least
        ([1, 1, 1], 1, [[(0, 1)], [(1, 1)], [(2, 1)]], 0),
    ],
)
def test_tiny_cases(lengths: list[int], row_tokens: int, rows: list[list[tuple[int, int]]], cropped: int) -> None:
    packed = pack(np.array(lengths, dtype=np.int64), row_tokens)
    assert rows_of(packed) == rows
    assert packed.cropped_tokens == cropped


def buffer_used(lengths: Int64s, row_tokens: int, capacity: int = 1000, at_once: int = 128) -> int:
    """Tokens in rows by best fit over a buffer, which gets the next documents when it has too few, until none come."""
    nothing = np.iinfo(np.int64).max
    buffer = np.full(capacity + at_once, nothing)
    used, room, given, held = 0, row_tokens, 0, 0
    while True:
        while held < capacity:
            coming = lengths[given : given + at_once]
            if not coming.size:
                return used
            buffer[np.flatnonzero(buffer == nothing)[: coming.size]] = coming
            given, held = given + coming.size, held + coming.size
        fitting = np.where(buffer <= room, buffer, 0)
        place = int(fitting.argmax()) if fitting.any() else int(buffer.argmin())
        part = min(room, int(buffer[place]))
        used, room, held = used + part, room - part or row_tokens, held - 1
        buffer[place] = nothing


def test_cropping_is_within_a_thousandth_of_what_can_not_be_avoided() -> None:
    """Whatever is done, a document longer than a row loses the rest. A buffer of 1,000 documents crops more, here when
    it is given them again, and is full of the longest already."""
    lengths, row_tokens = web_lengths(20_000), 2049
    packed = pack(lengths, row_tokens)
    unavoidable = np.maximum(0, lengths - row_tokens).sum() / lengths.sum()
    cropped = packed.cropped_tokens / packed.num_tokens
    assert unavoidable <= cropped < unavoidable + 0.001
    buffer_uses = buffer_used(np.tile(lengths, 2), row_tokens) - buffer_used(lengths, row_tokens)
    assert cropped < 1 - buffer_uses / lengths.sum() - 0.02


def test_a_group_hands_on_what_fills_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_GROUP", 1)
    packed = pack(np.array([2, 2, 1, 3] * 10), 5)
    assert rows_of(packed)[:2] == [[(0, 2), (1, 2), (2, 1)], [(3, 3), (4, 2)]]
    assert packed.cropped_tokens == 0


def test_a_row_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 0 tokens"):
        pack(np.array([3]), 0)


@pytest.mark.parametrize("num_documents", [0, 3, 3000])
def test_what_is_saved_is_loaded_from_the_disk(tmp_path: Path, num_documents: int) -> None:
    packed = pack(web_lengths(num_documents), 2049)
    starts = np.arange(num_documents)
    save(packed, starts, tmp_path / "there" / "packing")
    loaded, loaded_starts = load(tmp_path / "there" / "packing")
    assert np.array_equal(loaded_starts, starts)
    for name in ("row_first", "document", "length"):
        assert np.array_equal(getattr(loaded, name), getattr(packed, name))
        assert getattr(loaded, name).dtype == getattr(packed, name).dtype
    assert (loaded.num_tokens, loaded.cropped_tokens) == (packed.num_tokens, packed.cropped_tokens)
    assert os.listdir(tmp_path / "there") == ["packing"]
    if num_documents == 3000:
        assert isinstance(loaded.document, np.memmap)


def test_a_disk_that_fails_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, starts, folder = pack(web_lengths(100), 2049), np.arange(100), tmp_path / "packing"
    write = np.save

    def full(path: Path, array: Int64s, allow_pickle: bool) -> None:
        if path.name == "length.npy":
            raise OSError(errno.ENOSPC, "no space left")
        write(path, array, allow_pickle=allow_pickle)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(OSError, match="no space left"):
            save(packed, starts, folder)
    assert not folder.exists()
    save(packed, starts, folder)
    assert load(folder)[0].num_rows == packed.num_rows


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _shorter(path: Path) -> None:
    np.save(path, np.load(path)[:-1])


def _unclosed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"}", b" ", 1))  # of the header


def _other_type(path: Path) -> None:
    np.save(path, np.load(path).astype(np.float64))


def _scalar(path: Path) -> None:
    np.save(path, np.int64(3))


def _pickled(path: Path) -> None:
    np.save(path, np.array([print], dtype=object), allow_pickle=True)


@pytest.mark.parametrize("name", ["rows/row_first", "rows/document", "rows/length", "rows/totals"])
@pytest.mark.parametrize("damage", [_cut, _empty, _shorter, _unclosed, _other_type, _scalar, _pickled, os.remove])
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "packing"
    save(pack(web_lengths(100), 2049), np.arange(100), folder)
    damage(folder / f"{name}.npy")
    with pytest.raises(UserError, match=f"the packing {folder} (can not be read|is damaged).*delete it"):
        load(folder)
