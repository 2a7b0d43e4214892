"""Which files hold the documents: what a person names, made a list in a fixed order, each with what it is.

What is in them is the business of `blocks`; what text is, of `corpora`.
"""

import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.base.errors import UserError, nearest
from paceline.data import corpora, hub
from paceline.data.corpora import SNIFF_BYTES, STANDARD_INPUT, SourceFile, Sources, shown
from paceline.data.shard import INDEX, TOKEN_BYTES, WORK

FORMATS = ("text", "jsonl", "parquet")
VALIDATION_PARTS = 20  # one file in so many is validation
TAIL_FRAC = 0.1  # where files are too few or too unequal for that: this much of each file's end

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_MAGIC = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # of gzip and zstd
_ON_HUB = tuple(
    suffix + more
    for suffix in (*_SUFFIXES, ".txt")
    for more in ("", *_COMPRESSIONS)
    if suffix != ".parquet" or not more
)
_OTHER_ENCODINGS = "other encodings: iconv -f LATIN1 -t UTF-8 IN > OUT"


def find(specs: Sequence[str], *, format: str = "auto") -> Sources:
    """Returns the files that are named: files, folders, patterns, `-`, and data sets on the hub.

    They come in the order in which they are named, those of a folder or pattern sorted by name; one that is named
    twice counts once. In a folder hidden files and folders, links to folders and empty files are passed over; what is
    neither text nor records is passed over and counted. `format` overrides what names and beginnings say. Raises
    UserError for what is missing, can not be read, or holds nothing.
    """
    if format not in ("auto", *FORMATS):
        raise UserError(f"there is no format {format!r}{nearest(format, FORMATS)}; there are {', '.join(FORMATS)}")
    if not specs:
        raise UserError("no source is named; give files, folders, patterns, -, or hub:ORG/NAME")
    if STANDARD_INPUT in specs:
        return _standard_input(specs, format)
    files: dict[str, SourceFile] = {}
    skipped = 0
    for spec in specs:
        some = 0
        for file in _find(spec, format):
            if file is None:
                skipped += 1
            else:
                some += 1
                files.setdefault(os.path.realpath(file.path) if not hub.is_hub(file.path) else file.path, file)
        if not some:
            raise UserError(_nothing(spec, skipped))
    name = _name(specs[0]) + (f"-and-{len(specs) - 1}-more" if len(specs) > 1 else "")
    return Sources(name, tuple(files.values()), skipped)


def has_text(path: Path | str) -> None:
    """Raises UserError where `find` would for a --data.path; stops at the first file: cheap on a large folder."""
    given = os.path.expanduser(path)
    try:
        if not os.path.isdir(given) or not any(_find_in(given, "auto", in_order=False)):
            find([str(path)])
    except UserError as error:
        raise UserError(f"data.path {error}") from error


def _name(spec: str) -> str:
    """Of a data set, for people and for folders."""
    if hub.is_spec(spec):
        last = "-".join(spec.removeprefix(hub.SPEC).removeprefix(hub.PREFIX + "datasets/").split(":")[0].split("/")[:2])
    else:
        last = os.path.basename(os.path.realpath(_fixed_part(os.path.expanduser(spec))))
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in shown(last)).strip("-.") or "text"


def _standard_input(specs: Sequence[str], format: str) -> Sources:
    if len(specs) > 1:
        raise UserError("- (standard input) is named beside other sources; give it alone")
    if format == "parquet":
        raise UserError("Parquet can not be read from standard input, as it is read from its end; give a file")
    if sys.stdin is None:
        raise UserError("standard input is closed, and - reads from it; pipe the documents in, or name files")
    stream: Any = sys.stdin.buffer
    head: bytes = stream.peek(SNIFF_BYTES)
    if format == "auto":
        format = "jsonl" if _first(head) == b"{" else "text"
    if b"\0" in head or head.startswith(_MAGIC):
        raise UserError("standard input is not text; a compressed file: zcat FILE | paceline ... -, or name the file")
    return Sources("stdin", (SourceFile(STANDARD_INPUT, STANDARD_INPUT, format),))


