"""Token shards in the format of llm.c and modded-nanogpt, and the index of a folder of shards.

    FOLDER/
      index.json               format, version, name, vocabulary, tokenizer; per split shards, tokens, bytes, documents
      tokenizer.json           (optional in foreign data)
      token_bytes.npy          (vocab,) uint16, bytes of text each id stands for; 0 for special tokens (optional)
      train-00000.bin ...      256 int32, little-endian: [0] 20240520, [1] version, [2] tokens; then the tokens, as
      validation-00000.bin     uint16 (version 1) or uint32 (version 2); [3..10] is the tokenizer's sha256, which
                               other readers of the format ignore
      train-00000.starts.npy   (documents,) int64, where in its shard each document begins

Each document begins with the tokenizer's document token (llm.c's convention) and may continue in the next shard.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import replace, sha256_of, sync
from paceline.data.config import SHARD_TOKENS

MAGIC = 20240520
HEADER_BYTES = 256 * 4
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version

INDEX = "index.json"
TOKEN_BYTES = "token_bytes.npy"
WORK = ".preparing"  # a folder inside an unfinished data set
FORMAT = "paceline-shards"
FORMAT_VERSION = 2  # 2: each header has the tokenizer's sha256
SPLITS = ("train", "validation")
AGAIN = "copy it again, or delete the folder and prepare it anew"


@dataclass(frozen=True)
class ShardRecord:
    """A shard's entry in the index; `starts` is the file of document beginnings."""

    file: str
    tokens: int
    sha256: str
    documents: int
    starts: str
    starts_sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """A split's entry in the index. `text_bytes`: length as UTF-8. Tokens include one document token a document."""

    tokens: int
    text_bytes: int
    documents: int
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer's file; `end_of_text` is the id that begins a document."""

    file: str
    sha256: str
    vocab_size: int
    end_of_text: int


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    name: str
    vocab_size: int
    splits: Mapping[str, SplitRecord]
    tokenizer: TokenizerRecord | None = None
    token_bytes: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)  # how it was made


