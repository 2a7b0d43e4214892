"""Token shards as llm.c and modded-nanogpt have them, and the index that says what a folder of them holds.

    FOLDER/
      index.json               format, version, name, vocabulary, tokenizer; per split shards, tokens, bytes, documents
      tokenizer.json           (optional in foreign data)
      token_bytes.npy          (vocab,) uint16, bytes of text each id stands for; 0 for special tokens (optional)
      train-00000.bin ...      256 int32, little-endian: [0] 20240520, [1] version, [2] tokens; then the tokens, as
      validation-00000.bin     uint16 (version 1) or uint32 (version 2); [3..10] is the tokenizer's sha256, which
                               other readers of the format pass over
      train-00000.starts.npy   (documents,) int64, where in its shard each document begins

Each document begins with the tokenizer's document token (llm.c's convention) and may run on into the next shard.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import replace, sha256_of, sync
from paceline.data.recipe import SHARD_TOKENS

MAGIC = 20240520
HEADER_BYTES = 256 * 4
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version

INDEX = "index.json"
TOKEN_BYTES = "token_bytes.npy"
WORK = ".preparing"  # a folder in the data set while it is being made
FORMAT = "paceline-shards"
FORMAT_VERSION = 2  # 2: the tokenizer's sha256 in each header
SPLITS = ("train", "validation")
_AGAIN = "copy it again, or delete the folder and prepare it anew"


@dataclass(frozen=True)
class ShardRecord:
    """A shard as the index lists it; `starts` is the file of document beginnings."""

    file: str
    tokens: int
    sha256: str
    documents: int
    starts: str
    starts_sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """A split as the index lists it. `text_bytes` is its length as UTF-8; tokens include one per document."""

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
    """What index.json says."""

    name: str
    vocab_size: int
    splits: Mapping[str, SplitRecord]
    tokenizer: TokenizerRecord | None = None
    token_bytes: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    """How it was made, for people; nothing reads it."""


def version_for(vocab_size: int) -> int:
    """1 where all ids fit into uint16, else 2."""
    return 1 if vocab_size <= 1 << 16 else 2


def header(version: int, num_tokens: int, tokenizer_sha256: str = "") -> bytes:
    """The 1024 bytes before the tokens; `tokenizer_sha256` is hex, or empty where nobody knows it."""
    values = np.zeros(256, dtype="<i4")
    values[:3] = MAGIC, version, num_tokens
    values[3:11] = np.frombuffer(bytes.fromhex(tokenizer_sha256).ljust(32, b"\0"), dtype="<i4")
    return values.tobytes()


UNWRITTEN: Mapping[str, Any] = {"shards": [], "in_shard": 0, "num_starts": 0}
"""What `SplitWriter.save` says before anything is written: a writer told this removes what the split has."""


class SplitWriter:
    """Writes the shards of one split as a stream; memory is that of what is handed in.

    `append` any number of times, then `finish` once. `save` says where the writing is, all of it on the disk; a writer
    made later with what it said goes on from there, whatever was written since.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        vocab_size: int,
        tokenizer_sha256: str = "",
        shard_tokens: int = SHARD_TOKENS,
        saved: Mapping[str, Any] = UNWRITTEN,
    ) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.vocab_size, self.tokenizer_sha256 = vocab_size, tokenizer_sha256
        self.version = version_for(vocab_size)
        self._records = [ShardRecord(**record) for record in saved["shards"]]
        self._in_shard: int = saved["in_shard"]  # tokens in the open shard
        self._num_starts: int = saved["num_starts"]  # documents that begin in it
        self._tokens_file: BinaryIO | None = None
        self._starts_file: BinaryIO | None = None
        self._cut_back()

    @property
    def num_tokens(self) -> int:
        """Written so far."""
        return sum(record.tokens for record in self._records) + self._in_shard

    def append(self, ids: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> None:
        """Appends ids (n,), in a new shard where one is full; `starts`: where in ids documents begin, ascending.

        Raises ValueError for an id outside the vocabulary.
        """
        if ids.size and (int(ids.max()) >= self.vocab_size or (ids.dtype.kind == "i" and int(ids.min()) < 0)):
            raise ValueError(f"ids {ids.min()}..{ids.max()} are not all in a vocabulary of {self.vocab_size}")
        done = 0
        while done < ids.size:
            if self._in_shard == self.shard_tokens:
                self._close_shard()
            tokens_file, starts_file = self._open_files()
            part = ids[done : done + self.shard_tokens - self._in_shard]
            within = starts[np.searchsorted(starts, done) : np.searchsorted(starts, done + part.size)]
            tokens_file.write(np.ascontiguousarray(part, dtype=DTYPES[self.version]).data)
            starts_file.write((within - done + self._in_shard).astype("<i8").tobytes())
            self._in_shard += part.size
            self._num_starts += within.size
            done += part.size

    def save(self) -> dict[str, Any]:
        """Returns where the writing is, for `saved`; by then all of it is on the disk."""
        for file in (self._tokens_file, self._starts_file):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        sync(self.folder)
        shards = [asdict(record) for record in self._records]
        return {"shards": shards, "in_shard": self._in_shard, "num_starts": self._num_starts}

    def finish(self, text_bytes: int) -> SplitRecord:
        """Closes the last shard and returns what the index is to say; every file is on the disk by then."""
        if self._tokens_file is not None:
            self._close_shard()
        tokens, documents = sum(r.tokens for r in self._records), sum(r.documents for r in self._records)
        return SplitRecord(tokens, text_bytes, documents, tuple(self._records))

    def abandon(self) -> None:
        """Closes without finishing: the header keeps saying 0 tokens, so a reader refuses the file."""
        for file in (self._tokens_file, self._starts_file):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk refuses what was still buffered
                    file.close()
        self._tokens_file = self._starts_file = None

    def _cut_back(self) -> None:
        """Cuts the files back to what was saved and removes those begun since."""
        kept = {name for record in self._records for name in (record.file, record.starts)}
        if self._in_shard:
            kept |= {self._path.name, self._starts_path.name}
            closed = self._path.with_suffix(".starts.npy")
            if not self._starts_path.exists() and closed.exists():  # the shard was closed after it was saved
                np.load(closed, allow_pickle=False)[: self._num_starts].tofile(self._starts_path)
        for path in self.folder.glob(f"{self.split}-*"):
            if path.name not in kept:
                path.unlink()
        if self._in_shard:
            itemsize = DTYPES[self.version].itemsize
            self._tokens_file = _cut_back(self._path, HEADER_BYTES + self._in_shard * itemsize)
            self._starts_file = _cut_back(self._starts_path, self._num_starts * 8)

    def _open_files(self) -> tuple[BinaryIO, BinaryIO]:
        if self._tokens_file is None or self._starts_file is None:
            self._tokens_file, self._starts_file = self._path.open("wb"), self._starts_path.open("wb")
            self._tokens_file.write(header(self.version, 0, self.tokenizer_sha256))
        return self._tokens_file, self._starts_file

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.split}-{len(self._records):05d}.bin"

    @property
    def _starts_path(self) -> Path:
        """Of the open shard: plain int64, so that it can grow; a .npy file when the shard is closed."""
        return self._path.with_suffix(".starts")

    def _close_shard(self) -> None:
        tokens_file, starts_file = self._open_files()
        tokens_file.seek(0)
        tokens_file.write(header(self.version, self._in_shard, self.tokenizer_sha256))
        tokens_file.close()
        starts_file.close()
        path, starts = self._path, self._path.with_suffix(".starts.npy")
        np.save(starts, np.fromfile(self._starts_path, dtype="<i8"), allow_pickle=False)
        sync(path)
        sync(starts)
        record = ShardRecord(
            path.name, self._in_shard, sha256_of(path), self._num_starts, starts.name, sha256_of(starts)
        )
        self._starts_path.unlink()
        self._records.append(record)
        self._tokens_file = self._starts_file = None
        self._in_shard = self._num_starts = 0


