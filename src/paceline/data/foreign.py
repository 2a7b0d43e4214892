"""Token files that others prepared, read where they lie: nanoGPT's folders, and llm.c's and modded-nanogpt's shards.

    nanoGPT     train.bin, val.bin: uint16 tokens and nothing else; meta.pkl beside them for data sets of characters
    llm.c       NAME_train_*.bin, NAME_val_*.bin (also train*.bin, val*.bin): shards with the 256-int32 header

They say less than an index does: no checksums, no documents, no tokenizer but for meta.pkl's, mostly no vocabulary.
"""

import hashlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from paceline.base.errors import UserError
from paceline.data.shard import MAGIC
from paceline.data.stream import LLAMA3_MAGIC, Shard
from paceline.data.tokenizer import Meta, Tokenizer, character_tokenizer, read_meta

META = "meta.pkl"
_PATTERNS = {
    "train": ("*_train_*.bin", "*_train.bin", "train*.bin"),
    "validation": ("*_val_*.bin", "*_val.bin", "val*.bin"),
}
_SAMPLE_BYTES = 64 << 10  # hashed at the beginning, the middle and the end of a shard


@dataclass(frozen=True)
class ForeignFiles:
    """The token files of a folder, sorted by name."""

    folder: Path
    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def find_foreign(folder: Path) -> ForeignFiles | None:
    """Returns the token files in a folder, of one split at least; None where there are none by their names."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".bin")
    except OSError:
        return None
    found = {
        split: tuple(folder / name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
        for split, patterns in _PATTERNS.items()
    }
    if not any(found.values()):
        return None
    return ForeignFiles(folder, found["train"], found["validation"])


def open_shards(files: ForeignFiles) -> dict[str, tuple[Shard, ...]]:
    """Returns each split's shards. Raises UserError for a file that is none, and where a split is missing."""
    if any(files.folder.glob("*.starts*")):  # beside the shards that are made here, and index.json comes last
        raise UserError(unfinished(files.folder))
    for split, paths in (("train", files.train), ("validation", files.validation)):
        if not paths:
            raise UserError(
                f"{files.folder} has token files but none for {split}: nothing there is named "
                f"{' or '.join(_PATTERNS[split])}"
            )
    return {
        "train": tuple(_open(path) for path in files.train),
        "validation": tuple(_open(path) for path in files.validation),
    }


def unfinished(folder: Path) -> str:
    """What to say of a data set of ours that has no index yet."""
    return f"{folder} was not prepared to the end: run its `paceline data prepare` again"


def _open(path: Path) -> Shard:
    """nanoGPT's names are taken by llm.c's format as well: the magic decides."""
    if path.name not in ("train.bin", "val.bin"):
        return Shard.open(path)
    try:
        with path.open("rb") as file:
            first = int.from_bytes(file.read(4), "little")
    except OSError as error:
        raise UserError(f"{path} can not be read: {error.strerror}") from error
    return Shard.open(path) if first in (MAGIC, LLAMA3_MAGIC) else Shard.without_header(path)


@dataclass(frozen=True)
class ForeignVocabulary:
    """How many ids there are, and what they stand for where the data tells."""

    size: int
    tokenizer: Tokenizer | None


def vocabulary(folder: Path, given: int) -> ForeignVocabulary:
    """Returns what meta.pkl says, else the size that was given (--model.vocab-size; 0: none).

    Raises UserError where neither is there, and where the given one is smaller than the data's.
    """
    path = folder / META
    if not path.exists():
        if not given:
            raise UserError(
                f"{folder} does not say how many ids its vocabulary has: give --model.vocab-size 50257 (GPT-2's) or "
                f"that of the tokenizer that made it (`data info` and `bench loader`: --vocab-size)"
            )
        return ForeignVocabulary(given, None)
    meta = read_meta(path)
    return ForeignVocabulary(meta.vocab_size, _tokenizer(meta, path))


def _tokenizer(meta: Meta, path: Path) -> Tokenizer | None:
    if meta.itos is None:
        return None
    try:
        return character_tokenizer(meta.itos)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def fingerprint(shards: dict[str, tuple[Shard, ...]], vocab_size: int) -> str:
    """sha256 hex over each shard's name, size, and 64 KiB of its beginning, middle and end: equal on two hosts that
    hold equal files, and cheap. What it does not see is a change in between; there are no checksums to see it with."""
    total = hashlib.sha256(f"vocab {vocab_size}\n".encode())
    for split, of_split in shards.items():
        for shard in of_split:
            total.update(f"{split} {shard.path.name} {shard.num_tokens} {shard.first_byte} {shard.dtype}\n".encode())
            count = min(shard.num_tokens, _SAMPLE_BYTES // shard.dtype.itemsize)
            for start in (0, (shard.num_tokens - count) // 2, shard.num_tokens - count):
                sample = np.empty(count, dtype=shard.dtype)
                shard.fill(sample, start)
                total.update(sample.tobytes())
    return total.hexdigest()