@contextlib.contextmanager
def reading(what: object, advice: str = "") -> Iterator[None]:
    """Turns an OSError inside into a UserError: `what` can not be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} can not be read: {error.strerror}{advice}") from error


def is_complete(folder: Path) -> bool:
    """Whether the folder has an index, which is written last."""
    return os.path.isfile(folder / INDEX)  # unlike Path.is_file, False for a folder that may not be entered


def version_for(vocab_size: int) -> int:
    """1 if all ids fit into uint16, else 2."""
    return 1 if vocab_size <= 1 << 16 else 2


def header(version: int, num_tokens: int, tokenizer_sha256: str = "") -> bytes:
    """The 1024 bytes before the tokens; `tokenizer_sha256` is hex, or empty if unknown."""
    values = np.zeros(256, dtype="<i4")
    values[:3] = MAGIC, version, num_tokens
    values[3:11] = np.frombuffer(bytes.fromhex(tokenizer_sha256).ljust(32, b"\0"), dtype="<i4")
    return values.tobytes()


class SplitWriter:
    """Writes the shards of one split without buffering them. Call `append` any number of times, then `finish` once. A
    shard's header says 0 tokens until it is closed, so readers refuse an unfinished one."""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        vocab_size: int,
        tokenizer_sha256: str = "",
        shard_tokens: int = SHARD_TOKENS,
        done: Sequence[ShardRecord] = (),
    ) -> None:
        """done: existing shards; other files of the split are removed."""
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.vocab_size, self.tokenizer_sha256 = vocab_size, tokenizer_sha256
        self.version = version_for(vocab_size)
        self.done = list(done)
        self.in_shard = 0  # tokens in the open shard
        self._starts: list[npt.NDArray[np.int64]] = []  # beginnings of its documents
        self._file: BinaryIO | None = None
        kept = {name for record in self.done for name in (record.file, record.starts)}
        for path in folder.glob(f"{split}-[0-9]*"):
            if path.name not in kept:
                path.unlink()

    @property
    def num_tokens(self) -> int:
        return sum(record.tokens for record in self.done) + self.in_shard

    def append(self, ids: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> None:
        """Appends ids (n,), starting a new shard when one is full; `starts`: beginnings of documents in ids, ascending.
        Raises ValueError for an id outside the vocabulary."""
        if ids.size and (int(ids.max()) >= self.vocab_size or (ids.dtype.kind == "i" and int(ids.min()) < 0)):
            raise ValueError(f"ids {ids.min()}..{ids.max()} are not all in a vocabulary of {self.vocab_size}")
        done = 0
        while done < ids.size:
            if self.in_shard == self.shard_tokens:
                self.close_shard()
            if self._file is None:
                self._file = self._path.open("wb")
                self._file.write(header(self.version, 0, self.tokenizer_sha256))
            part = ids[done : done + self.shard_tokens - self.in_shard]
            within = starts[np.searchsorted(starts, done) : np.searchsorted(starts, done + part.size)]
            self._file.write(np.ascontiguousarray(part, dtype=DTYPES[self.version]).data)
            self._starts.append(within - done + self.in_shard)
            self.in_shard += part.size
            done += part.size

    def close_shard(self) -> None:
        """Completes the open shard, if any, and syncs its files to the disk."""
        if self._file is None:
            return
        path, starts = self._path, self._path.with_suffix(".starts.npy")
        self._file.seek(0)
        self._file.write(header(self.version, self.in_shard, self.tokenizer_sha256))
        self._file.close()
        begins = np.concatenate(self._starts).astype("<i8")
        np.save(starts, begins, allow_pickle=False)
        sync(path)
        sync(starts)
        self.done.append(
            ShardRecord(path.name, self.in_shard, sha256_of(path), begins.size, starts.name, sha256_of(starts))
        )
        self._file, self._starts, self.in_shard = None, [], 0

    def finish(self, text_bytes: int) -> SplitRecord:
        """Closes the last shard and returns the split's entry in the index; all files are on the disk then."""
        self.close_shard()
        tokens, documents = sum(r.tokens for r in self.done), sum(r.documents for r in self.done)
        return SplitRecord(tokens, text_bytes, documents, tuple(self.done))

    def abandon(self) -> None:
        """Closes the open file without completing the shard."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses buffered data
                self._file.close()
            self._file = None

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.done):05d}.bin"


def write_index(folder: Path, index: Index) -> None:
    """Writes index.json, the last file of a data set, atomically."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(index)}
    replace(folder / INDEX, (json.dumps(content, indent=1) + "\n").encode())
    sync(folder)


def read_index(folder: Path) -> Index:
    """Returns index.json's content. Raises UserError if it is missing, damaged, or of another format or version."""
    path = folder / INDEX
    try:
        with reading(path, f"; is {folder} a prepared data set?"):
            content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not the index of a paceline data set: its `format` is not {FORMAT!r}")
    if content.get("version") != FORMAT_VERSION:
        raise UserError(
            f"{path} has version {content.get('version')!r}; this paceline reads {FORMAT_VERSION}: prepare it anew"
        )
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}; {AGAIN}") from error


def _parse(content: dict[str, Any]) -> Index:
    splits = {}
    for name in SPLITS:
        record = content["splits"][name]
        shards = tuple(_checked(ShardRecord(**shard)) for shard in record["shards"])
        splits[name] = _checked(SplitRecord(**{**record, "shards": shards}))
        if splits[name].tokens != sum(shard.tokens for shard in shards):
            raise ValueError(f"the shards of {name} do not add up to its {splits[name].tokens} tokens")
    tokenizer = None if content["tokenizer"] is None else _checked(TokenizerRecord(**content["tokenizer"]))
    token_bytes = content["token_bytes"]
    if token_bytes is not None:
        _require_name(token_bytes)
    return Index(
        str(content["name"]), int(content["vocab_size"]), splits, tokenizer, token_bytes, content.get("origin", {})
    )


Record = TypeVar("Record", ShardRecord, SplitRecord, TokenizerRecord)


def _checked(record: Record) -> Record:
    """Returns the record; raises ValueError for a field of a wrong type or value."""
    for name, value in vars(record).items():
        if name in ("file", "starts"):
            _require_name(value)
        elif name.endswith("sha256"):
            if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
                raise ValueError(f"{value!r} is not a sha256")
        elif name != "shards" and not (isinstance(value, int) and value >= 0):
            raise ValueError(f"{value!r} is not a number from 0 on")
    return record


def _require_name(file: Any) -> None:
    """An index from elsewhere must not name files outside its folder."""
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file in the folder")
