"""The data of a run: one data set, or several mixed by weight."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset
from paceline.data.mixture import Mixture
from paceline.data.sequences import PackedRows, Part, Sequences, ensure_packing
from paceline.data.stream import Windows


class Blend:
    """Data sets of one vocabulary, with their weights. Each process opens its own Blend."""

    is_checked = True
    """Whether this process has looked at the shards' content."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        """Raises UserError for bad weights, or, naming both, if two data sets have different tokenizers."""
        self.datasets, self.weights = tuple(datasets), tuple(weights)
        self.mixture = Mixture(self.weights)
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
        """parts: (folder, weight) each; see `Dataset.open` for the others and errors."""
        datasets = [Dataset.open(folder, vocab_size, document_token, checks=checks) for folder, _ in parts]
        blend = cls(datasets, [weight for _, weight in parts])
        blend.is_checked = checks
        return blend

    @property
    def name(self) -> str:
        """The data set's name, or such as `web 70% + code 30%`."""
        if len(self.datasets) == 1:
            return self.first.name
        total = sum(self.weights)
        return " + ".join(f"{d.name} {100 * w / total:.3g}%" for d, w in zip(self.datasets, self.weights, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex over fingerprints and weights, in order; of a single data set its fingerprint."""
        if len(self.datasets) == 1:
            return self.first.fingerprint
        lines = [f"{d.fingerprint} {w!r}" for d, w in zip(self.datasets, self.weights, strict=True)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def content_digest(self) -> str:
        """sha256 hex over a sample of the shards' content (see `content.digest`), for ranks to compare. Checkpoints
        store the fingerprint, which for prepared data comes from the index alone."""
        return hashlib.sha256("\n".join(dataset.content_digest for dataset in self.datasets).encode()).hexdigest()

    @property
    def num_tokens(self) -> tuple[int, int]:
        return sum(d.train.num_tokens for d in self.datasets), sum(d.validation.num_tokens for d in self.datasets)

    @property
    def read_most(self) -> tuple[Dataset, float]:
        """The data set that a run reads most often, and the tokens of the mixture in which it is read once."""
        total, sets = sum(self.weights), zip(self.datasets, self.weights, strict=True)
        return min(((d, d.train.num_tokens * total / w) for d, w in sets), key=lambda each: each[1])

    def training(
        self,
        seq_len: int,
        *,
        packing: Literal["stream", "bestfit"] = "stream",
        mask_documents: bool = False,
        cache: Path,
    ) -> Sequences:
        """Returns the training sequences. cache: folder for packings. Raises UserError if a split is shorter than a
        sequence, or if documents are needed and their beginnings unknown."""
        parts: list[Part] = []
        for dataset in self.datasets:
            if packing == "stream":
                parts.append(Windows(dataset.train, seq_len))
            else:
                parts.append(PackedRows(dataset.train, ensure_packing(dataset, seq_len, cache), seq_len))
        return Sequences(parts, self.mixture, seq_len, self._mask_token(mask_documents))

    def validation(self, seq_len: int, *, mask_documents: bool = False) -> Sequences:
        """Returns the evaluation sequences: always windows, so that losses compare."""
        parts = [Windows(dataset.validation, seq_len) for dataset in self.datasets]
        return Sequences(parts, self.mixture, seq_len, self._mask_token(mask_documents))

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
    sha256s = [_short_sha256(dataset.tokenizer_json) for dataset in (one, other)]
    is_said = one.tokenizer_json is not None and other.tokenizer_json is None and other.end_of_text is not None
    if sha256s[0] != sha256s[1] and other.tokenizer_json is None and not is_said:
        raise UserError(
            f"{one.folder} was made with {sha256s[0]}, {other.folder} with an unknown one: if it is the same, say so "
            f"with the token that begins its documents, --data.document-token-id {one.end_of_text}"
        )
    if sha256s[0] != sha256s[1] and not is_said:
        raise UserError(
            f"{one.folder} was made with {sha256s[0]}, {other.folder} with {sha256s[1]}: data sets of different "
            f"tokenizers can not be mixed; prepare one of them anew with the other's tokenizer.json"
        )
    if one.vocab_size != other.vocab_size:
        raise UserError(
            f"{one.folder} has a vocabulary of {one.vocab_size}, {other.folder} of {other.vocab_size}: "
            f"data sets of different vocabularies can not be mixed"
        )


def _short_sha256(tokenizer_json: str | None) -> str:
    if tokenizer_json is None:
        return "an unknown tokenizer"
    return f"the tokenizer of sha256 {hashlib.sha256(tokenizer_json.encode()).hexdigest()[:16]}"