def _cut_back(path: Path, num_bytes: int) -> BinaryIO:
    """Opens a file to go on after its first bytes. Raises UserError where it has become shorter than that."""
    try:
        file = path.open("r+b")
    except OSError as error:
        raise UserError(
            f"{path} can not be gone on with: {error.strerror}; delete the folder and prepare it anew"
        ) from error
    if file.seek(0, os.SEEK_END) < num_bytes:
        file.close()
        raise UserError(f"{path} was cut since it was written; delete the folder and prepare it anew")
    file.truncate(num_bytes)
    file.seek(num_bytes)
    return file


def write_index(folder: Path, index: Index) -> None:
    """Writes index.json, the last file of a data set: whole or not at all."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(index)}
    replace(folder / INDEX, (json.dumps(content, indent=1) + "\n").encode())
    sync(folder)


def read_index(folder: Path) -> Index:
    """Returns what index.json says. Raises UserError where it is missing, damaged, or of another format or version."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can not be read: {error.strerror}; is {folder} a prepared data set?") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {_AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not the index of a paceline data set: its `format` is not {FORMAT!r}")
    if content.get("version") != FORMAT_VERSION:
        raise UserError(
            f"{path} has version {content.get('version')!r}; this paceline reads {FORMAT_VERSION}: prepare it anew"
        )
    try:
        index = _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}; {_AGAIN}") from error
    return index


def _parse(content: dict[str, Any]) -> Index:
    splits = {}
    for name in SPLITS:
        record = content["splits"][name]
        shards = tuple(ShardRecord(**shard) for shard in record["shards"])
        splits[name] = SplitRecord(**{**record, "shards": shards})
        if splits[name].tokens != sum(shard.tokens for shard in shards):
            raise ValueError(f"the shards of {name} do not add up to its {splits[name].tokens} tokens")
    tokenizer = None if content["tokenizer"] is None else TokenizerRecord(**content["tokenizer"])
    _require_types(splits, tokenizer)
    names = [file for split in splits.values() for shard in split.shards for file in (shard.file, shard.starts)]
    names += [] if tokenizer is None else [tokenizer.file]
    names += [] if content["token_bytes"] is None else [content["token_bytes"]]
    for file in names:  # an index from elsewhere does not get to name files outside its folder
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{file!r} is not the name of a file in the folder")
    vocab_size = int(content["vocab_size"])
    return Index(str(content["name"]), vocab_size, splits, tokenizer, content["token_bytes"], content.get("origin", {}))


def _require_types(splits: Mapping[str, SplitRecord], tokenizer: TokenizerRecord | None) -> None:
    """Raises ValueError for a number that is none, and for a checksum that is none."""
    shards = [shard for split in splits.values() for shard in split.shards]
    numbers = [number for shard in shards for number in (shard.tokens, shard.documents)]
    numbers += [number for split in splits.values() for number in (split.tokens, split.text_bytes, split.documents)]
    checksums = [checksum for shard in shards for checksum in (shard.sha256, shard.starts_sha256)]
    if tokenizer is not None:
        numbers += [tokenizer.vocab_size, tokenizer.end_of_text]
        checksums.append(tokenizer.sha256)
    for number in numbers:
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{number!r} is not a number from 0 on")
    for checksum in checksums:
        if not isinstance(checksum, str) or not re.fullmatch("[0-9a-f]{64}", checksum):
            raise ValueError(f"{checksum!r} is not a sha256")
