"""Token files of other programs, read as they are.

    nanoGPT     train.bin, val.bin: uint16 tokens (uint32 for a vocabulary above 65,536) and nothing else; meta.pkl
                beside them for datasets of characters
    llm.c       NAME_train_*.bin, NAME_val_*.bin (also train_*.bin, val_*.bin): shards with the 256-int32 header
                (modded-nanogpt's are the same)
    Megatron    NAME.bin beside NAME.idx: tokens, and their type, sequences and documents
    datatrove   NAME.ds beside NAME.ds.index: tokens, and where documents end

They have no checksums, no tokenizer except in meta.pkl, and usually no vocabulary. The first two do not say where
documents begin (--data.document-token-id does); the last two have no splits: files with `val` or `valid` in their name
are for validation, else the last hundredth of each file's documents.
"""

import io
import pickle
import re
import struct
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.base.errors import UserError
from paceline.data.config import MAX_VOCAB
from paceline.data.shard import MAGIC, SPLITS, is_complete, reading
from paceline.data.stream import LLAMA3_MAGIC, Int64s, Shard
from paceline.data.tokenizer import Tokenizer, character_tokenizer

META = "meta.pkl"
_PATTERNS = {
    "train": ("*_train_*.bin", "*_train.bin", "train.bin", "train[-_0-9]*.bin"),
    "validation": ("*_val_*.bin", "*_val.bin", "val.bin", "val[-_0-9]*.bin", "validation*.bin"),
}
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_DTYPES: dict[int, np.dtype[Any]] = {
    4: np.dtype("<u4"),
    8: np.dtype("<u2"),
}  # int32, of ids that are not negative, and uint16
_IS_VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation)(?![a-z])")
_VALIDATION_DOCUMENTS = 100  # one in so many, at least one, if no file is for validation


Files = dict[str, tuple[Path, ...]]  # the token files of a folder by split, sorted by name


class Opened(NamedTuple):
    """The shards of each split, the vocabulary, and if they are known the tokenizer and where documents begin."""

    shards: dict[str, tuple[Shard, ...]]
    vocab_size: int
    tokenizer: Tokenizer | None
    starts: dict[str, Int64s] | None


