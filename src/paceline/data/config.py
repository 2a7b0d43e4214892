"""Options for data. Standard library only, so that `--help` starts without numpy or torch."""

import math
import os
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from paceline.base.errors import UserError

MIN_VOCAB = 257  # 256 byte values and <|endoftext|>: with fewer, some text has no ids
MAX_VOCAB = 1 << 20  # far above any vocabulary in use (GPT-4o: 200k), so larger is a typing error


_EXPECTED_CHARACTERS = 128
# Set by few runs (docs/log/ablations.md): 512 is best for 150 kB, 1024 or 2048 for 400 kB, 2048 or 4096 for 1.1 MB.
_BYTES_OF_A_TOKEN, _LEAST_BY_SIZE, _MOST_BY_SIZE = 256, 512, 4096


def vocabulary_for(num_bytes: int) -> int:
    """Returns the vocabulary of a byte-pair encoding for so much text: a power of two, the more text the more."""
    vocabulary = _LEAST_BY_SIZE
    while 2 * vocabulary <= min(_MOST_BY_SIZE, num_bytes // _BYTES_OF_A_TOKEN):
        vocabulary *= 2
    return vocabulary


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from and how long a sequence is."""

    path: str = ""
    """A folder from `paceline data prepare`, nanoGPT's or llm.c's token files, a folder of text files, or a text file;
    empty: the embedded corpus, which is the Python standard library's own sources."""

    mix: tuple[str, ...] = ()
    """Several datasets of one tokenizer instead of one, each PATH=WEIGHT: sequences are drawn in proportion to the
    weights."""

    tokenizer_vocab: int = 4096
    """Vocabulary of the byte-pair encoding that is trained when text has to be tokenized; 0: each character of the text
    is a token; -1: 512 to 4096 by the size of the text, since each token of a small one has to be met often enough."""

    seq_len: int = 256
    """Tokens in a sequence."""

    packing: Literal["stream", "bestfit"] = "stream"
    """stream: consecutive windows of the token stream; bestfit: each sequence begins with a document and is filled with
    the beginnings of others, what does not fit is cropped."""

    mask_documents: bool = False
    """Attention stays inside a document."""

    document_token_id: int = -1
    """The token that begins a document in token files of other programs, for masks and packing (GPT-2's: 50256); -1:
    none is given."""

    def check(self) -> None:
        """Raises UserError for an impossible value, naming the field as typed on the command line."""
        if self.seq_len < 1:
            raise UserError(f"data.seq-len is {self.seq_len}; a sequence has at least 1 token")
        if self.tokenizer_vocab not in (0, -1) and not MIN_VOCAB <= self.tokenizer_vocab <= MAX_VOCAB:
            raise UserError(
                f"data.tokenizer-vocab is {self.tokenizer_vocab}; a byte-level vocabulary has {MIN_VOCAB} "
                f"(256 bytes and <|endoftext|>) to {MAX_VOCAB} tokens; 0 means characters, -1 by the size of the text"
            )
        if self.document_token_id < -1:
            raise UserError(f"data.document-token-id is {self.document_token_id}; an id is at least 0")
        if self.path and self.mix:
            raise UserError("data.path and data.mix are both given; give one")
        for path, weight in self.parts:
            if "\0" in path:
                raise UserError(f"data.path is {path!r}; a path has no NUL in it")
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(f"data.mix has {path}={weight:g}; a weight is a number above 0")

    @property
    def expected_vocab(self) -> int:
        """The vocabulary of text that has not been looked at; of characters about so many."""
        return _MOST_BY_SIZE if self.tokenizer_vocab < 0 else self.tokenizer_vocab or _EXPECTED_CHARACTERS

    @property
    def document_token(self) -> int | None:
        """None if none is given."""
        return None if self.document_token_id < 0 else self.document_token_id

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(path, weight) of each dataset; one for `path`. Raises UserError for a `mix` item that is not
        PATH=WEIGHT."""
        return tuple(_part(text) for text in self.mix) or ((self.path, 1.0),)

    def absolute(self) -> "DataConfig":
        """Returns a config that names the same data in any working directory."""
        mix = tuple(f"{_absolute(path)}={text.rpartition('=')[2]}" for text in self.mix for path, _ in (_part(text),))
        return replace(self, path=_absolute(self.path), mix=mix)


def _absolute(path: str) -> str:
    """Returns the path as any working directory has it; what is in a home folder or on the hub is that already."""
    return path if not path or path.startswith(("~", "hub:", "hf://")) else os.path.abspath(path)


def _part(text: str) -> tuple[str, float]:
    path, _, weight = text.rpartition("=")
    try:
        if not path:
            raise ValueError
        return path, float(weight)
    except ValueError:
        raise UserError(f"data.mix has {text!r}; each part is PATH=WEIGHT, such as web=0.7 code=0.3") from None


SHARD_TOKENS = 100_000_000  # 200 MB of uint16, as llm.c's FineWeb
MAX_SHARD_TOKENS = (1 << 31) - 1  # the header counts in an int32


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How documents become tokens."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the files are; auto: by their names; other files are text if their beginning is."""
    text_key: str = "text"
    """The key of the text in a JSONL record; the column in a Parquet file."""
    separator: str = ""
    """Between two documents of a text file, such as <|endoftext|>; empty: a file is a document."""
    tokenizer: str = "train:32768"
    """bytes, chars, train:VOCAB (byte-level BPE on this text), a tokenizer.json, gpt2, or ORG/NAME on the hub."""
    document_token: str = ""
    """The special token that begins a document; empty: the tokenizer's usual one, such as <|endoftext|>."""
    validation_frac: float = 0.01
    """Of documents, chosen by a hash of their text, for validation; of few, at least one. Plain text files instead: one
    in 20 by name, or the last tenth of each if they are few."""
    on_error: Literal["stop", "skip"] = "stop"
    """Of a record or file that cannot be read: stop; or skip it, and count it by source."""
    shard_tokens: int = SHARD_TOKENS
    """Tokens in a shard; the last of a split has fewer."""

    def check(self) -> None:
        """Raises UserError for an impossible value, naming the flag."""
        if not 0 <= self.validation_frac < 1:
            raise UserError(f"--validation-frac is {self.validation_frac}; it is at least 0 and below 1")
        if not 1 <= self.shard_tokens <= MAX_SHARD_TOKENS:
            raise UserError(f"--shard-tokens is {self.shard_tokens}; the format allows 1 to {MAX_SHARD_TOKENS}")
        if not self.text_key:
            raise UserError("--text-key is empty; give the key of the text, such as text or content")
        if not self.tokenizer:
            raise UserError("--tokenizer is empty; give bytes, train:VOCAB, a tokenizer.json, or a name such as gpt2")


@dataclass(frozen=True)
class Share:
    """Of the parts, those that this process makes: number `number` of `of`, from 1; all by default. `only_finishes`:
    none, but the shards if all parts are there."""

    number: int = 1
    of: int = 1
    only_finishes: bool = False

    @property
    def lock(self) -> str:
        if self.only_finishes:
            return "lock-finish"
        return "lock" if self.of == 1 else f"lock-{self.number}-of-{self.of}"

    def takes(self, number: int) -> bool:
        """Whether part `number`, from 0, is of this share."""
        return not self.only_finishes and number % self.of == self.number - 1


ALL_PARTS = Share()


class Report(Protocol):
    """Receives a preparation's messages."""

    def say(self, text: str) -> None:
        """Receives a line for the user."""

    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None:
        """Receives how much of the sources has been read; total None: unknown."""


class Quiet:
    """Ignores a preparation's messages."""

    def say(self, text: str) -> None: ...
    def advance(self, done_bytes: int, total_bytes: int | None, what: str = "") -> None: ...