def _find(spec: str, format: str) -> Iterator[SourceFile | None]:
    """The files of one source in their order; None for each that is passed over and counted."""
    if hub.is_spec(spec):
        yield from _find_on_hub(spec, format)
        return
    given = os.path.expanduser(spec)  # unlike pathlib's, leaves a ~user that nobody is
    if "\0" in given:
        raise UserError(f"{spec!r} is no path: it has a NUL character")
    if os.path.isdir(given):
        yield from _find_in(given, format)
    elif os.path.exists(given):
        if not os.path.isfile(given):
            raise UserError(
                f"{shown(spec)} is a pipe or device, which can be read once only; pipe it in: "
                f"paceline data prepare - < {shown(spec)}"
            )
        yield _file(os.path.basename(given), given, format, is_named=True)
    elif glob.has_magic(given):
        yield from _find_by(given, format)
    else:
        raise UserError(
            f"{shown(spec)} does not exist; give a prepared folder, a folder of text files, a text file, or a pattern "
            f"such as 'data/*.jsonl'"
        )


def _find_in(folder: str, format: str, *, in_order: bool = True) -> Iterator[SourceFile | None]:
    files = _files(os.path.realpath(folder))
    for name, path in sorted(files) if in_order else files:
        if os.path.getsize(path):
            yield _file(name, path, format, is_named=False)


def _find_by(pattern: str, format: str) -> Iterator[SourceFile | None]:
    root = _fixed_part(pattern)
    for match in sorted(glob.glob(pattern, recursive=True)):
        if os.path.isfile(match) and os.path.getsize(match):
            yield _file(os.path.relpath(match, root or "."), match, format, is_named=False)


def _fixed_part(pattern: str) -> str:
    """The folder above the first part of a pattern that is one; a path that is none stays."""
    if not glob.has_magic(pattern) or os.path.exists(pattern):
        return pattern
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


def _files(root: str) -> Iterator[tuple[str, str]]:
    """(name with slashes, path) of the regular files under root, but for those of data sets."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{shown(error.filename)} can not be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=refuse):
        if WORK in folders or {INDEX, TOKEN_BYTES} <= set(files):
            folders.clear()
            continue  # tokens that were made here, perhaps of these sources
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path):  # a pipe would block, a broken link fail
                yield os.path.relpath(path, root).replace(os.sep, "/"), path


def _file(name: str, path: str, format: str, *, is_named: bool) -> SourceFile | None:
    """What a file is; None where it is not for us, or UserError where a person named it."""
    stem, suffix = os.path.splitext(path.lower())
    compression = _COMPRESSIONS.get(suffix, "")
    kind = os.path.splitext(stem)[1] if compression else suffix
    found = corpora.SourceFile(name, os.path.abspath(path), "text", compression)
    with corpora.refusing(found):
        found = corpora.local_file(name, os.path.abspath(path), _SUFFIXES.get(kind, "text"), compression)
    if format != "auto":
        found = replace(found, format=format)
    elif kind == ".json":
        found = replace(found, format=_json_format(found, is_named))
    if found.format == "parquet" and compression:
        raise UserError(f"{found.where} is Parquet in a {compression} file, which can not be read in parts; unpack it")
    if found.format != "text" or corpora.is_text(_head(found), trusted=format == "text"):
        return found
    if is_named and not _head(found):
        raise UserError(f"{found.where} is empty")
    if is_named:
        what = "unpack it first" if suffix in (".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z") else _OTHER_ENCODINGS
        raise UserError(f"{found.where} is not UTF-8 text; {what}")
    return None


def _head(file: SourceFile, size: int = SNIFF_BYTES) -> bytes:
    """The beginning of a file's content."""
    with corpora.open_stored(file) as stored:
        return corpora.open_content(file, stored).read(size)


def _first(head: bytes) -> bytes:
    """The first byte that is no white space."""
    return head.removeprefix(corpora.BYTE_ORDER_MARK).lstrip()[:1]


