"""A prepared folder as two streams of tokens, read at any position without loading anything."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import sha256_of
from paceline.data.shard import INDEX, SPLITS, Index, Shard, read_index
from paceline.data.tokenizer import Tokenizer

Int64s = npt.NDArray[np.int64]


def num_sequences(num_tokens: int, seq_len: int) -> int:
    """Sequences in a stream: sequence i is the tokens i*T .. i*T+T, of which the last is a target only. May be 0."""
    return max(0, (num_tokens - 1) // seq_len)


class TokenStream:
    """The tokens of one split as one long array, whatever shards it lies in."""

    def __init__(self, split: str, shards: Sequence[Shard], vocab_size: int) -> None:
        self.split, self.shards, self.vocab_size = split, tuple(shards), vocab_size
        self._starts = np.array([0, *accumulate(shard.num_tokens for shard in shards)], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    def num_sequences(self, seq_len: int) -> int:
        """Sequences of seq_len tokens, at least 1. Raises UserError where the split is shorter than one."""
        found = num_sequences(self.num_tokens, seq_len)
        if found < 1:
            raise UserError(
                f"the {self.split} split has {self.num_tokens} tokens, too few for one sequence of data.seq-len "
                f"{seq_len} (it takes {seq_len + 1}): give more text or a smaller --data.seq-len"
            )
        return found

    def read(self, start: int, count: int) -> Int64s:
        """Returns the tokens start..start+count-1, (count,) int64; reads no others.

        Raises UserError, naming file and offset, for an id outside the vocabulary: it would index past the embedding.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(f"tokens {start}..{start + count - 1} of {self.num_tokens} in the {self.split} split")
        tokens = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number = int(np.searchsorted(self._starts, start + done, side="right")) - 1  # skips shards without tokens
            offset = start + done - int(self._starts[number])
            part = self.shards[number].tokens[offset : offset + count - done]
            tokens[done : done + part.size] = part
            done += part.size
        if count and int(tokens.max()) >= self.vocab_size:
            self._refuse(start + int(np.argmax(tokens >= self.vocab_size)))
        return tokens

    def _refuse(self, position: int) -> None:
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        offset = position - int(self._starts[number])
        shard = self.shards[number]
        raise UserError(
            f"shard {shard.path} has id {int(shard.tokens[offset])} at token {offset}; the vocabulary has "
            f"{self.vocab_size}: the file is damaged or was made with another tokenizer"
        )


@dataclass(frozen=True)
class Dataset:
    """A prepared folder, its shards checked for format and length. Each process opens its own."""

    folder: Path
    index: Index
    train: TokenStream
    validation: TokenStream

    @classmethod
    def open(cls, folder: Path | str) -> "Dataset":
        """Raises UserError where it is no data set or a shard is missing, truncated, foreign, or not as listed."""
        root = Path(os.path.expanduser(folder))
        index = read_index(root)
        streams = []
        for split in SPLITS:
            shards = [Shard.open(root / record.file) for record in index.splits[split].shards]
            for shard, record in zip(shards, index.splits[split].shards, strict=True):
                if shard.num_tokens != record.tokens:
                    raise UserError(
                        f"shard {shard.path} has {shard.num_tokens} tokens where {INDEX} lists {record.tokens}: "
                        f"the files are not of one data set; prepare it anew"
                    )
            streams.append(TokenStream(split, shards, index.vocab_size))
        return cls(root, index, *streams)

    @property
    def name(self) -> str:
        return self.index.name

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.index.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex over what the content is: vocabulary, tokenizer, shards in order. Equal on two hosts: same data.

        Made from the index alone; `verify` holds the files against it.
        """
        tokenizer = self.index.tokenizer.sha256 if self.index.tokenizer else "-"
        lines = [f"vocab {self.vocab_size}", f"tokenizer {tokenizer}"]
        for split in SPLITS:
            lines += [f"{split} {shard.tokens} {shard.sha256}" for shard in self.index.splits[split].shards]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        """Raises UserError where the data set has none or the file is not the one that made it."""
        record = self.index.tokenizer
        if record is None:
            raise UserError(f"data set {self.folder} came without a tokenizer: its ids can not be turned into text")
        tokenizer = Tokenizer.load(self.folder / record.file)
        if tokenizer.sha256 != record.sha256:
            raise UserError(
                f"{self.folder / record.file} has sha256 {tokenizer.sha256[:16]}, {INDEX} lists {record.sha256[:16]}: "
                f"it was changed after the data was made"
            )
        return tokenizer

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.uint16] | None:
        """(vocab_size,) bytes of text of each id, 0 for special tokens; None where nobody knows them."""
        if self.index.token_bytes is None:
            return None
        path = self.folder / self.index.token_bytes
        try:
            lengths = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path} can not be read: {error}; prepare the data anew") from error
        if lengths.shape != (self.vocab_size,) or lengths.dtype != np.uint16:
            raise UserError(f"{path} holds {lengths.dtype} {lengths.shape}, not uint16 ({self.vocab_size},)")
        found: npt.NDArray[np.uint16] = lengths
        return found

    def verify(self) -> None:
        """Reads every byte. Raises UserError naming the first shard whose content is not what the index lists."""
        for split in SPLITS:
            for record in self.index.splits[split].shards:
                for file, listed in ((record.file, record.sha256), (record.starts, record.starts_sha256)):
                    try:
                        found = sha256_of(self.folder / file)
                    except OSError as error:
                        raise UserError(f"{self.folder / file} can not be read: {error.strerror}") from error
                    if found != listed:
                        raise UserError(
                            f"{self.folder / file} is damaged: its sha256 is {found[:16]}, {INDEX} lists {listed[:16]}"
                        )
