"""A data set: two streams of tokens with what is known of them, read at any position without loading anything.

`Dataset.open` takes a folder that was prepared here (index.json) and those of others (see foreign.py). Where a thing is
not known (a tokenizer, the bytes of a token, where documents begin) that is said, and not guessed.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import sha256_of
from paceline.data import foreign
from paceline.data.shard import INDEX, SPLITS, WORK, Index, ShardRecord, read_index
from paceline.data.stream import Int64s, Shard, Tokens, TokenStream, wrong_id
from paceline.data.tokenizer import Tokenizer

Progress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""

_PIECE_BYTES = 4 << 20  # read at a time by verify


@dataclass(frozen=True)
class Documents:
    """Where each document of a split begins in its stream, and its tokens; (num_documents,) int64 both."""

    starts: Int64s
    lengths: Int64s


def is_dataset(folder: Path | str) -> bool:
    """Whether `Dataset.open` is meant for this folder: by the names of its files, none of which is read.

    An unfinished one too, which it refuses: its tokenizer.json would be taken for text otherwise.
    """
    root = Path(os.path.expanduser(folder))
    return (root / INDEX).is_file() or (root / WORK).is_dir() or foreign.find_foreign(root) is not None


class Dataset(ABC):
    """A folder's tokens, its shards checked for format and length. Each process opens its own."""

    def __init__(self, folder: Path, name: str, vocab_size: int, shards: dict[str, tuple[Shard, ...]]) -> None:
        self.folder, self.name = folder, name
        self.vocab_size = vocab_size
        """Ids are below this."""
        self.train, self.validation = (TokenStream(split, shards[split], vocab_size) for split in SPLITS)

    @staticmethod
    def open(folder: Path | str, vocab_size: int = 0) -> "Dataset":
        """Returns the data set of a folder. `vocab_size` is what the user gave (--model.vocab-size; 0: nothing).

        It counts where nothing in the folder tells the vocabulary. Raises UserError where it is smaller than what the
        folder tells, where it is missing, where the folder is no data set or was not prepared to the end, or where a
        shard is missing, truncated, somebody else's, made with another tokenizer, or not as listed.
        """
        root = Path(os.path.expanduser(folder))
        is_complete = (root / INDEX).is_file()
        if not is_complete and (root / WORK).is_dir():
            raise UserError(foreign.unfinished(root))
        files = None if is_complete else foreign.find_foreign(root)
        opened: Dataset = PreparedDataset(root) if files is None else ForeignDataset(files, vocab_size)
        if 0 < vocab_size < opened.vocab_size:
            raise UserError(
                f"model.vocab-size is {vocab_size}, smaller than the data's vocabulary ({opened.vocab_size} in "
                f"{opened.name}); use at least that, or 0 for exactly that"
            )
        return opened

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 hex over the content: vocabulary, tokenizer, shards in order. Equal on two hosts: equal data."""

    @property
    @abstractmethod
    def tokenizer_json(self) -> str | None:
        """The tokenizer.json that made it; None where it came without one."""

    @property
    @abstractmethod
    def end_of_text(self) -> int | None:
        """The id that begins each document; None where none is known to."""

    @property
    @abstractmethod
    def token_bytes(self) -> npt.NDArray[np.uint16] | None:
        """(vocab_size,) bytes of text of each id, 0 for special tokens; None where nobody knows them."""

    @abstractmethod
    def documents(self, split: str) -> Documents:
        """The documents of "train" or "validation". Raises UserError where nobody knows where they begin."""

    @abstractmethod
    def verify(self, progress: Progress = lambda _: None) -> None:
        """Reads every byte. Raises UserError naming the first shard, and the place in it, that is not as it should."""

    def tokenizer(self) -> Tokenizer:
        """Raises UserError where the data set has none."""
        json = self.tokenizer_json
        if json is None:
            raise UserError(f"data set {self.folder} came without a tokenizer: its ids can not be turned into text")
        return Tokenizer(json)

    @property
    def num_bytes(self) -> int:
        """Of all shards; what `verify` reads of them."""
        return sum(
            shard.first_byte + shard.num_tokens * shard.dtype.itemsize
            for stream in (self.train, self.validation)
            for shard in stream.shards
        )


class PreparedDataset(Dataset):
    """A folder with an index.json, as `paceline data prepare` makes it."""

    def __init__(self, folder: Path) -> None:
        self.index: Index = read_index(folder)
        sha256 = self.index.tokenizer.sha256 if self.index.tokenizer else ""
        shards = {
            split: tuple(_listed(folder, record, sha256) for record in self.index.splits[split].shards)
            for split in SPLITS
        }
        super().__init__(folder, self.index.name, self.index.vocab_size, shards)

    @cached_property
    def fingerprint(self) -> str:
        """Made from the index alone; `verify` holds the files against it."""
        tokenizer = self.index.tokenizer.sha256 if self.index.tokenizer else "-"
        lines = [f"vocab {self.vocab_size}", f"tokenizer {tokenizer}"]
        for split in SPLITS:
            lines += [f"{split} {shard.tokens} {shard.sha256}" for shard in self.index.splits[split].shards]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def tokenizer_json(self) -> str | None:
        """Raises UserError where the file is not the one that made the data."""
        record = self.index.tokenizer
        if record is None:
            return None
        path = self.folder / record.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} can not be read: {error.strerror}") from error
        found = hashlib.sha256(content).hexdigest()
        if found != record.sha256:
            raise UserError(
                f"{path} has sha256 {found[:16]}, {INDEX} lists {record.sha256[:16]}: "
                f"it was changed after the data was made"
            )
        return content.decode()

    @property
    def end_of_text(self) -> int | None:
        return self.index.tokenizer.end_of_text if self.index.tokenizer else None

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.uint16] | None:
        if self.index.token_bytes is None:
            return None
        lengths = _load(self.folder / self.index.token_bytes)
        if lengths.shape != (self.vocab_size,) or lengths.dtype != np.uint16:
            raise UserError(
                f"{self.folder / self.index.token_bytes} holds {lengths.dtype} {lengths.shape}, not uint16 "
                f"({self.vocab_size},)"
            )
        return lengths

    def documents(self, split: str) -> Documents:
        """A document may run on over shards, which have their own files of beginnings."""
        starts, before = [np.empty(0, dtype=np.int64)], 0
        for record in self.index.splits[split].shards:
            starts.append(_starts(self.folder, record) + before)
            before += record.tokens
        joined = np.concatenate(starts)
        return Documents(joined, np.diff(joined, append=np.int64(before)))

    def verify(self, progress: Progress = lambda _: None) -> None:
        """Holds shards and beginnings against their checksums, the beginnings against the tokens, and the tokenizer."""
        if self.token_bytes is not None and self.tokenizer_json is not None:
            known = self.tokenizer().token_bytes()
            if not np.array_equal(self.token_bytes[: known.size], known) or self.token_bytes[known.size :].any():
                raise UserError(
                    f"{self.folder / str(self.index.token_bytes)} is damaged: it does not have the lengths of the "
                    f"tokenizer's tokens; prepare the data anew"
                )
        for split, stream in zip(SPLITS, (self.train, self.validation), strict=True):
            for shard, record in zip(stream.shards, self.index.splits[split].shards, strict=True):
                path = self.folder / record.starts
                try:
                    starts_sha256 = sha256_of(path)
                except OSError as error:
                    raise UserError(f"{path} can not be read: {error.strerror}") from error
                _require_sha256(path, starts_sha256, record.starts_sha256)
                starts = _starts(self.folder, record)
                found, wrong = _examine(shard, self.vocab_size, starts, self.end_of_text, progress)
                _require_sha256(shard.path, found, record.sha256)
                if wrong:
                    raise UserError(wrong)


class ForeignDataset(Dataset):
    """A folder of nanoGPT's or llm.c's token files."""

    def __init__(self, files: foreign.ForeignFiles, vocab_size: int) -> None:
        """`vocab_size` counts where the folder has no meta.pkl."""
        self._shards = foreign.open_shards(files)
        self._vocabulary = foreign.vocabulary(files.folder, vocab_size)
        super().__init__(files.folder, files.folder.resolve().name, self._vocabulary.size, self._shards)

    @cached_property
    def fingerprint(self) -> str:
        """Made from names, sizes and samples: there are no checksums."""
        return foreign.fingerprint(self._shards, self.vocab_size)

    @property
    def tokenizer_json(self) -> str | None:
        return self._vocabulary.tokenizer.json if self._vocabulary.tokenizer else None

    @property
    def end_of_text(self) -> int | None:
        return None

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.uint16] | None:
        if self._vocabulary.tokenizer is None:
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.uint16)
        known = self._vocabulary.tokenizer.token_bytes()
        lengths[: known.size] = known[: self.vocab_size]
        return lengths

    def documents(self, split: str) -> Documents:
        raise UserError(
            f"data set {self.folder} does not say where its documents begin; data.packing bestfit and "
            f"data.mask-documents need a data set made by `paceline data prepare`"
        )

    def verify(self, progress: Progress = lambda _: None) -> None:
        """Holds every token against the vocabulary: there are no checksums."""
        for stream in (self.train, self.validation):
            for shard in stream.shards:
                _, wrong = _examine(shard, self.vocab_size, np.empty(0, dtype=np.int64), None, progress)
                if wrong:
                    raise UserError(wrong)


def _listed(folder: Path, record: ShardRecord, tokenizer_sha256: str) -> Shard:
    shard = Shard.open(folder / record.file, tokenizer_sha256)
    if shard.num_tokens != record.tokens:
        raise UserError(
            f"shard {shard.path} has {shard.num_tokens} tokens where {INDEX} lists {record.tokens}: "
            f"the files are not of one data set; prepare it anew"
        )
    return shard


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        found: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can not be read: {error}; prepare the data anew") from error
    return found


def _starts(folder: Path, record: ShardRecord) -> Int64s:
    """Where in a shard documents begin. Raises UserError where they are not as many as listed, in order and inside."""
    path = folder / record.starts
    starts = _load(path)
    good = starts.dtype == np.int64 and starts.shape == (record.documents,)
    if good and starts.size:
        good = starts[0] >= 0 and starts[-1] < record.tokens and bool((np.diff(starts) > 0).all())
    if not good:
        raise UserError(
            f"{path} is damaged: it does not hold {record.documents} ascending places in {record.tokens} tokens; "
            f"prepare the data anew"
        )
    return starts


def _require_sha256(path: Path, found: str, listed: str) -> None:
    if found != listed:
        raise UserError(f"{path} is damaged: its sha256 is {found[:16]}, {INDEX} lists {listed[:16]}")


def _examine(
    shard: Shard, vocab_size: int, starts: Int64s, document_token: int | None, progress: Progress
) -> tuple[str, str | None]:
    """Returns a shard's sha256 and what is wrong with its tokens; reads it once, 4 MiB at a time."""
    digest = hashlib.sha256(_first_bytes(shard))
    wrong = None
    piece: Tokens = np.empty(_PIECE_BYTES // shard.dtype.itemsize, dtype=shard.dtype)
    progress(shard.first_byte)
    for begin in range(0, shard.num_tokens, piece.size):
        tokens = piece[: shard.num_tokens - begin]
        shard.fill(tokens, begin)
        digest.update(tokens.data)
        wrong = wrong or _wrong_tokens(shard, begin, tokens, vocab_size, starts, document_token)
        progress(tokens.nbytes)
    return digest.hexdigest(), wrong


def _first_bytes(shard: Shard) -> bytes:
    try:
        with shard.path.open("rb") as file:
            return file.read(shard.first_byte)
    except OSError as error:
        raise UserError(f"shard {shard.path} can not be read: {error.strerror}") from error


def _wrong_tokens(
    shard: Shard, begin: int, tokens: Tokens, vocab_size: int, starts: Int64s, document_token: int | None
) -> str | None:
    """What is wrong with tokens begin, begin+1, ... of a shard: an id too large, a document without its token."""
    if int(tokens.max()) >= vocab_size:
        return wrong_id(shard, begin + int(np.argmax(tokens >= vocab_size)), vocab_size)
    if document_token is None:
        return None
    within = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, begin + tokens.size)] - begin
    places = within[tokens[within] != document_token]
    if not places.size:
        return None
    place = int(places[0])
    return (
        f"shard {shard.path} has id {int(tokens[place])} at token {begin + place}, where a document should begin with "
        f"{document_token}: the list of documents is of other data; prepare it anew"
    )
