"""The data of a run: one dataset, or several mixed by weight; which sequence has which position of the run.

The dataset at a position: the first dataset, of share a, has c(n) = floor(a n + 1/2) of the first n positions, so it
has position p if c(p + 1) > c(p): the most even spacing (a Sturmian, or Beatty, sequence). The remaining positions,
counted from 0, are divided among the other datasets in the same way. So in every prefix of the run dataset i has its
weight to within (i + 1) / 2 positions, without state or random numbers. Another order of the datasets changes
neighbouring positions only. With simple weights the pattern is periodic: 1 to 1 alternates.

The sequence there: the dataset's own permutation of the epoch says it, see order.py.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset
from paceline.data.foreign import tells_vocabulary
from paceline.data.order import ids_at, source_seed
from paceline.data.packing import PackedRows, ensure_packing
from paceline.data.shard import is_complete, read_index
from paceline.data.stream import Int64s, Windows

# Shares are integers in units of 2**-30, so that all products below fit in 63 bits. This changes a count by n * 2**-31.
_BITS = 30
_ONE = 1 << _BITS
_MIN_SHARE = 1e-6  # rounding to 2**-30 keeps it right to 0.05%


class Blend:
    """Datasets of one vocabulary, with their weights. Each process opens its own Blend."""

    is_checked = True
    """Whether this process has looked at the shards' content."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        """Raises UserError for bad weights, or, naming both, if two datasets have different tokenizers."""
        self.datasets, self.weights = tuple(datasets), tuple(weights)
        self.shares = shares_of(self.weights)
        # Its vocabulary and tokenizer are those of all.
        self.first = next((d for d in self.datasets if d.tokenizer_json is not None), self.datasets[0])
        for other in self.datasets:
            if other is not self.first:
                _require_same_tokens(self.first, other)

    @classmethod
    def open(
        cls,
        parts: Sequence[tuple[Path | str, float]],
        vocab_size: int = 0,
        document_token: int | None = None,
        *,
        checks: bool = True,
    ) -> "Blend":
        """parts: (folder, weight) each; see `Dataset.open` for the others and errors. vocab_size may be above that of a
        prepared part, as a model's is after rounding; foreign parts that do not tell theirs have the prepared one's."""
        roots = [Path(os.path.expanduser(folder)) for folder, _ in parts]
        prepared = next((read_index(root).vocab_size for root in roots if is_complete(root)), vocab_size)
        sizes = [vocab_size if tells_vocabulary(root) else min(vocab_size, prepared) for root in roots]
        datasets = [
            Dataset.open(root, size, document_token, checks=checks) for root, size in zip(roots, sizes, strict=True)
        ]
        blend = cls(datasets, [weight for _, weight in parts])
        blend.is_checked = checks
        return blend

    @property
    def name(self) -> str:
        """The dataset's name, or such as `web 70% + code 30%`."""
        if len(self.datasets) == 1:
            return self.first.name
        total = sum(self.weights)
        return " + ".join(f"{d.name} {100 * w / total:.3g}%" for d, w in zip(self.datasets, self.weights, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex over fingerprints and weights, in order; of a single dataset its fingerprint."""
        if len(self.datasets) == 1:
            return self.first.fingerprint
        return self._digest([dataset.fingerprint for dataset in self.datasets])

    @property
    def listing(self) -> str:
        """sha256 hex over the datasets' listings and weights: for ranks to compare that have read no shard."""
        return self._digest([dataset.listing for dataset in self.datasets])

    def _digest(self, digests: Sequence[str]) -> str:
        lines = [f"{digest} {weight!r}" for digest, weight in zip(digests, self.weights, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """sha256 hex over a sample of the shards' content, for ranks to compare. Checkpoints store the fingerprint,
        which for prepared data comes from the index alone."""
        return hashlib.sha256("\n".join(dataset.content_digest for dataset in self.datasets).encode()).hexdigest()

    @property
    def num_tokens(self) -> tuple[int, int]:
        return sum(d.train.num_tokens for d in self.datasets), sum(d.validation.num_tokens for d in self.datasets)

    def read_most(self, training: "Sequences") -> tuple[Dataset, float]:
        """Returns the dataset that a run reads most often, and the tokens of the mixture in which it is read once: of
        the rows of a packing these are fewer than the stream has, since documents are cropped."""
        tokens = [part.num_sequences * training.seq_len for part in training.sources]
        total, sets = sum(self.weights), zip(self.datasets, tokens, self.weights, strict=True)
        return min(((dataset, n * total / weight) for dataset, n, weight in sets), key=lambda each: each[1])

    def training(
        self,
        seq_len: int,
        *,
        packing: Literal["stream", "bestfit"] = "stream",
        mask_documents: bool = False,
        cache: Path,
    ) -> "Sequences":
        """Returns the training sequences. cache: folder for packings. Raises UserError if a split is shorter than a
        sequence, or if documents are needed and their beginnings unknown."""
        sources: list[Windows | PackedRows] = []
        for dataset in self.datasets:
            if packing == "stream":
                sources.append(dataset.train.windows(seq_len))
            else:
                sources.append(PackedRows(dataset.train, ensure_packing(dataset, seq_len, cache), seq_len))
        return Sequences(sources, self.shares, seq_len, self._mask_token(mask_documents))

    def validation(self, seq_len: int, *, mask_documents: bool = False) -> "Sequences":
        """Returns the evaluation sequences: always windows, so that losses compare."""
        sources = [dataset.validation.windows(seq_len) for dataset in self.datasets]
        return Sequences(sources, self.shares, seq_len, self._mask_token(mask_documents))

    def _mask_token(self, mask_documents: bool) -> int | None:
        if not mask_documents:
            return None
        if self.first.end_of_text is None:
            raise UserError(
                f"data.mask-documents needs to know the token that begins a document, and {self.name} does not say it: "
                f"give --data.document-token-id (GPT-2's: 50256), or prepare the data by `paceline data prepare`"
            )
        return self.first.end_of_text


def _require_same_tokens(one: Dataset, other: Dataset) -> None:
    """A dataset without a tokenizer is taken for one of the same if the user says which token begins its documents."""
    sha256s = [_short_sha256(dataset.tokenizer_json) for dataset in (one, other)]
    if sha256s[0] != sha256s[1] and (other.tokenizer_json is not None or other.end_of_text is None):
        remedy = "datasets of different tokenizers cannot be mixed; prepare one anew with the other's tokenizer.json"
        if other.tokenizer_json is None:
            remedy = (
                "if it is the same, say so with the token that begins its documents, --data.document-token-id "
                f"{one.end_of_text}"
            )
        raise UserError(f"{one.folder} was made with {sha256s[0]}, {other.folder} with {sha256s[1]}: {remedy}")
    if one.vocab_size != other.vocab_size:
        raise UserError(
            f"{one.folder} has a vocabulary of {one.vocab_size}, {other.folder} of {other.vocab_size}: "
            f"datasets of different vocabularies cannot be mixed"
        )


def _short_sha256(tokenizer_json: str | None) -> str:
    if tokenizer_json is None:
        return "an unknown tokenizer"
    return f"the tokenizer of sha256 {hashlib.sha256(tokenizer_json.encode()).hexdigest()[:16]}"


class Sequences:
    """The sequences of T+1 tokens of one dataset, or of several by weight. Those of a dataset have ids from 0:
    consecutive windows of its stream, or rows packed of the beginnings of its documents.

    A place is a pair of numbers, that of the dataset and the id in it; (n, 2) int64 for n sequences.
    """

    def __init__(
        self,
        sources: Sequence[Windows | PackedRows],
        shares: Sequence[int],
        seq_len: int,
        document_token: int | None,
    ) -> None:
        """shares: from `shares_of`. document_token: begins each document, and attention stays inside documents; None:
        it does not."""
        self.sources, self._shares = tuple(sources), shares
        self.seq_len, self.document_token = seq_len, document_token

    def locate(self, seed: int, positions: Int64s) -> Int64s:
        """Returns the places at these positions (n,) of the run with this seed, counted in sequences from 0. A pure
        function with O(n) memory."""
        numbers, indices = locate(self._shares, positions)
        places = np.stack([numbers, indices], axis=1)
        for number, source in enumerate(self.sources):
            rows = np.flatnonzero(numbers == number)
            places[rows, 1] = ids_at(source_seed(seed, number), indices[rows], source.num_sequences)
        return places

    def fixed(self, max_sequences: int) -> Int64s:
        """Returns the places of at most max_sequences sequences, always the same: divided by weight, evenly spaced in
        each dataset. A dataset with too few gives all."""
        if max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}; it is at least 1")
        places = []
        shares = counts(self._shares, max_sequences)
        for number, (source, share) in enumerate(zip(self.sources, shares, strict=True)):
            count = min(source.num_sequences, share)
            ids = np.arange(count, dtype=np.int64) * source.num_sequences // max(1, count)
            places.append(np.stack([np.full_like(ids, number), ids], axis=1))
        return np.concatenate(places)

    def read(self, places: Int64s) -> npt.NDArray[Any]:
        """Returns (n, T+1) tokens as stored; reads no others."""
        if not len(places):
            raise ValueError("no sequence is asked for")
        rows = [np.flatnonzero(places[:, 0] == number) for number in range(len(self.sources))]
        for source, which in zip(self.sources, rows, strict=True):
            if which.size == len(places):  # as in a run of one dataset: nothing is copied
                return source.read(places[:, 1].tolist())
        block = np.empty((len(places), self.seq_len + 1), dtype=np.uint32)
        for source, which in zip(self.sources, rows, strict=True):
            if which.size:
                block[which] = source.read(places[which, 1].tolist())
        return block


def shares_of(weights: Sequence[float]) -> list[int]:
    """Returns the share of each dataset but the last in the positions that earlier ones leave. Raises UserError if a
    weight is not a positive number, or less than a millionth of the sum."""
    described = f"the weights {', '.join(f'{weight:g}' for weight in weights)} of the datasets"
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"{described} are not all numbers above 0")
    if min(weights) < _MIN_SHARE * sum(weights):  # also where the sum is infinite
        raise UserError(f"{described} have one below a millionth of all: leave that dataset out, or give it more")
    return [round(w / math.fsum(weights[i:]) * _ONE) for i, w in enumerate(weights[:-1])]


def locate(shares: Sequence[int], positions: npt.ArrayLike) -> tuple[Int64s, Int64s]:
    """Returns, for each position 0..2**62-1 (n,), the number of its dataset, and how many of that dataset's sequences
    come before; int64 (n,) both."""
    rest = np.asarray(positions, dtype=np.int64).copy()
    numbers = np.full(rest.shape, len(shares), dtype=np.int64)
    open_ = np.arange(rest.size)
    for number, share in enumerate(shares):
        before = _count(share, rest[open_])
        is_of_it = _count(share, rest[open_] + 1) > before
        numbers[open_[is_of_it]] = number
        rest[open_] = np.where(is_of_it, before, rest[open_] - before)
        open_ = open_[~is_of_it]
    return numbers, rest


def counts(shares: Sequence[int], num_positions: int) -> list[int]:
    """Returns how many of the first positions each dataset has."""
    counted, rest = [], num_positions
    for share in shares:
        counted.append(int(_count(share, np.array([rest], dtype=np.int64))[0]))
        rest -= counted[-1]
    return [*counted, rest]


def _count(share: int, num_positions: Int64s) -> Int64s:
    """floor(share / 2**30 * n + 1/2), exact: n = high * 2**30 + low, and high * share is an integer."""
    high, low = num_positions >> _BITS, num_positions & (_ONE - 1)
    counted: Int64s = high * share + ((low * share + (_ONE >> 1)) >> _BITS)
    return counted
