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
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import replace, sync
from paceline.data.config import SHARD_TOKENS

MAGIC = 20240520
HEADER_BYTES = 256 * 4
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version

INDEX = "index.json"
TOKEN_BYTES = "token_bytes.npy"
WORK = ".preparing"  # a folder inside an unfinished dataset
FORMAT = "paceline-shards"
FORMAT_VERSION = 2  # 2: each header has the tokenizer's sha256
SPLITS = ("train", "validation")
_COPIED_TOKENS = 4 << 20  # at once
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


@dataclass(frozen=True)
class Written:
    """A file of ids as in a shard, without its header, and behind them where documents begin, (documents,) int64."""

    path: Path
    tokens: int
    documents: int

    def ids(self, first: int, last: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Returns the ids first..last-1. Raises UserError if the file ends before."""
        return self._read(dtype, last - first, first * dtype.itemsize)

    def starts(self, dtype: np.dtype[Any]) -> npt.NDArray[np.int64]:
        """Returns where documents begin. Raises UserError if the file ends before."""
        return self._read(np.dtype("<i8"), self.documents, self.tokens * dtype.itemsize)

    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> npt.NDArray[Any]:
        values = np.fromfile(self.path, dtype, count, offset=offset)
        if values.size < count:  # fromfile does not say so
            raise UserError(f"{self.path} is shorter than its record says; --restart begins anew")
        return values


@dataclass(frozen=True)
class Shards:
    """The shards of one split: all tokens of `parts` in order, `shard_tokens` in each but the last."""

    split: str
    parts: tuple[Written, ...]
    vocab_size: int
    tokenizer_sha256: str = ""
    shard_tokens: int = SHARD_TOKENS

    @property
    def num_tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def __len__(self) -> int:
        return -(-self.num_tokens // self.shard_tokens)

    def write_all(self, folder: Path, work: Path, num_threads: int) -> tuple[ShardRecord, ...]:
        """Writes all shards, and removes others of the split. Reading, writing and hashing take no lock of the
        interpreter."""
        with ThreadPoolExecutor(num_threads) as pool:
            records = tuple(pool.map(lambda number: self.write(number, folder, work), range(len(self))))
        kept = {name for record in records for name in (record.file, record.starts)}
        for path in folder.glob(f"{self.split}-[0-9]*"):
            if path.name not in kept:
                path.unlink()  # of an attempt with other sources
        return records

    def write(self, number: int, folder: Path, work: Path) -> ShardRecord:
        """Writes one shard and its list of documents, complete or not at all; work: for files that are not complete."""
        version = version_for(self.vocab_size)
        first = number * self.shard_tokens
        last = min(first + self.shard_tokens, self.num_tokens)
        name = f"{self.split}-{number:05d}.bin"
        begins: list[npt.NDArray[np.int64]] = []
        digest = hashlib.sha256()
        with (work / name).open("wb") as file:
            head = np.frombuffer(header(version, last - first, self.tokenizer_sha256), dtype=np.uint8)
            for data in itertools.chain([head], self._data(first, last, begins)):
                file.write(data.data)
                digest.update(data.data)
            file.flush()
            os.fsync(file.fileno())
        starts = np.concatenate([np.empty(0, "<i8"), *begins]).astype("<i8")
        listed = io.BytesIO()
        np.save(listed, starts, allow_pickle=False)
        starts_name = Path(name).with_suffix(".starts.npy").name
        replace(folder / starts_name, listed.getvalue())
        os.replace(work / name, folder / name)
        sync(folder)
        starts_sha256 = hashlib.sha256(listed.getvalue()).hexdigest()
        return ShardRecord(name, last - first, digest.hexdigest(), starts.size, starts_name, starts_sha256)

    def _data(self, first: int, last: int, begins: list[npt.NDArray[np.int64]]) -> Iterator[npt.NDArray[Any]]:
        """Yields the bytes of the tokens first..last-1, and adds to `begins` where documents begin among them."""
        dtype = DTYPES[version_for(self.vocab_size)]
        before = 0
        for part in self.parts:
            start, stop = max(first, before), min(last, before + part.tokens)
            if start < stop:
                places = part.starts(dtype) + before
                begins.append(places[(places >= start) & (places < stop)] - first)
                for at in range(start, stop, _COPIED_TOKENS):
                    yield part.ids(at - before, min(at + _COPIED_TOKENS, stop) - before, dtype)
            before += part.tokens


def write_index(folder: Path, index: Index) -> None:
    """Writes index.json, the last file of a dataset, atomically."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(index)}
    replace(folder / INDEX, (json.dumps(content, indent=1) + "\n").encode())
    sync(folder)


def read_index(folder: Path) -> Index:
    """Returns index.json's content. Raises UserError if it is missing, damaged, or of another format or version."""
    path = folder / INDEX
    try:
        with reading(path, f"; is {folder} a prepared dataset?"):
            content = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not the index of a paceline dataset: its `format` is not {FORMAT!r}")
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
    origin = content.get("origin", {})
    if not isinstance(origin, dict) or not isinstance(origin.get("recipe") or {}, dict):
        raise ValueError("`origin` does not say how it was made")
    return Index(str(content["name"]), int(content["vocab_size"]), splits, tokenizer, token_bytes, origin)


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
    if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
        raise ValueError(f"{file!r} is not the name of a file in the folder")
