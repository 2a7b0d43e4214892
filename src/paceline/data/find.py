"""Lists the files that the user names, in a fixed order, each with its format and, if known, its split."""

import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.base import units
from paceline.base.errors import UserError, nearest
from paceline.data import hub
from paceline.data.shard import INDEX, TOKEN_BYTES, WORK
from paceline.data.sources import (
    STANDARD_INPUT,
    LeftOut,
    SourceFile,
    Sources,
    local_file,
    open_content,
    open_stored,
    printable,
)
from paceline.data.text import BYTE_ORDER_MARK, REMEDIES, SNIFF_BYTES, why_not_text

FORMATS = ("text", "jsonl", "parquet")

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}
# Of gzip, zstd, lz4 and bz2, with each of its block sizes.
_MAGIC = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", *(b"BZh%d1AY&SY" % size for size in range(1, 10)))
_OF_A_RANK = re.compile(r"rank-\d+\.(end|log)")
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".xz", ".7z")
_LOST = ("is not UTF-8 text", "is UTF-16", "is UTF-32", "is an archive", "is an Arrow file")
_WARN_FRAC = 0.03  # share of the text's bytes

Files = Iterator[SourceFile | LeftOut]


def find(specs: Sequence[str], *, format: str = "auto", skips_unreadable: bool = False) -> Sources:
    """Returns the files that `specs` name: files, folders, patterns, `-`, and datasets on the hub.

    Files come in the order given, those of a folder or pattern sorted by name; a file named twice counts once. In a
    folder, hidden files and folders, links to folders, prepared datasets, run folders and empty files are ignored;
    files that are neither text nor records are listed as left out. `format` overrides name and content.
    skips_unreadable: files that are named but are no text are left out, too, and not an error. Raises UserError if a
    spec does not exist, cannot be read, or has no documents.
    """
    if format not in ("auto", *FORMATS):
        raise UserError(f"there is no format {format!r}{nearest(format, FORMATS)}; there are {', '.join(FORMATS)}")
    if not specs:
        raise UserError("no source is named; give files, folders, patterns, -, or hub:ORG/NAME")
    if STANDARD_INPUT in specs:
        return _standard_input(specs, format)
    files: dict[str, SourceFile] = {}
    left_out: list[LeftOut] = []
    for spec in specs:
        files_of_spec = list(_find(spec, format, skips_unreadable))
        unread = [file for file in files_of_spec if isinstance(file, LeftOut)]
        taken = [file for file in files_of_spec if isinstance(file, SourceFile)]
        if not taken and not (skips_unreadable and unread):
            raise UserError(_nothing(spec, unread))
        left_out += unread
        for file in taken:
            files.setdefault(file.real_path, file)
    if not files:
        raise UserError(_nothing(specs[0], left_out))
    name = _name(specs[0]) + (f"-and-{len(specs) - 1}-more" if len(specs) > 1 else "")
    return Sources(name, tuple(files.values()), tuple(left_out))


def has_text(path: Path | str) -> None:
    """Raises UserError if `find` would fail for a --data.path; stops at a folder's first text file."""
    expanded = os.path.expanduser(path)
    try:
        if not os.path.isdir(expanded) or not any(
            isinstance(file, SourceFile) for file in _find_in(expanded, "auto", in_order=False)
        ):
            find([str(path)])
    except UserError as error:
        failed = UserError(f"data.path {error}")
        failed.is_of_system = error.is_of_system
        raise failed from error


def _name(spec: str) -> str:
    """Returns a dataset's name, for messages and folders."""
    if hub.is_spec(spec):
        last = "-".join(spec.removeprefix(hub.SPEC).removeprefix(hub.PREFIX + "datasets/").split(":")[0].split("/")[:2])
    else:
        last = os.path.basename(os.path.realpath(_fixed_part(os.path.expanduser(spec))))
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in printable(last)).strip("-.") or "text"


def _standard_input(specs: Sequence[str], format: str) -> Sources:
    if len(specs) > 1:
        raise UserError("- (standard input) is named beside other sources; give it alone")
    if format == "parquet":
        raise UserError("Parquet can not be read from standard input, because it is read from its end; give a file")
    if sys.stdin is None:
        raise UserError("standard input is closed, and - reads from it; pipe the documents in, or name files")
    stream: Any = sys.stdin.buffer
    head: bytes = stream.peek(SNIFF_BYTES)
    if format == "auto":
        format = "jsonl" if _first(head) == b"{" else "text"
    if head.startswith(_MAGIC):
        raise UserError("standard input is not text but compressed: unpack it first, or name the file")
    why = why_not_text(head, trusted=True)
    if why and head:
        raise UserError(f"standard input {why}; {REMEDIES[why]}")
    return Sources("stdin", (SourceFile(STANDARD_INPUT, STANDARD_INPUT, format),))


