"""Packs documents into rows of T+1 tokens by best fit: each row begins with a document, and has no padding.

A row takes the longest remaining document that fits, then the longest that fits the rest, and so on. If none fits, the
shortest is cropped: it loses the fewest tokens. A document longer than a row fills one row and loses the rest. So every
segment is the beginning of a document, and each token sees its document from the start.

With all lengths of a group of documents known, one nearly always fits exactly, so little more is lost than the rest of
documents longer than a row.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import sync
from paceline.base.locks import file_lock
from paceline.data.dataset import Dataset
from paceline.data.stream import Int64s, Tokens, TokenStream

_VERSION = 1  # of the folder's files and of the result of `pack`
_GROUP = 1 << 19  # documents packed together, using 50 MB
_FILES = ("starts", "rows/row_first", "rows/document", "rows/length", "rows/totals")
_DTYPES = (np.int64, np.int64, np.int64, np.int32, np.int64)


@dataclass(frozen=True)
class Packing:
    """Row i is the segments row_first[i] .. row_first[i+1]-1: the first `length` tokens of `document` each."""

    row_first: Int64s  # (num_rows + 1,)
    document: Int64s  # (num_segments,)
    length: npt.NDArray[np.int32]  # (num_segments,)
    num_tokens: int  # of all documents
    cropped_tokens: int  # in no row

    @property
    def num_rows(self) -> int:
        return len(self.row_first) - 1


def pack(lengths: Int64s, row_tokens: int) -> Packing:
    """Returns rows of exactly row_tokens tokens for documents of these lengths (num_documents,).

    A document is in at most one row; an empty one in none. Tokens at the end that fill no row count as cropped. The
    same lengths give the same rows.
    """
    if row_tokens < 1:
        raise ValueError(f"a row of {row_tokens} tokens")
    pool = _Pool(row_tokens)
    packed = [_Rows.of_one(np.empty(0, dtype=np.int64), row_tokens)]
    for start in range(0, len(lengths), _GROUP):
        group = lengths[start : start + _GROUP]
        short = np.flatnonzero((group < row_tokens) & (group > 0))
        pool.add(short + start, group[short])
        packed.append(_Rows.of_one(np.flatnonzero(group >= row_tokens) + start, row_tokens))
        packed.append(pool.rows())
    row_first = np.cumsum(np.concatenate([[0], *(rows.num_segments for rows in packed)]), dtype=np.int64)
    num_tokens = int(lengths.sum())
    return Packing(
        row_first,
        np.concatenate([rows.document for rows in packed]),
        np.concatenate([rows.length for rows in packed]),
        num_tokens,
        num_tokens - (len(row_first) - 1) * row_tokens,
    )


@dataclass(frozen=True)
class _Rows:
    """Some rows and their segments, in order."""

    num_segments: Int64s  # (num_rows,)
    document: Int64s  # of all their segments
    length: npt.NDArray[np.int32]

    @classmethod
    def of_one(cls, documents: Int64s, row_tokens: int) -> "_Rows":
        """Rows of one document each."""
        return cls(np.ones_like(documents), documents, np.full(documents.size, row_tokens, dtype=np.int32))


class _Pool:
    """Documents shorter than a row, by length. The bits of one large integer are the existing lengths: the longest that
    fits is the highest bit below a place, found fast for any number of documents."""

    def __init__(self, row_tokens: int) -> None:
        self._row_tokens = row_tokens
        self._by_length: list[list[int]] = [[] for _ in range(row_tokens)]
        self._there = 0
        self._num_tokens = 0

    def add(self, documents: Int64s, lengths: Int64s) -> None:
        """Adds documents; those of equal length leave in the order they came."""
        if not documents.size:
            return
        order = np.argsort(lengths, kind="stable")
        present, begins = np.unique(lengths[order], return_index=True)
        for length, those in zip(present.tolist(), np.split(documents[order], begins[1:]), strict=True):
            self._by_length[length] = those[::-1].tolist() + self._by_length[length]
            self._there |= 1 << length
        self._num_tokens += int(lengths.sum())

    def rows(self) -> _Rows:
        """Returns rows of the documents, until too few tokens for a row are left."""
        num_segments: list[int] = []
        documents: list[int] = []
        taken: list[int] = []
        while self._num_tokens >= self._row_tokens:
            before, left = len(documents), self._row_tokens
            while left:
                length = self._best(left)
                documents.append(self._take(length))
                taken.append(min(length, left))
                left -= taken[-1]
            num_segments.append(len(documents) - before)
        return _Rows(
            np.array(num_segments, dtype=np.int64), np.array(documents, dtype=np.int64), np.array(taken, dtype=np.int32)
        )

    def _best(self, left: int) -> int:
        """Returns the greatest length of at most `left`; if there is none, the smallest."""
        fits = self._there & ((2 << left) - 1)
        if fits:
            return fits.bit_length() - 1
        return (self._there & -self._there).bit_length() - 1

    def _take(self, length: int) -> int:
        those = self._by_length[length]
        document = those.pop()
        if not those:
            self._there ^= 1 << length
        self._num_tokens -= length
        return document


def save(packing: Packing, starts: Int64s, folder: Path) -> None:
    """Writes a packing, and where each document starts, as a new folder of .npy files, atomically. Raises OSError if
    the disk fails."""
    aside = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(aside, ignore_errors=True)  # of a killed process
    try:
        (aside / "rows").mkdir(parents=True)
        totals = np.array([packing.num_tokens, packing.cropped_tokens], dtype=np.int64)
        arrays: list[npt.NDArray[Any]] = [starts, packing.row_first, packing.document, packing.length, totals]
        for name, array in zip(_FILES, arrays, strict=True):
            np.save(aside / f"{name}.npy", array, allow_pickle=False)
            sync(aside / f"{name}.npy")
        sync(aside / "rows")
        sync(aside)
        os.rename(aside, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load(folder: Path) -> tuple[Packing, Int64s]:
    """Returns what `save` wrote, mapped into memory. Raises UserError if files are missing or do not fit together."""
    try:
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _FILES]
    except Exception as error:  # a damaged header can raise anything
        raise UserError(f"the packing {folder} can not be read: {error}; delete it, and it is made anew") from error
    starts, row_first, document, length, totals = arrays
    kinds = [(array.dtype, array.ndim) for array in arrays]
    fit = kinds == [(dtype, 1) for dtype in _DTYPES] and row_first.size > 0 and totals.size == 2
    if not (fit and row_first[0] == 0 and row_first[-1] == document.size == length.size):
        raise UserError(
            f"the packing {folder} is damaged: its files do not fit together; delete it, and it is made anew"
        )
    return Packing(row_first, document, length, *map(int, totals)), starts


class PackedRows:
    """Sequence i is row i of a packing: beginnings of documents, one after the other."""

    def __init__(self, stream: TokenStream, folder: Path, seq_len: int) -> None:
        """folder: from `ensure_packing`."""
        self._folder, self._stream, self._row_tokens = folder, stream, seq_len + 1
        self._packing, starts = load(folder)
        # Plain arrays: slicing a memmap is slow.
        self._starts, self._first = np.asarray(starts), np.asarray(self._packing.row_first)
        self._document, self._length = np.asarray(self._packing.document), np.asarray(self._packing.length)
        self.num_sequences = self._packing.num_rows

    @property
    def cropped_frac(self) -> float:
        """The share of tokens in no row."""
        share: float = self._packing.cropped_tokens / max(1, self._packing.num_tokens)
        return share

    def read(self, ids: Sequence[int]) -> Tokens:
        """Returns (len(ids), T+1) tokens as stored. Raises UserError if the packing is of another stream."""
        starts: list[int] = []
        counts: list[int] = []
        try:
            for i in ids:
                segments = slice(int(self._first[i]), int(self._first[i + 1]))
                starts += self._starts[self._document[segments]].tolist()
                counts += self._length[segments].tolist()
            return self._stream.gather(starts, counts).reshape(len(ids), self._row_tokens)
        except (IndexError, ValueError) as error:
            raise UserError(
                f"the packing {self._folder} is damaged: {error}; delete it, and it is made anew"
            ) from error


def ensure_packing(dataset: Dataset, seq_len: int, cache: Path) -> Path:
    """Returns the folder of the training split's packing into rows of T+1 tokens, made first if missing.

    Any number of processes may call it at once: one packs, the others wait. The folder appears by one rename; its name
    has the data's fingerprint and T. Raises UserError if the split is shorter than a row, the data's documents have no
    known beginnings, or the cache cannot be written.
    """
    name = f"{dataset.fingerprint[:16]}-{seq_len}-{_VERSION}"
    if dataset.index is None and dataset.end_of_text is not None:  # given by the user, and not in the fingerprint
        name += f"-{dataset.end_of_text}"
    if (starts := dataset.listed_starts("train")) is not None:  # nor are these
        name += f"-{hashlib.sha256(starts.tobytes()).hexdigest()[:16]}"
    final = cache / "packings" / name
    dataset.train.num_sequences(seq_len)  # raises for a short split; any other gives a row
    try:
        if not final.is_dir():
            documents = dataset.documents("train")
            final.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(final.with_name(f".{final.name}.lock")):
                if not final.is_dir():
                    save(pack(documents.lengths, seq_len + 1), documents.starts, final)
    except OSError as error:
        raise UserError(
            f"the packing of {dataset.folder} can not be kept in {final.parent}: "
            f"{error.strerror or error}; free some space, or set PACELINE_CACHE to another folder"
        ) from error
    return final
