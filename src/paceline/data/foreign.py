"""Token files of other programs: nanoGPT's folders, and llm.c's and modded-nanogpt's shards.

    nanoGPT     train.bin, val.bin: uint16 tokens (uint32 for a vocabulary above 65,536) and nothing else; meta.pkl
                beside them for data sets of characters
    llm.c       NAME_train_*.bin, NAME_val_*.bin (also train_*.bin, val_*.bin): shards with the 256-int32 header

They have no checksums, no document beginnings, no tokenizer except in meta.pkl, and usually no vocabulary.
"""

import hashlib
import io
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from paceline.base.errors import UserError
from paceline.data.config import MAX_VOCAB
from paceline.data.shard import MAGIC, reading
from paceline.data.stream import LLAMA3_MAGIC, Shard, TokenStream
from paceline.data.tokenizer import Tokenizer, character_tokenizer

META = "meta.pkl"
_PATTERNS = {
    "train": ("*_train_*.bin", "*_train.bin", "train.bin", "train[-_0-9]*.bin"),
    "validation": ("*_val_*.bin", "*_val.bin", "val.bin", "val[-_0-9]*.bin", "validation*.bin"),
}
_SAMPLE_BYTES = 64 << 10  # hashed at beginning, middle and end of a shard


Files = dict[str, tuple[Path, ...]]  # the token files of a folder by split, sorted by name


def find_foreign(folder: Path) -> Files | None:
    """Returns the token files in a folder, of at least one split; None if no file has such a name. Raises UserError for
    a folder that may not be entered or listed."""
    names: list[str] = []
    with reading(folder), suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".bin")
    found = {
        split: tuple(folder / name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
        for split, patterns in _PATTERNS.items()
    }
    return found if any(found.values()) else None


def open_shards(
    folder: Path, files: Files, given_vocab_size: int
) -> tuple[dict[str, tuple[Shard, ...]], int, Tokenizer | None]:
    """Returns each split's shards, and what `vocabulary` returns. Raises UserError if a file is no shard, or a split is
    missing."""
    if any(folder.glob("*.starts*")):  # our unfinished data set: index.json is written last
        raise UserError(unfinished(folder))
    for split, paths in files.items():
        if not paths:
            raise UserError(
                f"{folder} has token files but none for {split}: nothing there is named {' or '.join(_PATTERNS[split])}"
            )
    vocab_size, tokenizer = vocabulary(folder, given_vocab_size)
    shards = {split: tuple(_open(path, vocab_size) for path in paths) for split, paths in files.items()}
    return shards, vocab_size, tokenizer


def unfinished(folder: Path) -> str:
    """Returns the message for our data set without an index."""
    return f"{folder} was not prepared to the end: run its `paceline data prepare` again"


def _open(path: Path, vocab_size: int) -> Shard:
    """llm.c uses nanoGPT's file names, too: the magic number decides."""
    if path.name not in ("train.bin", "val.bin"):
        return Shard.open(path)
    with reading(path), path.open("rb") as file:
        first = int.from_bytes(file.read(4), "little")
    return Shard.open(path) if first in (MAGIC, LLAMA3_MAGIC) else Shard.without_header(path, vocab_size)


@dataclass(frozen=True)
class Meta:
    """The content of nanoGPT's meta.pkl. `itos` is the character of each id, None if the file has only a size."""

    vocab_size: int
    itos: Mapping[int, str] | None


_META_BYTES = 4 << 20  # all 150,000 Unicode characters need 3.4 MB
_META_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG1"),
}
"""The pickle instructions that make dicts, text and integers; none can call anything."""


class _NothingIsCalled(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_meta(path: Path | str) -> Meta:
    """Returns the content of nanoGPT's meta.pkl without executing anything. Raises UserError, naming the file, for
    anything but dicts, text and integers, or missing entries."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_META_BYTES + 1)
        if len(content) > _META_BYTES:
            raise ValueError(f"it is larger than {_META_BYTES} bytes")
        return _meta(_unpickle(content))
    except Exception as error:  # a damaged pickle can raise anything
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{path} can not be read as nanoGPT's vocabulary, and nothing in it was executed: {reason}; "
            f"without it, give --model.vocab-size"
        ) from error


def _unpickle(content: bytes) -> Any:
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in _META_OPCODES:
            raise ValueError(f"it has more than dicts, text and integers ({opcode.name})")
        if "PUT" in opcode.name and int(argument or 0) > number:  # would allocate any amount of memory
            raise ValueError("it is damaged")
    return _NothingIsCalled(io.BytesIO(content)).load()


def _meta(found: Any) -> Meta:
    size = found.get("vocab_size") if isinstance(found, dict) else None
    if type(size) is not int or not 1 <= size <= MAX_VOCAB:
        raise ValueError(f"its vocab_size is {size!r}")
    itos = found.get("itos")
    if itos is None:
        return Meta(size, None)
    good = isinstance(itos, dict) and all(type(i) is int and 0 <= i < size for i in itos)
    if not good or not all(type(character) is str for character in itos.values()):
        raise ValueError(f"its itos does not map ids below {size} to text")
    return Meta(size, itos)


def vocabulary(folder: Path, given: int) -> tuple[int, Tokenizer | None]:
    """Returns the vocabulary size, and the tokenizer if meta.pkl has one. given: --model.vocab-size (0: none), used
    without a meta.pkl. Raises UserError if both are missing."""
    path = folder / META
    if not path.exists():
        if not given:
            raise UserError(
                f"{folder} does not say how many ids its vocabulary has: give --model.vocab-size 50257 (GPT-2's) or "
                f"that of the tokenizer that made it (`data info` and `bench loader`: --vocab-size)"
            )
        return given, None
    meta = read_meta(path)
    if meta.itos is None:
        return meta.vocab_size, None
    try:
        return meta.vocab_size, character_tokenizer(meta.itos)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def fingerprint(streams: Sequence[TokenStream], vocab_size: int) -> str:
    """Returns sha256 hex over each shard's name, size, and 64 KiB of its beginning, middle and end. Equal on hosts with
    equal files, and fast; changes elsewhere in a shard do not show."""
    total = hashlib.sha256(f"vocab {vocab_size}\n".encode())
    for stream in streams:
        for shard in stream.shards:
            said = f"{stream.split} {shard.path.name} {shard.num_tokens} {shard.first_byte} {shard.dtype}\n"
            total.update(said.encode())
            count = min(shard.num_tokens, _SAMPLE_BYTES // shard.dtype.itemsize)
            for start in (0, (shard.num_tokens - count) // 2, shard.num_tokens - count):
                sample = np.empty(count, dtype=shard.dtype)
                shard.fill(sample, start)
                total.update(sample.tobytes())
    return total.hexdigest()
