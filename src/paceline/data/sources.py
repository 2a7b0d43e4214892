"""Source files of documents: their metadata, and how their bytes are read."""

import filecmp
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from paceline.base import units
from paceline.base.errors import UserError
from paceline.data import hub
from paceline.data.shard import reading

STANDARD_INPUT = "-"
_COPIED_BYTES = 1 << 20  # of standard input at a time
_STORED_BYTES = 1 << 16  # of a compressed file at a time

# Not in the embedded corpus: tests; generated tables (encodings, pydoc_data: a fifth of all tokens, which a small
# model's samples repeat); and files of this machine rather than of Python.
_NOT_LIBRARY = {"test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
_NOT_LIBRARY |= {"site-packages", "dist-packages"}
_NOT_LIBRARY_PREFIXES = ("_sysconfigdata_", "sitecustomize.", "usercustomize.", "config-")


@dataclass(frozen=True)
class SourceFile:
    """A file with documents, or a part of a text file that is one document."""

    name: str  # relative to the folder it was found in, with slashes
    path: str  # absolute; `-` is standard input, hf://... a file on the hub
    format: str  # text, jsonl or parquet
    compression: str = ""  # gzip, zstd, bz2, lz4, or empty
    num_bytes: int = 0  # as stored, of this part; 0 of standard input
    stamp: str = ""  # changes with the file
    start: int = 0  # text only: the document is the bytes start..stop-1
    stop: int | None = None
    split: str | None = None  # train or validation; None: decided for each document by a hash of its text

    @property
    def where(self) -> str:
        return "standard input" if self.name == STANDARD_INPUT else printable(self.path)

    @property
    def real_path(self) -> str:
        """The path without links: the same file has the same."""
        return os.path.realpath(self.path) if os.path.isabs(self.path) else self.path

    @property
    def is_seekable(self) -> bool:
        """Whether reading can start anywhere."""
        return not self.compression and self.path != STANDARD_INPUT


@dataclass(frozen=True)
class LeftOut:
    """A file that is not read; `name` as in SourceFile."""

    name: str
    num_bytes: int
    why: str  # a key of text.REMEDIES


@dataclass(frozen=True)
class Sources:
    """Files in the order of their documents, and the files left out."""

    name: str
    files: tuple[SourceFile, ...]
    left_out: tuple[LeftOut, ...] = ()


def printable(path: str) -> str:
    """Returns a path as printable text: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


def local_file(name: str, path: str, format: str, compression: str = "") -> SourceFile:
    """Returns a complete local file as a source. Raises UserError if it does not exist or may not be looked at."""
    with reading(printable(path)):
        status = os.stat(path)
    # A copy may keep the modification time, and an edit the size; the system sets the change time of both.
    stamp = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"
    return SourceFile(name, path, format, compression, num_bytes=status.st_size, stamp=stamp)


def require_unchanged(files: Iterable[SourceFile]) -> None:
    """Raises UserError if a local file is another one, or was written to, since it was listed; whoever reads opens it
    anew. Nothing is known of a file without a stamp, nor of one on the hub."""
    for file in files:
        if not file.stamp or hub.is_hub(file.path):
            continue
        if local_file(file.name, file.path, file.format).stamp != file.stamp:
            raise UserError(f"{file.where} changed while it was read; start again")


def embedded() -> Sources:
    """Returns the Python standard library's own `.py` files, without tests and installed packages.

    The same Python version gives the same corpus on every machine, except for files that a distribution omits. Raises
    UserError if Python was installed without sources (a zipped library).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if _is_library(name))
        paths += [Path(folder, name) for name in files if name.endswith(".py") and _is_library(name)]
    named = [local_file(path.relative_to(root).as_posix(), str(path), "text") for path in paths if path.stat().st_size]
    if not named:
        raise UserError(f"this Python has no sources in {root} to train on; give --data.path a folder of text files")
    version = ".".join(platform.python_version_tuple()[:2])
    return Sources(f"python-{version}-library", tuple(sorted(named, key=lambda file: file.name)))


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY and not name.startswith(_NOT_LIBRARY_PREFIXES)


def kept_input(sources: Sources, kept: Path, *, is_begun: bool) -> Sources:
    """Copies standard input to a file, since it is read more than once. Raises UserError if a preparation that has
    begun gets another stream."""
    copy = kept.with_name("input-again") if is_begun else kept
    with copy.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, _COPIED_BYTES)
    if is_begun and not filecmp.cmp(kept, copy, shallow=False):
        raise UserError(
            f"standard input is not the {units.size(kept.stat().st_size)} that were read before; give the same again, "
            f"or --restart to begin anew"
        )
    size = kept.stat().st_size
    files = [
        replace(file, path=str(kept), num_bytes=size) if file.path == STANDARD_INPUT else file for file in sources.files
    ]
    return replace(sources, files=tuple(files))


@contextmanager
def open_stored(file: SourceFile) -> Iterator[BinaryIO]:
    """Opens a file's bytes as stored; errors in opening or reading become a UserError naming the file."""
    try:
        with hub.open_file(file.path) if hub.is_hub(file.path) else open(file.path, "rb") as stored:
            yield stored
    except UserError:
        raise
    except Exception as error:
        if type(error) is OSError and error.errno is None and file.compression:  # of the decompression
            reason = " ".join(str(error).split())
            raise UserError(
                f"{file.where} is damaged or cut short, {file.compression} says: {reason}; copy it again"
            ) from error
        if hub.is_hub(file.path):
            failed = UserError(hub.message(file.path, error))
            failed.is_of_system = True
            raise failed from error
        if isinstance(error, OSError):
            raise UserError(f"{file.where} can not be read: {error.strerror or error}") from error
        raise


def open_content(file: SourceFile, stored: BinaryIO) -> BinaryIO:
    """Returns a reader of the decompressed bytes: all members of a gzip file, all frames of a zstd file. A file that is
    cut short is an error."""
    if not file.compression:
        return stored
    import pyarrow  # type: ignore[import-untyped]  # slow to import

    stream: BinaryIO = pyarrow.input_stream(stored, compression=file.compression, buffer_size=_STORED_BYTES)
    return stream