def _json_format(file: SourceFile, is_named: bool) -> str:
    """Of a .json file: jsonl where a record is a line; else it is one value, in a folder as good a text as any."""
    head = _head(file, 1 << 20)
    first, _, rest = head.removeprefix(corpora.BYTE_ORDER_MARK).lstrip().partition(b"\n")
    if first.startswith(b"{") and (_is_json(first) or (not rest and len(head) == 1 << 20)):
        more = _first(rest)
        if more == b"{" or (is_named and not more):
            return "jsonl"
    if is_named and _first(head) in (b"{", b"["):
        raise UserError(
            f"{file.where} is one JSON value and not one a line; make lines of it: jq -c '.[]' IN > OUT.jsonl, "
            f"or take it as it is: --format text"
        )
    return "text"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _find_on_hub(spec: str, format: str) -> Iterator[SourceFile | None]:
    repository, listed = hub.list_files(spec, _ON_HUB)
    for name, path, num_bytes, stamp in listed:
        stem, suffix = os.path.splitext(name.lower())
        compression = _COMPRESSIONS.get(suffix, "")
        kind = os.path.splitext(stem)[1] if compression else suffix
        known = _SUFFIXES.get(kind, "text") if name.lower().endswith(_ON_HUB) else None
        known = known if format == "auto" else format
        if known is None or (known == "parquet" and compression):
            yield None
        else:
            yield SourceFile(f"{repository}/{name}", path, known, compression, num_bytes, stamp)


def _nothing(spec: str, skipped: int) -> str:
    given = shown(spec)
    if skipped:
        return (
            f"{given} holds no UTF-8 text, JSONL or Parquet: none of its {skipped} files that are not empty or hidden "
            f"is one of these; {_OTHER_ENCODINGS}"
        )
    return f"{given} holds no text files, JSONL or Parquet"


def split_text(files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """Puts plain text files, of which each is a document, on the sides, the same way wherever the files are the same.

    By file, where a hash of the name chooses one in 20 and that comes to 1% to 20% of their bytes: a file then stays on
    its side when others are added. Else, with few files or very unequal ones, the last tenth of each is a document of
    its own for validation, from the beginning of a line on; one file, even of one line, gives both sides. Compressed
    text, records and standard input are returned as they are.
    """
    plain = [file for file in files if _can_be_cut(file)]
    part = sum(_size(file) for file in plain if _chosen(file.name))
    if 0.01 * sum(map(_size, plain)) <= part <= 0.2 * sum(map(_size, plain)):
        sides = {True: "validation", False: "train"}
        return tuple(replace(f, side=sides[_chosen(f.name)]) if _can_be_cut(f) else f for f in files)
    return tuple(part for file in files for part in (_head_and_tail(file) if _can_be_cut(file) else (file,)))


def _can_be_cut(file: SourceFile) -> bool:
    return file.format == "text" and file.is_seekable and file.num_bytes is not None


def _size(file: SourceFile) -> int:
    return file.num_bytes or 0


def _chosen(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "little") % VALIDATION_PARTS == 0


def _head_and_tail(file: SourceFile) -> tuple[SourceFile, ...]:
    size = _size(file)
    cut = _tail_begins(file, size)
    head = replace(file, num_bytes=cut, stop=cut, side="train")
    tail = replace(file, num_bytes=size - cut, start=cut, stop=size, side="validation")
    return tuple(part for part in (head, tail) if part.num_bytes)


def _tail_begins(file: SourceFile, size: int) -> int:
    """The byte at which the tail of a file begins: a line's beginning near it, else a character's."""
    wanted = int(size * (1 - TAIL_FRAC))
    with corpora.open_stored(file) as stored:
        stored.seek(wanted)
        after = stored.read(1 << 16)
    line = after.find(b"\n") + 1
    if line and wanted + line < size:
        return wanted + line
    character = next((i for i, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)  # 10xxxxxx goes on a character
    return wanted + character


def digest(sources: Sources) -> str:
    """sha256 over names, sides and bytes of all files: equal exactly where the sources are the same.

    Files on the hub are known by their stamps. Raises UserError for a file that can not be read.
    """
    total = hashlib.sha256()
    for file in sources.files:
        content = file.stamp.encode() if hub.is_hub(file.path) else _content_digest(file)
        said = f"{file.format}\0{file.compression}\0{file.start}\0{file.stop}\0{file.side}\0".encode()
        total.update(hashlib.sha256(said + os.fsencode(file.name)).digest() + hashlib.sha256(content).digest())
    return total.hexdigest()


def _content_digest(file: SourceFile) -> bytes:
    content = hashlib.sha256()
    with corpora.open_stored(file) as stored:
        stored.seek(file.start)
        left = _size(file)
        while left and (data := stored.read(min(left, 1 << 20))):
            content.update(data)
            left -= len(data)
    return content.digest()
