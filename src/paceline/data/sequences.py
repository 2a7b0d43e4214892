"""Training and validation sequences: T+1 tokens of a data set each, and their places in the run.

There are two kinds. `Windows` (stream.py) cut the stream every T tokens: every token is seen, and documents may be cut.
`PackedRows` begin with a document and are filled with the beginnings of others (packing.py): every token sees its
document from the start, and cropped tokens are never seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock
import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.data import packing
from paceline.data.dataset import Dataset
from paceline.data.mixture import Mixture
from paceline.data.order import ids_at, source_seed
from paceline.data.stream import Int64s, Tokens, TokenStream

_PACKING_VERSION = 1  # of the folder's files and of the result of `pack`


class Part(Protocol):
    """The sequences of one data set, by id from 0."""

    @property
    def num_sequences(self) -> int: ...

    def read(self, ids: Sequence[int]) -> Tokens:
        """Returns (len(ids), T+1) tokens as stored; reads no others."""


class PackedRows:
    """Sequence i is row i of a packing: beginnings of documents, one after the other."""

    def __init__(self, stream: TokenStream, folder: Path, seq_len: int) -> None:
        """folder: from `ensure_packing`."""
        self._folder, self._stream, self._row_tokens = folder, stream, seq_len + 1
        self._packing, starts = packing.load(folder)
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
    name = f"{dataset.fingerprint[:16]}-{seq_len}-{_PACKING_VERSION}"
    if dataset.index is None and dataset.end_of_text is not None:  # given by the user, and not in the fingerprint
        name += f"-{dataset.end_of_text}"
    final = cache / "packings" / name
    dataset.train.num_sequences(seq_len)  # raises for a short split; any other gives a row
    try:
        if not final.is_dir():
            documents = dataset.documents("train")
            final.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(final.with_name(f".{final.name}.lock")):
                if not final.is_dir():
                    packing.save(packing.pack(documents.lengths, seq_len + 1), documents.starts, final)
    except (OSError, NotImplementedError) as error:  # filelock raises the latter if the file system has no locks
        raise UserError(
            f"the packing of {dataset.folder} can not be kept in {final.parent}: "
            f"{getattr(error, 'strerror', None) or error}; free some space, or set PACELINE_CACHE to another folder"
        ) from error
    return final


@dataclass(frozen=True)
class Places:
    """The data set's number and the sequence id in it, for each sequence; (n,) int64 both."""

    parts: Int64s
    ids: Int64s

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: slice | Int64s) -> "Places":
        return Places(self.parts[which], self.ids[which])


class Sequences:
    """The sequences of one data set, or of several by weight."""

    def __init__(self, parts: Sequence[Part], mixture: Mixture, seq_len: int, document_token: int | None) -> None:
        """document_token: begins each document, and attention stays inside documents; None: it does not."""
        self.parts, self.mixture = tuple(parts), mixture
        self.seq_len, self.document_token = seq_len, document_token

    def locate(self, seed: int, positions: Int64s) -> Places:
        """Returns the sequences at these positions (n,) of the run with this seed.

        A pure function with O(n) memory. A position counts the run's sequences from 0; the mixture maps it to a data
        set and its own position there, and the epoch's permutation maps that to the id.
        """
        parts, indices = self.mixture.locate(positions)
        ids = np.empty_like(indices)
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(parts == number)
            ids[mine] = ids_at(source_seed(seed, number), indices[mine], part.num_sequences)
        return Places(parts, ids)

    def fixed(self, max_sequences: int) -> Places:
        """Returns at most max_sequences sequences, always the same: divided by weight, evenly spaced in each data set.
        A data set with too few gives all."""
        if max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}; it is at least 1")
        parts, ids = [], []
        for number, (part, share) in enumerate(zip(self.parts, self.mixture.counts(max_sequences), strict=True)):
            count = min(part.num_sequences, share)
            ids.append(np.arange(count, dtype=np.int64) * part.num_sequences // max(1, count))
            parts.append(np.full(count, number, dtype=np.int64))
        return Places(np.concatenate(parts), np.concatenate(ids))

    def read(self, places: Places) -> npt.NDArray[Any]:
        """Returns (n, T+1) tokens as stored; reads no others."""
        rows_of_all: npt.NDArray[Any] | None = None
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(places.parts == number)
            if not mine.size:
                continue
            rows = part.read(places.ids[mine].tolist())
            if mine.size == len(places):
                return rows
            if rows_of_all is None:
                rows_of_all = np.empty((len(places), self.seq_len + 1), dtype=np.uint32)
            rows_of_all[mine] = rows
        if rows_of_all is None:
            raise ValueError("no sequence is asked for")
        return rows_of_all
