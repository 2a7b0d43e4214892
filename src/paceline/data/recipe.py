"""Options that change the bytes of a data set. Standard library only, as `--help` needs it."""

from dataclasses import dataclass
from typing import Literal

from paceline.base.errors import UserError

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
    """bytes, train:VOCAB (byte-level BPE on this text), a tokenizer.json, gpt2 or another name on the hub."""
    document_token: str = ""
    """The special token that begins a document; empty: the tokenizer's usual one, such as <|endoftext|>."""
    validation_frac: float = 0.01
    """Of documents, chosen by a hash of their text, for validation; of few, at least one. Plain text files instead: one
    in 20 by name, or the last tenth of each if they are few."""
    dedup: bool = False
    """Keep only the first of documents with exactly the same text."""
    shard_tokens: int = SHARD_TOKENS
    """At most so many tokens in a shard. A killed preparation loses at most one shard's work."""

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
