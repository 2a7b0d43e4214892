"""A dataset: the tokens of two splits with their metadata, read at any position without loading everything.

`Dataset.open` takes a folder that was prepared here (index.json) or foreign token files (see foreign.py). Metadata that
these lack (tokenizer, bytes of a token, beginnings of documents) is None or an error, never guessed.
"""

import hashlib
import os
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
from paceline.data.shard import (
    AGAIN,
    DTYPES,
    HEADER_BYTES,
    INDEX,
    SPLITS,
    TOKEN_BYTES,
    WORK,
    Index,
    ShardRecord,
    is_complete,
    read_index,
    reading,
    version_for,
)
from paceline.data.stream import Int64s, Shard, Tokens, TokenStream, sample_digest, wrong_id
from paceline.data.tokenizer import Tokenizer

Progress = Callable[[int], None]  # called with the number of bytes read since the last call

_VERIFIED_BYTES = 4 << 20  # read at once
_SEARCHED_TOKENS = 4 << 20  # at once, 32 MB as int64
_SAMPLE_BYTES = 16 << 10  # of a prepared shard's beginning, middle and end


@dataclass(frozen=True)
class Documents:
    """The beginnings of a split's documents in its stream, and their tokens; (num_documents,) int64 both."""

    starts: Int64s
    lengths: Int64s


def is_dataset(folder: Path | str) -> bool:
    """Whether the names of the folder's files are those of a dataset; no file is read. Also true for an unfinished
    dataset, which `open` refuses: its tokenizer.json must not be taken for text. Raises UserError for a folder that
    may not be entered."""
    root = Path(os.path.expanduser(folder))
    return is_complete(root) or os.path.isdir(root / WORK) or foreign.find_foreign(root) is not None


