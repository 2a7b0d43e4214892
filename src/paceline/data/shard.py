"""Token shards as llm.c and modded-nanogpt have them, and the index that says what a folder of them holds.

    FOLDER/
      index.json               format, version, name, vocabulary, tokenizer; per split shards, tokens, bytes, documents
      tokenizer.json           (optional in foreign data)
      token_bytes.npy          (vocab,) uint16, bytes of text each id stands for; 0 for special tokens (optional)
      train-00000.bin ...      256 int32, little-endian: [0] 20240520, [1] version, [2] tokens; then the tokens, as
      validation-00000.bin     uint16 (version 1) or uint32 (version 2)
      train-00000.starts.npy   (documents,) int64, where in its shard each document begins

Each document begins with the end-of-text token (llm.c's convention) and may run on into the next shard.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError
from paceline.base.files import sha256_of, sync

MAGIC = 20240520
HEADER_BYTES = 256 * 4
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # by version
SHARD_TOKENS = 100_000_000  # 200 MB of uint16: llm.c's choice for FineWeb
MAX_SHARD_TOKENS = (1 << 31) - 1  # the header counts in an int32

INDEX = "index.json"
FORMAT = "paceline-shards"
FORMAT_VERSION = 1
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


def header(version: int, num_tokens: int) -> bytes:
    """The 1024 bytes before the tokens."""
    values = np.zeros(256, dtype="<i4")
    values[:3] = MAGIC, version, num_tokens
    return values.tobytes()


class SplitWriter:
    """Writes the shards of one split as a stream; memory is that of what is handed in.

    Call `start_document()` and then `write(ids)` any number of times for each document, and `finish()` once.
    """

    def __init__(
        self, folder: Path, split: str, *, vocab_size: int, end_of_text: int, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
            raise UserError(
                f"a shard of {shard_tokens} tokens is not possible; the format allows 1 to {MAX_SHARD_TOKENS}"
            )
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.vocab_size, self.end_of_text = vocab_size, end_of_text
        self.version = version_for(vocab_size)
        self._records: list[ShardRecord] = []
        self._starts: list[int] = []
        self._file: BinaryIO | None = None
        self._in_shard = 0

    def start_document(self) -> None:
        """Begins a document with its end-of-text token."""
        if self._in_shard == self.shard_tokens:
            self._close_shard()
        self._starts.append(self._in_shard)
        self.write([self.end_of_text])

    def write(self, ids: npt.ArrayLike) -> None:
        """Appends ids (n,), in a new shard where one is full. Raises ValueError for an id outside the vocabulary."""
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise ValueError(f"ids {tokens.min()}..{tokens.max()} are not all in a vocabulary of {self.vocab_size}")
        done = 0
        while done < tokens.size:
            if self._in_shard == self.shard_tokens:
                self._close_shard()
            if self._file is None:
                self._file = self._path.open("wb")
                self._file.write(header(self.version, 0))
            part = tokens[done : done + self.shard_tokens - self._in_shard]
            self._file.write(part.astype(DTYPES[self.version]).tobytes())
            self._in_shard += part.size
            done += part.size

    def finish(self, text_bytes: int) -> SplitRecord:
        """Closes the last shard and returns what the index is to say; every file is on the disk by then."""
        if self._file is not None:
            self._close_shard()
        tokens, documents = sum(r.tokens for r in self._records), sum(r.documents for r in self._records)
        return SplitRecord(tokens, text_bytes, documents, tuple(self._records))

    def abandon(self) -> None:
        """Closes without finishing: the header keeps saying 0 tokens, so a reader refuses the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.split}-{len(self._records):05d}.bin"

    def _close_shard(self) -> None:
        assert self._file is not None
        path, starts = self._path, self._path.with_suffix(".starts.npy")
        self._file.seek(0)
        self._file.write(header(self.version, self._in_shard))
        self._file.close()
        np.save(starts, np.array(self._starts, dtype=np.int64), allow_pickle=False)
        sync(path)
        sync(starts)
        record = ShardRecord(
            path.name, self._in_shard, sha256_of(path), len(self._starts), starts.name, sha256_of(starts)
        )
        self._records.append(record)
        self._file, self._starts, self._in_shard = None, [], 0


@dataclass(frozen=True)
class Shard:
    """A shard that was checked at open. Costs nothing to hold: the tokens stay on the disk until they are read."""

    path: Path
    version: int
    num_tokens: int

    @classmethod
    def open(cls, path: Path) -> "Shard":
        """Raises UserError, naming file and numbers, where magic, version or length are not those of a shard."""
        try:
            with path.open("rb") as file:
                head = np.frombuffer(file.read(HEADER_BYTES), dtype=np.uint8)
            num_bytes = path.stat().st_size
        except OSError as error:
            raise UserError(f"shard {path} can not be read: {error.strerror}; {_AGAIN}") from error
        if head.size < HEADER_BYTES:
            raise UserError(
                f"shard {path} is truncated: {num_bytes} bytes, the header alone has {HEADER_BYTES}; {_AGAIN}"
            )
        magic, version, num_tokens = (int(value) for value in head.view("<i4")[:3])
        if magic != MAGIC:
            raise UserError(
                f"{path} is not a token shard: it begins with {magic}, not with {MAGIC} (llm.c's GPT-2 format)"
            )
        if version not in DTYPES:
            raise UserError(f"shard {path} has version {version}; known are 1 (uint16 tokens) and 2 (uint32 tokens)")
        expected = HEADER_BYTES + num_tokens * DTYPES[version].itemsize
        if num_bytes != expected:
            what = "truncated" if num_bytes < expected else "not what its header says"
            raise UserError(
                f"shard {path} is {what}: {num_tokens} tokens make {expected} bytes, it has {num_bytes}; {_AGAIN}"
            )
        return cls(path, version, num_tokens)

    @cached_property
    def tokens(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """(num_tokens,) uint16 or uint32, mapped into memory at first use."""
        if self.num_tokens == 0:
            return np.empty(0, dtype=DTYPES[self.version])  # nothing can be mapped
        try:
            return np.memmap(self.path, DTYPES[self.version], "r", offset=HEADER_BYTES, shape=(self.num_tokens,))
        except OSError as error:
            raise UserError(f"shard {self.path} can not be read: {error.strerror}; {_AGAIN}") from error


def write_index(folder: Path, index: Index) -> None:
    """Writes index.json, the last file of a data set, and syncs it."""
    content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(index)}
    path = folder / INDEX
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sync(path)


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
    names = [file for split in splits.values() for shard in split.shards for file in (shard.file, shard.starts)]
    names += [] if tokenizer is None else [tokenizer.file]
    names += [] if content["token_bytes"] is None else [content["token_bytes"]]
    for file in names:
        if Path(file).name != file:  # an index from elsewhere does not get to name files outside its folder
            raise ValueError(f"{file!r} is not the name of a file in the folder")
    vocab_size = int(content["vocab_size"])
    return Index(str(content["name"]), vocab_size, splits, tokenizer, content["token_bytes"], content.get("origin", {}))