def _find(spec: str, format: str, skips: bool) -> Files:
    expanded = os.path.expanduser(spec)  # unlike pathlib, keeps a ~user that does not exist
    if hub.is_spec(spec):
        yield from _find_on_hub(spec, format)
    elif "\0" in expanded:
        raise UserError(f"{spec!r} is not a path: it has a NUL character")
    elif os.path.isdir(expanded):
        yield from _find_in(expanded, format, skips=skips)
    elif os.path.isfile(expanded):
        yield _file(os.path.basename(expanded), expanded, format, is_named=True, skips=skips)
    elif os.path.exists(expanded):
        raise UserError(
            f"{printable(spec)} is a pipe or device, which can be read only once; pipe it in: "
            f"paceline data prepare - < {printable(spec)}"
        )
    elif glob.has_magic(expanded):
        root = _fixed_part(expanded)
        for match in sorted(glob.glob(expanded, recursive=True)):
            if os.path.isfile(match) and os.path.getsize(match):
                yield _file(os.path.relpath(match, root or "."), match, format, is_named=False, skips=skips)
    else:
        raise UserError(
            f"{printable(spec)} does not exist; give a prepared folder, a folder of text files, a text file, or a "
            f"pattern such as 'data/*.jsonl'"
        )


def _find_in(folder: str, format: str, *, in_order: bool = True, skips: bool = False) -> Files:
    files = _files(os.path.realpath(folder))
    for name, path in sorted(files) if in_order else files:
        if os.path.getsize(path):
            yield _file(name, path, format, is_named=False, skips=skips)


def _fixed_part(pattern: str) -> str:
    if os.path.exists(pattern):
        return pattern
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