def tokenizer_json_of(folder: Path | str) -> str | None:
    """Returns the tokenizer.json of a prepared dataset without checking the rest; None if it has none, or if other
    programs made it. Raises UserError if it cannot be read."""
    root = Path(os.path.expanduser(folder))
    listed = read_index(root).tokenizer if is_complete(root) else None
    if listed is None:
        return None
    try:
        with reading(root / listed.file):
            return (root / listed.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{root / listed.file} is damaged: {error}; {AGAIN}") from error


class Dataset:
    """A folder's tokens; opening checks format and length of its shards. Each process opens its own Dataset."""

    def __init__(
        self,
        folder: Path,
        name: str,
        vocab_size: int,
        shards: dict[str, tuple[Shard, ...]],
        *,
        index: Index | None = None,
        tokenizer: Tokenizer | None = None,
        starts: dict[str, Int64s] | None = None,
        document_token: int | None = None,
    ) -> None:
        """index: None for foreign files, of which the others tell what is known."""
        self.folder, self.name = folder, name
        self.vocab_size = vocab_size  # ids are less than this
        self.train, self.validation = (TokenStream(split, shards[split], vocab_size) for split in SPLITS)
        self.index = index  # the content of index.json; None for foreign files
        self._tokenizer, self._starts_of, self._document_token = tokenizer, starts, document_token

    @staticmethod
    def open(
        folder: Path | str, vocab_size: int = 0, document_token: int | None = None, *, checks: bool = True
    ) -> "Dataset":
        """Returns the dataset of a folder. vocab_size: from --model.vocab-size (0: not given), and document_token,
        from --data.document-token-id, are for folders that do not tell it. checks: False where another rank of the host
        checks the same files; then prepared shards are opened when they are first read.

        Raises UserError if vocab_size is missing, or smaller than the folder's; if the folder is no dataset or
        unfinished; if a shard is missing or truncated; and for an id beyond the vocabulary in a sample of each shard.
        `verify` finds everything else.
        """
        root = Path(os.path.expanduser(folder))
        is_ours = is_complete(root)
        if not is_ours and os.path.isdir(root / WORK):
            raise UserError(foreign.unfinished(root))
        files = None if is_ours else foreign.find_foreign(root)
        opened = (
            _open_prepared(root, checks) if files is None else _open_foreign(root, files, vocab_size, document_token)
        )
        if document_token is not None and opened.end_of_text != document_token:
            raise UserError(
                f"data.document-token-id is {document_token}, and in {opened.name} the token {opened.end_of_text} "
                f"begins documents; leave it out"
            )
        if 0 < vocab_size < opened.vocab_size:
            raise UserError(
                f"model.vocab-size is {vocab_size}, smaller than the data's vocabulary ({opened.vocab_size} in "
                f"{opened.name}); use at least that, or 0 for exactly that"
            )
        if checks:
            _ = opened.content_digest  # looks at ids
        return opened

    @cached_property
    def fingerprint(self) -> str:
        """sha256 hex over vocabulary, tokenizer and shards in order; equal on hosts with equal data. For prepared data
        it uses the index alone, which `verify` compares with the files; for other data names, sizes and samples."""
        if self.index is None:
            return self.content_digest
        tokenizer = self.index.tokenizer.sha256 if self.index.tokenizer else "-"
        lines = [f"vocab {self.vocab_size}", f"tokenizer {tokenizer}"]
        for split in SPLITS:
            lines += [f"{split} {shard.tokens} {shard.sha256}" for shard in self.index.splits[split].shards]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def listing(self) -> str:
        """The fingerprint, as far as it is known without reading shards: of foreign data their names and sizes."""
        if self.index is None:
            return sample_digest((self.train, self.validation), self.vocab_size, sample_bytes=0)
        return self.fingerprint

    @cached_property
    def content_digest(self) -> str:
        """sha256 hex over a sample of the shards' bytes, which the fingerprint of prepared data does not read. Raises
        UserError for an id beyond the vocabulary in it."""
        streams = (self.train, self.validation)
        return sample_digest(streams, self.vocab_size, *(() if self.index is None else (_SAMPLE_BYTES,)))

    @cached_property
    def tokenizer_json(self) -> str | None:
        """The tokenizer.json of the dataset; None if it has none. Raises UserError if the file was changed."""
        if self.index is None or self.index.tokenizer is None:
            return self._tokenizer.json if self._tokenizer else None
        path, listed = self.folder / self.index.tokenizer.file, self.index.tokenizer.sha256
        with reading(path):
            content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != listed:
            raise UserError(
                f"{path} has sha256 {sha256[:16]}, {INDEX} lists {listed[:16]}: it was changed after the data was made"
            )
        return content.decode()

    def tokenizer(self) -> Tokenizer:
        """Raises UserError if the dataset has none."""
        if self.tokenizer_json is None:
            raise UserError(f"dataset {self.folder} came without a tokenizer: its ids can not be turned into text")
        return Tokenizer(self.tokenizer_json)

    @property
    def end_of_text(self) -> int | None:
        """The id that begins documents; None if unknown."""
        return self.index.tokenizer.end_of_text if self.index and self.index.tokenizer else self._document_token

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.uint16] | None:
        """(vocab_size,) bytes of text of each id, 0 for special tokens; None if unknown."""
        if self.index is None:
            return self._of_all_ids(self._tokenizer.token_bytes()) if self._tokenizer else None
        if self.index.token_bytes is None:
            return None
        path = self.folder / self.index.token_bytes
        lengths = _load(path)
        if lengths.shape != (self.vocab_size,) or lengths.dtype != np.uint16:
            raise UserError(f"{path} holds {lengths.dtype} {lengths.shape}, not uint16 ({self.vocab_size},)")
        return lengths

    def documents(self, split: str) -> Documents:
        """Returns the documents of "train" or "validation". Raises UserError if their beginnings are unknown."""
        if self.index is None:
            stream = self.train if split == "train" else self.validation
            begins = self._begins(split, stream)
            return Documents(begins, np.diff(begins, append=np.int64(stream.num_tokens)))
        starts, before = [np.empty(0, dtype=np.int64)], 0
        for record in self.index.splits[split].shards:
            starts.append(_starts(self.folder, record) + before)
            before += record.tokens
        joined = np.concatenate(starts)
        return Documents(joined, np.diff(joined, append=np.int64(before)))

    def listed_starts(self, split: str) -> Int64s | None:
        """Returns where documents begin by the index of other programs' files; None if they have none."""
        return None if self._starts_of is None else self._starts_of[split]

    def _begins(self, split: str, stream: TokenStream) -> Int64s:
        """Returns where the documents of foreign files begin: as listed, or at each document token."""
        if (listed := self.listed_starts(split)) is not None:
            return listed
        if self._document_token is None:
            raise UserError(
                f"dataset {self.folder} does not say where its documents begin, and data.packing bestfit needs it: "
                f"give the token that stands between them, --data.document-token-id (GPT-2's: 50256), or prepare the "
                f"documents by `paceline data prepare`"
            )
        begins = [np.zeros(1, np.int64)]  # the first may lack it
        for start in range(0, stream.num_tokens, _SEARCHED_TOKENS):
            ids = stream.read(start, min(_SEARCHED_TOKENS, stream.num_tokens - start))
            begins.append(np.flatnonzero(ids == self._document_token) + start)
        return np.unique(np.concatenate(begins))

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, all of which `verify` reads; of other programs' files the tokens, and no header."""
        shards, header_bytes = (*self.train.shards, *self.validation.shards), HEADER_BYTES if self.index else 0
        return sum(header_bytes + shard.num_tokens * shard.dtype.itemsize for shard in shards)

    def verify(self, progress: Progress = lambda _: None) -> None:
        """Reads every byte: checks shards and document beginnings by their checksums, if there are any, each token
        against the vocabulary, each beginning against its token, and token_bytes against the tokenizer. Raises
        UserError naming the first wrong shard and the place in it."""
        listed = self.token_bytes if self.index and self.tokenizer_json is not None else None
        if listed is not None and not np.array_equal(listed, self._of_all_ids(self.tokenizer().token_bytes())):
            raise UserError(
                f"{self.folder / TOKEN_BYTES} is damaged: it does not have the lengths of the tokenizer's tokens; "
                f"prepare the data anew"
            )
        for split, stream in zip(SPLITS, (self.train, self.validation), strict=True):
            records = self.index.splits[split].shards if self.index else [None] * len(stream.shards)
            for shard, record in zip(stream.shards, records, strict=True):
                self._verify_shard(shard, record, progress)

    def _verify_shard(self, shard: Shard, record: ShardRecord | None, progress: Progress) -> None:
        starts, digest = np.empty(0, dtype=np.int64), hashlib.sha256()
        if record is not None:
            path = self.folder / record.starts
            with reading(path):
                _require_sha256(path, sha256_of(path), record.starts_sha256)
            starts = _starts(self.folder, record)
            with reading(f"shard {shard.path}"), shard.path.open("rb") as file:
                digest.update(file.read(HEADER_BYTES))
            progress(HEADER_BYTES)
        wrong = ""
        buffer: Tokens = np.empty(_VERIFIED_BYTES // shard.dtype.itemsize, dtype=shard.dtype)
        for begin in range(0, shard.num_tokens, buffer.size):
            tokens = buffer[: shard.num_tokens - begin]
            shard.fill(tokens, begin)
            digest.update(tokens.data)
            wrong = wrong or self._wrong_tokens(shard, begin, tokens, starts)
            progress(tokens.nbytes)
        if record is not None:
            _require_sha256(shard.path, digest.hexdigest(), record.sha256)
        if wrong:
            raise UserError(wrong)

    def _wrong_tokens(self, shard: Shard, begin: int, tokens: Tokens, starts: Int64s) -> str:
        if int(tokens.max()) >= self.vocab_size:
            return wrong_id(shard, begin + int(np.argmax(tokens >= self.vocab_size)), self.vocab_size)
        if self.end_of_text is None:
            return ""
        within = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, begin + tokens.size)] - begin
        places = within[tokens[within] != self.end_of_text]
        if not places.size:
            return ""
        place = int(places[0])
        return (
            f"shard {shard.path} has id {int(tokens[place])} at token {begin + place}, where a document should begin "
            f"with {self.end_of_text}: the list of documents is of other data; prepare it anew"
        )

    def _of_all_ids(self, known: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Extends a tokenizer's token_bytes to a larger vocabulary."""
        lengths = np.zeros(self.vocab_size, dtype=np.uint16)
        lengths[: known.size] = known[: self.vocab_size]
        return lengths


def _open_prepared(folder: Path, checks: bool) -> Dataset:
    index = read_index(folder)
    dtype = DTYPES[version_for(index.vocab_size)]
    shards = {
        split: tuple(
            Shard(folder / record.file, dtype, record.tokens, HEADER_BYTES) for record in index.splits[split].shards
        )
        for split in SPLITS
    }
    for shard in (*shards["train"], *shards["validation"]) if checks else ():
        shard.require_size()
    return Dataset(folder, index.name, index.vocab_size, shards, index=index)


def _open_foreign(folder: Path, files: foreign.Files, vocab_size: int, document_token: int | None) -> Dataset:
    shards, size, tokenizer, starts = foreign.open_shards(folder, files, vocab_size)
    if document_token is not None and not 0 <= document_token < size:
        raise UserError(
            f"data.document-token-id is {document_token}; the vocabulary of {folder} has the ids 0 to {size - 1}"
        )
    name = folder.resolve().name
    return Dataset(folder, name, size, shards, tokenizer=tokenizer, starts=starts, document_token=document_token)


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged header can raise anything
        raise UserError(f"{path} can not be read: {error}; prepare the data anew") from error
    return array


def _starts(folder: Path, record: ShardRecord) -> Int64s:
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


def _require_sha256(path: Path, sha256: str, listed: str) -> None:
    if sha256 != listed:
        raise UserError(f"{path} is damaged: its sha256 is {sha256[:16]}, {INDEX} lists {listed[:16]}")