def find_foreign(folder: Path) -> Files | None:
    """Returns the token files in a folder, of at least one split; None if no file has such a name. Raises UserError for
    a folder that may not be entered or listed."""
    names: list[str] = []
    with reading(folder), suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".ds", ".idx", ".index"))
    listed = set(names)  # a list would take a second for 10,000 files
    indexed = [name for name in names if _index_of(Path(name)) in listed]
    if indexed:
        validation = tuple(folder / name for name in indexed if _IS_VALIDATION.search(name.lower()))
        train = tuple(folder / name for name in indexed if not _IS_VALIDATION.search(name.lower()))
        return {"train": train, "validation": validation}
    names = [name for name in names if name.endswith(".bin")]
    shards = {
        split: tuple(folder / name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
        for split, patterns in _PATTERNS.items()
    }
    return shards if any(shards.values()) else None


def _index_of(path: Path) -> str | None:
    """Returns the name that a token file's index has, if it is Megatron's or datatrove's; None for other suffixes."""
    if path.suffix == ".ds":
        return f"{path.name}.index"
    return path.with_suffix(".idx").name if path.suffix == ".bin" else None


def open_shards(folder: Path, files: Files, given_vocab_size: int) -> Opened:
    """Opens the files that `find_foreign` found. Raises UserError if a file is no shard, or a split is missing."""
    if any(folder.glob("*.starts*")):  # our unfinished dataset: index.json is written last
        raise UserError(unfinished(folder))
    first = next(path for paths in files.values() for path in paths)
    index = _index_of(first)
    if index is not None and (folder / index).exists():
        indexed, starts = _open_indexed(folder, files)
        return Opened(indexed, *vocabulary(folder, given_vocab_size), starts)
    for split, paths in files.items():
        if not paths:
            raise UserError(
                f"{folder} has token files but none for {split}: nothing there is named {' or '.join(_PATTERNS[split])}"
            )
    vocab_size, tokenizer = vocabulary(folder, given_vocab_size)
    shards = {split: tuple(_open(path, vocab_size) for path in paths) for split, paths in files.items()}
    return Opened(shards, vocab_size, tokenizer, None)


def _open_indexed(folder: Path, files: Files) -> tuple[dict[str, tuple[Shard, ...]], dict[str, Int64s]]:
    """Returns the shards and the documents' beginnings of each split. Raises UserError for files that do not fit."""
    if not files["train"]:
        raise UserError(f"{folder} has token files for validation only: {files['validation'][0].name} and such")
    shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    starts: dict[str, list[Int64s]] = {split: [np.empty(0, np.int64)] for split in SPLITS}
    num_tokens = dict.fromkeys(SPLITS, 0)
    for split in SPLITS:
        for path in files[split]:
            dtype, ends = _megatron(path) if path.suffix == ".bin" else _datatrove(path)
            if not ends.size:
                continue  # an empty partition of few documents
            begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
            held = 0 if files["validation"] else max(1, begins.size // _VALIDATION_DOCUMENTS)
            if held == begins.size:
                raise UserError(f"{path} has one document, and two splits need one each: add a file named NAME_val")
            border = int(begins[begins.size - held]) if held else int(ends[-1])
            for name, first, last in ((split, 0, border), ("validation", border, int(ends[-1]))):
                if first < last:
                    shards[name].append(Shard(path, dtype, last - first, first * dtype.itemsize))
                    within = begins[(begins >= first) & (begins < last)]
                    starts[name].append(within - first + num_tokens[name])
                    num_tokens[name] += last - first
    return {name: tuple(of) for name, of in shards.items()}, {name: np.concatenate(of) for name, of in starts.items()}


def _megatron(path: Path) -> tuple[np.dtype[Any], Int64s]:
    """Returns the ids' type, and where each document ends, from the .idx beside a .bin."""
    index = path.with_suffix(".idx")
    with reading(index):
        content = index.read_bytes()
    try:
        magic, version, code, num_sequences, num_documents = struct.unpack_from("<9sQBQQ", content)
        if magic != _MEGATRON or version != 1:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        if code not in _MEGATRON_DTYPES:
            raise ValueError(f"its tokens have type {code}; known are 4 (int32) and 8 (uint16)")
        lengths = np.frombuffer(content, "<i4", num_sequences, offset=34)
        documents = np.frombuffer(content, "<i8", num_documents, offset=34 + 12 * num_sequences)
        if (lengths < 0).any() or documents[0] != 0 or documents[-1] != num_sequences or (np.diff(documents) < 0).any():
            raise ValueError("its documents are not ascending")
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise UserError(f"{index} can not be read as Megatron's index: {error}; copy it again") from error
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[documents[1:]]
    dtype = _MEGATRON_DTYPES[code]
    with reading(path):
        num_bytes = path.stat().st_size
    return dtype, _fitting(path, index, ends, num_bytes // dtype.itemsize)


def _datatrove(path: Path) -> tuple[np.dtype[Any], Int64s]:
    """Returns the ids' type, and where each document ends, from the index beside a .ds. The type is not written: the
    file's size tells it."""
    index = path.with_name(f"{path.name}.index")
    with reading(index):
        content = index.read_bytes()
        num_bytes = path.stat().st_size
    ends = np.frombuffer(content[: len(content) // 8 * 8], "<u8").astype(np.int64)
    is_wide = bool(ends.size) and num_bytes == 4 * int(ends[-1])
    dtype = np.dtype("<u4" if is_wide else "<u2")
    return dtype, _fitting(path, index, ends, num_bytes // dtype.itemsize)


def _fitting(path: Path, index: Path, ends: Int64s, num_tokens: int) -> Int64s:
    """Returns the ends of the documents that are not empty. Raises UserError if they are not those of the file."""
    last = int(ends[-1]) if ends.size else 0
    if last != num_tokens or (np.diff(ends) < 0).any():
        raise UserError(f"{path} has {num_tokens} tokens, and {index.name} ends at {last}: copy both again")
    return np.unique(ends[ends > 0])


def unfinished(folder: Path) -> str:
    """Returns the message for our dataset without an index."""
    return f"{folder} was not prepared to the end: run its `paceline data prepare` again"


def _open(path: Path, vocab_size: int) -> Shard:
    """llm.c uses nanoGPT's file names, too: the magic number decides."""
    if path.name not in ("train.bin", "val.bin"):
        return Shard.open(path)
    with reading(path), path.open("rb") as file:
        first = int.from_bytes(file.read(4), "little")
    return Shard.open(path) if first in (MAGIC, LLAMA3_MAGIC) else Shard.without_header(path, vocab_size)


_META_BYTES = 4 << 20  # all 150,000 Unicode characters need 3.4 MB


class _NothingIsCalled(pickle._Unpickler):  # the one in C allocates as much memory as a number in the file says
    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_meta(path: Path | str) -> tuple[int, dict[int, str] | None]:
    """Returns the vocabulary size of nanoGPT's meta.pkl, and the character of each id, None if the file has only a
    size. Executes nothing. Raises UserError, naming the file, for a class or function in it, or missing entries."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_META_BYTES + 1)
        if len(content) > _META_BYTES:
            raise ValueError(f"it is larger than {_META_BYTES} bytes")
        meta = _NothingIsCalled(io.BytesIO(content)).load()
        size = meta.get("vocab_size") if isinstance(meta, dict) else None
        if type(size) is not int or not 1 <= size <= MAX_VOCAB:
            raise ValueError(f"its vocab_size is not a number from 1 to {MAX_VOCAB}")
        itos = meta.get("itos")
        if itos is not None and not _is_vocabulary(itos, size):
            raise ValueError(f"its itos does not map ids below {size} to text")
        return size, itos
    except Exception as error:  # a damaged pickle can raise anything
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{path} can not be read as nanoGPT's vocabulary, and nothing in it was executed: {reason}; "
            f"without it, give --model.vocab-size"
        ) from error


def _is_vocabulary(itos: Any, size: int) -> bool:
    if not isinstance(itos, dict):
        return False
    return all(type(i) is int and 0 <= i < size and type(character) is str for i, character in itos.items())


def tells_vocabulary(folder: Path) -> bool:
    """Whether a dataset has the size of its vocabulary in a file."""
    return is_complete(folder) or (folder / META).exists()


def vocabulary(folder: Path, vocab_size: int) -> tuple[int, Tokenizer | None]:
    """Returns the vocabulary size, and the tokenizer if meta.pkl has one. vocab_size: --model.vocab-size (0: none),
    used without a meta.pkl. Raises UserError if both are missing."""
    path = folder / META
    if not path.exists():
        if not vocab_size:
            raise UserError(
                f"{folder} does not say how many ids its vocabulary has: give --model.vocab-size 50257 (GPT-2's) or "
                f"that of the tokenizer that made it (`data info`: --vocab-size)"
            )
        return vocab_size, None
    size, itos = read_meta(path)
    try:
        return size, None if itos is None else character_tokenizer(itos)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