def _files(root: str) -> Iterator[tuple[str, str]]:
    """Yields (name with slashes, path) of the regular files under root, except those of prepared datasets and runs."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{printable(error.filename)} can not be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=refuse):
        if WORK in folders or {INDEX, TOKEN_BYTES} <= set(files):
            folders.clear()
            continue  # prepared data, perhaps of these sources
        if "ranks" in folders and ("checkpoints" in folders or "config.toml" in files):
            folders.clear()
            continue  # a run, perhaps on these sources: its rows and logs would make other data of them
        if files and all(_OF_A_RANK.fullmatch(name) for name in files):
            continue  # a run whose start failed has nothing else
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path):  # a pipe would block, a broken link fail
                yield os.path.relpath(path, root).replace(os.sep, "/"), path


def _by_name(name: str) -> tuple[str | None, str, str]:
    """Returns (format or None, suffix before the compression's, compression) from a file's name."""
    stem, suffix = os.path.splitext(name.lower())
    compression = _COMPRESSIONS.get(suffix, "")
    kind = os.path.splitext(stem)[1] if compression else suffix
    return _SUFFIXES.get(kind), kind, compression


def _file(name: str, path: str, format: str, *, is_named: bool, skips: bool) -> SourceFile | LeftOut:
    known, kind, compression = _by_name(path)
    file = local_file(name, os.path.abspath(path), known or "text", compression)
    if format != "auto":
        file = replace(file, format=format)
    elif kind == ".json":
        file = replace(file, format=_json_format(file, is_named, skips))
    if file.format == "parquet" and compression:
        raise UserError(f"{file.where} is Parquet in a {compression} file, which can not be read in parts; unpack it")
    if file.format == "parquet":
        return file
    try:
        head = _head(file)
    except UserError:
        if not skips:
            raise
        return file  # whoever reads it skips it, and counts it
    why = why_not_text(head, trusted=format == "text" or file.format == "jsonl")
    if why is None or (file.format == "jsonl" and why == "is empty"):
        return file
    why = _better_known(path) or why
    if (is_named or file.format == "jsonl") and not skips:
        raise UserError(f"{file.where} {why}; {REMEDIES[why]}")
    return LeftOut(name, file.num_bytes, why)


def _better_known(path: str) -> str | None:
    """Returns what a file that is no text is, if its name tells."""
    stem, suffix = os.path.splitext(path)
    if path.lower().endswith(_ARCHIVES):
        return "is an archive"
    if suffix.lower() == ".arrow":
        return "is an Arrow file"
    is_pair = suffix in (".bin", ".idx") and os.path.exists(f"{stem}.bin") and os.path.exists(f"{stem}.idx")
    return "is Megatron's" if is_pair else None


def _head(file: SourceFile, size: int = SNIFF_BYTES) -> bytes:
    head = b""
    with open_stored(file) as stored:
        content = open_content(file, stored)
        while len(head) < size and (more := content.read(size - len(head))):
            head += more
    return head


def _first(head: bytes) -> bytes:
    return head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1]


def _json_format(file: SourceFile, is_named: bool, skips: bool) -> str:
    """A .json file has JSON lines if its first line is an object and the second begins one, or if there is only one
    and the user names the file. skips: one that cannot be read is text, as whoever reads it finds out."""
    try:
        head = _head(file, 1 << 20)
    except UserError:
        if not skips:
            raise
        return "text"
    line, _, rest = head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
    is_object = line.startswith(b"{") and (_is_json(line) or (not rest and len(head) == 1 << 20))
    if is_object and (_first(rest) == b"{" or (is_named and not _first(rest))):
        return "jsonl"
    if is_named and line[:1] in (b"{", b"["):
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


def _find_on_hub(spec: str, format: str) -> Files:
    repository, listed = hub.list_files(spec, lambda name: _by_name(name)[0] is not None)
    for name, path, num_bytes, stamp in listed:
        known, _, compression = _by_name(name)
        known = known if format == "auto" else format
        if known is None or (known == "parquet" and compression):
            yield LeftOut(f"{repository}/{name}", num_bytes, "has no known name")
        else:
            yield SourceFile(f"{repository}/{name}", path, known, compression, num_bytes, stamp)


def _nothing(spec: str, left_out: Sequence[LeftOut]) -> str:
    shown = printable(spec)
    if not left_out:
        return f"{shown} holds no text files, JSONL or Parquet"
    name, why = printable(left_out[0].name), left_out[0].why
    return (
        f"{shown} holds no UTF-8 text, JSONL or Parquet: none of its {len(left_out)} files that are not empty or "
        f"hidden is one of these; {name} {why}; {REMEDIES[why]}"
    )


def describe_left_out(sources: Sources) -> list[str]:
    """Returns a line for each reason why files are left out: how many, their size, and some names. The line is a
    warning if more than a few per cent of the text is left out."""
    lines = []
    num_files = len({file.path for file in sources.files}) + len(sources.left_out)
    num_bytes = sum(file.num_bytes for file in sources.files) + sum(file.num_bytes for file in sources.left_out)
    text_bytes = num_bytes - sum(file.num_bytes for file in sources.left_out if file.why not in _LOST)
    for why in dict.fromkeys(file.why for file in sources.left_out):
        files = [file for file in sources.left_out if file.why == why]
        size = sum(file.num_bytes for file in files)
        names = units.listed([printable(file.name) for file in files])
        warning = "warning: " if why in _LOST and size > _WARN_FRAC * text_bytes else ""
        lines.append(
            f"{warning}{len(files)} of {num_files} files, {units.size(size)} of {units.size(num_bytes)}, are left out "
            f"({names}): each {why}; {REMEDIES[why]}"
        )
    return lines


def digest(sources: Sources) -> str:
    """Returns a sha256 over names, splits and bytes of all files. Files on the hub are hashed by their stamps. Raises
    UserError for a file that cannot be read."""
    total = hashlib.sha256()
    for file in sources.files:
        content = file.stamp.encode() if hub.is_hub(file.path) else _content_digest(file)
        said = f"{file.format}\0{file.compression}\0{file.start}\0{file.stop}\0{file.split}\0".encode()
        total.update(hashlib.sha256(said + os.fsencode(file.name)).digest() + hashlib.sha256(content).digest())
    return total.hexdigest()


def _content_digest(file: SourceFile) -> bytes:
    content = hashlib.sha256()
    with open_stored(file) as stored:
        stored.seek(file.start)
        left = file.num_bytes
        while left and (data := stored.read(min(left, 1 << 20))):
            content.update(data)
            left -= len(data)
    return content.digest()
