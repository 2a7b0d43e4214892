"""What a training or validation sequence is: T+1 tokens of a data set, and which one stands at a place of the run.

Two kinds. `Windows` (stream.py) are cut from the stream as it stands, T tokens apart: every token is seen, wherever
documents begin and end. `PackedRows` begin with a document and are filled with the beginnings of others (packing.py):
every token sees its document from the start, and what did not fit is never seen.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import sync
from paceline.data import packing
from paceline.data.dataset import Dataset, Documents
from paceline.data.mixture import Mixture
from paceline.data.order import ids_at, source_seed
from paceline.data.stream import Int64s, Tokens, TokenStream

_PACKING_VERSION = 1  # of the folder below and of what `pack` gives for the same lengths


class Part(Protocol):
    """One data set's sequences, by id from 0."""

    @property
    def num_sequences(self) -> int: ...

    def read(self, ids: Sequence[int]) -> Tokens:
        """Returns (len(ids), T+1) tokens as stored; reads no others."""


class PackedRows:
    """Sequence i is row i of a packing: beginnings of documents, one after the other."""

    def __init__(self, stream: TokenStream, folder: Path, seq_len: int) -> None:
        """`folder` is `ensure_packing`'s. Raises UserError where there is too little text for one row."""
        self._folder, self._stream, self._row_tokens = folder, stream, seq_len + 1
        self._packing = packing.load(folder / "rows")
        try:
            starts = np.load(folder / "starts.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"the packing {folder} can not be read: {error}; delete it, and it is made anew") from error
        # As plain arrays: slicing a memmap object makes another, at 2 us each.
        self._starts, self._first = np.asarray(starts), np.asarray(self._packing.row_first)
        self._document, self._length = np.asarray(self._packing.document), np.asarray(self._packing.length)
        self.num_sequences = self._packing.num_rows
        if self.num_sequences < 1:
            raise UserError(
                f"the {stream.split} split has {stream.num_tokens} tokens, too few for one row of data.seq-len "
                f"{seq_len}: give more text or a smaller --data.seq-len"
            )

    @property
    def cropped_frac(self) -> float:
        """The share of tokens that no row has."""
        share: float = self._packing.cropped_tokens / max(1, self._packing.num_tokens)
        return share

    def read(self, ids: Sequence[int]) -> Tokens:
        """Returns (len(ids), T+1) tokens as stored. Raises UserError where the packing is not one of this stream."""
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
    """Returns the folder of the training split's packing into rows of T+1 tokens, made first where it is missing.

    Any number of processes may call it at once: one packs, the others wait for it. The folder appears by one rename and
    is named by the data's fingerprint and T. Raises UserError where the data does not say where documents begin, and
    where the cache can not be written.
    """
    final = cache / "packings" / f"{dataset.fingerprint[:16]}-{seq_len}-{_PACKING_VERSION}"
    if final.is_dir():
        return final
    documents = dataset.documents("train")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(final.with_name(f".{final.name}.lock")):
            if not final.is_dir():
                _pack_aside(documents, seq_len + 1, final)
    except (OSError, NotImplementedError) as error:  # the latter from filelock, where the file system has no locks
        raise UserError(
            f"the packing of {dataset.folder} can not be kept in {final.parent}: "
            f"{getattr(error, 'strerror', None) or error}; free some space, or set PACELINE_CACHE to another folder"
        ) from error
    return final


def _pack_aside(documents: Documents, row_tokens: int, final: Path) -> None:
    aside = final.with_name(f".{final.name}.new")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
    aside.mkdir()
    try:
        np.save(aside / "starts.npy", documents.starts, allow_pickle=False)
        sync(aside / "starts.npy")
        packing.save(packing.pack(documents.lengths, row_tokens), aside / "rows")
        os.rename(aside, final)
        sync(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class Places:
    """Which sequences: the number of the data set and the id in it, for each; (n,) int64 both."""

    parts: Int64s
    ids: Int64s

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: slice | Int64s) -> "Places":
        return Places(self.parts[which], self.ids[which])


class Sequences:
    """The sequences of one data set, or of several by weight."""

    def __init__(self, parts: Sequence[Part], mixture: Mixture, seq_len: int, document_token: int | None) -> None:
        """With `document_token`, attention is to stay inside documents, which begin with it."""
        self.parts, self.mixture = tuple(parts), mixture
        self.seq_len, self.document_token = seq_len, document_token

    def locate(self, seed: int, positions: Int64s) -> Places:
        """Returns which sequences stand at these positions (n,) of the run with this seed.

        A pure function, with O(n) memory: a position counts the sequences of the whole run from 0, the mixture says of
        which data set it is and how many of that one came before, and that number's place in the data set's own
        permutation of the epoch is the id.
        """
        parts, indices = self.mixture.locate(positions)
        ids = np.empty_like(indices)
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(parts == number)
            ids[mine] = ids_at(source_seed(seed, number), indices[mine], part.num_sequences)
        return Places(parts, ids)

    def fixed(self, max_sequences: int) -> Places:
        """Returns at most max_sequences sequences, always the same: shared out by weight, evenly spaced in each data
        set. One that has fewer than its share gives all."""
        if max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}; it is at least 1")
        parts, ids = [], []
        for number, (part, share) in enumerate(zip(self.parts, self.mixture.counts(max_sequences), strict=True)):
            count = min(part.num_sequences, int(share))
            ids.append(np.arange(count, dtype=np.int64) * part.num_sequences // max(1, count))
            parts.append(np.full(count, number, dtype=np.int64))
        return Places(np.concatenate(parts), np.concatenate(ids))

    def read(self, places: Places) -> npt.NDArray[Any]:
        """Returns (n, T+1) tokens as stored; reads no others."""
        whole: npt.NDArray[Any] | None = None
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(places.parts == number)
            if not mine.size:
                continue
            rows = part.read(places.ids[mine].tolist())
            if mine.size == len(places):
                return rows
            if whole is None:
                whole = np.empty((len(places), self.seq_len + 1), dtype=np.uint32)
            whole[mine] = rows
        if whole is None:
            raise ValueError("no sequence is asked for")
        return whole
