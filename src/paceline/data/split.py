"""Assigns documents to splits.

By file: given by --validation, or chosen from plain text files or their ends. Else by a hash of the document's
beginning: equal documents are in one split, and new documents do not move others.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.base.errors import UserError
from paceline.data.config import Recipe
from paceline.data.documents import read, whole
from paceline.data.find import find
from paceline.data.sources import SourceFile, Sources, open_stored

VALIDATION_PARTS = 20  # one plain text file in 20 is for validation
TAIL_FRAC = 0.1  # of each file's end, if files are too few or too unequal
_HASHED_CHARACTERS = 1024  # of a document's beginning


def gather(specs: Sequence[str], validation: Sequence[str], recipe: Recipe) -> Sources:
    """Returns the sources' files, each with its split if that does not depend on the documents' text. validation:
    sources of that split. Raises UserError for files that cannot be found or read."""
    skips = recipe.on_error == "skip"
    sources = find(specs, format=recipe.format, skips_unreadable=skips)
    if not validation:
        if recipe.validation_frac == 0:
            raise UserError(
                "--validation-frac is 0, and a run is evaluated on a validation split: give a part above 0, such as "
                "0.01, or --validation SRC"
            )
        if not recipe.separator:
            sources = replace(sources, files=split_text(sources.files))
        (first, *others) = sources.files
        if not others and first.split is None and first.format == "text" and not recipe.separator:
            raise UserError(
                f"{first.where} is one document, and the two splits need one each: say what stands between documents "
                f"(--separator), give --validation SRC, or name an uncompressed file, which is cut"
            )
        return sources
    held = find(validation, format=recipe.format, skips_unreadable=skips)
    both = {file.real_path for file in sources.files} & {file.real_path for file in held.files}
    if both:
        raise UserError(f"{min(both)} is among the sources and under --validation; it can be in one split only")
    files = [replace(file, split="train") for file in sources.files]
    files += [replace(file, split="validation") for file in held.files]
    return Sources(sources.name, tuple(files), sources.left_out + held.left_out)


def split_text(files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """Assigns plain text files, each one document, to the splits; a pure function of the files.

    One in 20, by a hash of its name, is for validation if these are 1% to 20% of the bytes: new files do not move
    others. Else (few or very unequal files) the last tenth of each, from a line's beginning, is a validation document.
    Compressed text, records and standard input are returned unchanged.
    """
    plain = [file for file in files if _can_be_cut(file)]
    total = sum(file.num_bytes for file in plain)
    part = sum(file.num_bytes for file in plain if _is_chosen(file.name))
    if 0.01 * total <= part <= 0.2 * total:
        splits = {True: "validation", False: "train"}
        return tuple(replace(f, split=splits[_is_chosen(f.name)]) if _can_be_cut(f) else f for f in files)
    return tuple(part for file in files for part in (_head_and_tail(file) if _can_be_cut(file) else (file,)))


def _can_be_cut(file: SourceFile) -> bool:
    return file.format == "text" and file.is_seekable


def _is_chosen(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "little") % VALIDATION_PARTS == 0


def _head_and_tail(file: SourceFile) -> tuple[SourceFile, ...]:
    size = file.num_bytes
    cut = int(size * (1 - TAIL_FRAC))
    with open_stored(file) as stored:
        stored.seek(cut)
        after = stored.read(1 << 16)
    line = after.find(b"\n") + 1
    if line and cut + line < size:
        cut += line
    else:  # no line begins near: a character does (10xxxxxx continues one)
        cut += next((i for i, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)
    head = replace(file, num_bytes=cut, stop=cut, split="train")
    tail = replace(file, num_bytes=size - cut, start=cut, stop=size, split="validation")
    return tuple(part for part in (head, tail) if part.num_bytes)


def key_of(text: str) -> int:
    """Returns the hash of a document's beginning: 0 to 2^64 - 1. Low ones are for validation."""
    return int.from_bytes(hashlib.blake2b(text[:_HASHED_CHARACTERS].encode(), digest_size=8).digest(), "little")


def validation_below(sources: Sources, recipe: Recipe) -> float:
    """Returns the key below which a document is for validation: `validation_frac` of all keys.

    If a split would have no document, the one with the lowest key is for validation, or the one with the highest for
    training. Reads documents until both splits have one, usually 1/validation_frac of them. Raises UserError if there
    is only one document, or for reading errors.
    """
    limit = recipe.validation_frac * 2.0**64
    undecided = [file for file in sources.files if file.split is None]
    decided = {file.split for file in sources.files} - {None}
    has = {"validation": "validation" in decided, "train": "train" in decided}
    lowest, highest = 1 << 64, -1
    for key in _keys(undecided, recipe):
        has["validation" if key < limit else "train"] = True
        if all(has.values()):
            return limit
        lowest, highest = min(lowest, key), max(highest, key)
    if highest < 0:
        return limit  # no text at all: refused after all files are read
    if lowest == highest and not decided:
        raise UserError(
            "the sources have one document, or several that begin alike, and the two splits need one each: give more "
            "documents, a --separator between documents, or --validation SRC"
        )
    return highest if has["validation"] else lowest + 1


def _keys(files: Sequence[SourceFile], recipe: Recipe) -> Iterator[int]:
    for file in files:
        for document in read(whole(file), recipe, []):
            if document.begins and document.slices:
                yield key_of(document.slices[0])
