"""What a source of documents is: how its bytes are reached, whether they are text, and which text they are.

The text of a plain file is its bytes read as UTF-8, without a byte order mark, every line end (CRLF, CR) made a line
feed; bytes that are not UTF-8 become U+FFFD. A record's text (JSONL, Parquet) is the string it has. A document longer
than a piece is cut where no tokenizer would have made a token across. All of that is decided here and nowhere else.
"""

import codecs
import gzip
import os
import platform
import re
import sys
import sysconfig
import unicodedata
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zstandard

from paceline.base.errors import UserError
from paceline.data import hub

SNIFF_BYTES = 8192  # of a file's beginning, looked at to tell text from what is not
PIECE_BYTES = 1 << 18  # a longer document is encoded in pieces of at most this; at least 8
REPLACEMENT = "\ufffd"
BYTE_ORDER_MARK = codecs.BOM_UTF8
STANDARD_INPUT = "-"

# Tests are other text than programs; encodings and pydoc_data are tables that programs wrote (a fifth of all tokens,
# and a small model's samples turned into them); the rest belongs to this machine and not to Python.
_NOT_LIBRARY = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
_NOT_LIBRARY_PREFIXES = ("_sysconfigdata_", "sitecustomize.", "usercustomize.", "config-")


@dataclass(frozen=True)
class SourceFile:
    """A file with documents, or a part of a text file that is one document."""

    name: str
    """Relative to the folder it was found in, with slashes."""
    path: str
    """Absolute; `-` is standard input, hf://... a file on the hub."""
    format: str
    """text, jsonl or parquet."""
    compression: str = ""
    """gzip, zstd, or empty."""
    num_bytes: int | None = None
    """As stored, of this part; None where nobody knows."""
    stamp: str = ""
    """Another one when the file was changed."""
    start: int = 0
    """Text only: the document is the bytes start..stop-1."""
    stop: int | None = None
    side: str | None = None
    """train or validation; None: for each document by a hash of its text."""

    @property
    def where(self) -> str:
        """For people."""
        return "standard input" if self.path == STANDARD_INPUT else shown(self.path)

    @property
    def is_seekable(self) -> bool:
        """Whether reading can begin anywhere."""
        return not self.compression and self.path != STANDARD_INPUT


@dataclass(frozen=True)
class Sources:
    """Files in the order in which their documents come. `skipped` counts those that hold neither text nor records."""

    name: str
    files: tuple[SourceFile, ...]
    skipped: int = 0


def shown(path: str) -> str:
    """A path as text that any terminal takes: bytes of a name that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


def embedded() -> Sources:
    """The Python standard library's own `.py` sources, without tests and without what is installed beside them.

    The same Python version gives the same corpus on every machine, but for what a distribution left out. Raises
    UserError where Python came without sources (a zipped library).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if _is_library(name))
        found += [Path(folder, name) for name in files if name.endswith(".py") and _is_library(name)]
    named = [local_file(path.relative_to(root).as_posix(), str(path), "text") for path in found if path.stat().st_size]
    if not named:
        raise UserError(f"this Python has no sources in {root} to train on; give --data.path a folder of text files")
    version = ".".join(platform.python_version_tuple()[:2])
    return Sources(f"python-{version}-library", tuple(sorted(named, key=lambda file: file.name)))


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY and not name.startswith(_NOT_LIBRARY_PREFIXES)


def local_file(name: str, path: str, format: str, compression: str = "") -> SourceFile:
    """Returns the whole of a file on this machine as a source; raises OSError where it is not there."""
    status = os.stat(path)
    stamp = f"{status.st_size}-{status.st_mtime_ns}"
    return SourceFile(name, path, format, compression, num_bytes=status.st_size, stamp=stamp)


class Readable(Protocol):
    """Bytes in order."""

    def read(self, size: int, /) -> bytes:
        """At most `size` of the next bytes; none at the end, and only there."""


class Stored(Readable, Protocol):
    """The bytes of a file as they are stored."""

    def seek(self, offset: int, /) -> int: ...

    def tell(self) -> int: ...


@contextmanager
def open_stored(file: SourceFile) -> Iterator[Stored]:
    """Gives the file's bytes as they are stored; what fails to open or be read inside becomes a UserError naming it."""
    with refusing(file):
        if file.path == STANDARD_INPUT:
            yield sys.stdin.buffer
        elif hub.is_hub(file.path):
            with hub.open_file(file.path) as stored:
                yield stored
        else:
            with open(file.path, "rb") as stored:
                yield stored


def open_content(file: SourceFile, stored: Stored) -> Readable:
    """The bytes of a file without its compression: of all members of a gzip file, all frames of a zstd file."""
    if file.compression == "gzip":
        return gzip.GzipFile(fileobj=stored, mode="rb")
    return _Zstd(stored) if file.compression == "zstd" else stored


@contextmanager
def refusing(file: SourceFile) -> Iterator[None]:
    """What goes wrong with the file inside becomes a UserError that names it."""
    try:
        yield
    except UserError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise UserError(
            f"{file.where} is damaged or cut short, {file.compression} says: {error}; copy it again"
        ) from error
    except Exception as error:
        if hub.is_hub(file.path):
            raise UserError(hub.message(file.path, error)) from error
        if isinstance(error, OSError):
            raise UserError(f"{file.where} can not be read: {error.strerror or error}") from error
        raise


class _Zstd:
    """Frames one after the other. The library's own reader takes a frame that was cut short for a whole one."""

    _STORED_BYTES = 1 << 13  # at once: what they come to is in memory, usually three to ten times as much

    def __init__(self, stored: Readable) -> None:
        self._stored = stored
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # what `zstd --long=31` writes
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ready = b""

    def read(self, size: int, /) -> bytes:
        while not self._ready:
            data = self._stored.read(self._STORED_BYTES)
            if not data and self._frame is None:
                return b""
            if not data:
                raise EOFError("the last frame has no end")
            self._decompress(data)
        found, self._ready = self._ready[:size], self._ready[size:]
        return found

    def _decompress(self, data: bytes) -> None:
        found = []
        while data:
            self._frame = self._frame or self._decompressor.decompressobj()
            found.append(self._frame.decompress(data))
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        self._ready = b"".join(found)


def is_text(head: bytes, *, trusted: bool = False) -> bool:
    """Whether a file's beginning is UTF-8 without NUL, and not empty. UTF-16 and Latin-1 are not.

    `trusted`: somebody said that it is text, and without NUL he is believed.
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # incremental: the last character may be cut
    except UnicodeDecodeError:
        if not trusted:
            return False
    return bool(head) and b"\0" not in head


def text_of(content: bytes) -> tuple[str, int]:
    """Returns the text of a plain file's bytes, and in how many places it has U+FFFD for what is not UTF-8."""
    if b"\r" in content:
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return decode(content)


def decode(content: bytes) -> tuple[str, int]:
    """Returns bytes read as UTF-8, and in how many places they are not and became U+FFFD."""
    try:
        return content.decode(), 0
    except UnicodeDecodeError:
        text = content.decode("utf-8", "replace")
        return text, text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())


def pieces(content: bytes) -> Iterator[bytes]:
    """The bytes of a whole document in pieces of at most PIECE_BYTES, cut where `cut` says."""
    at = 0
    while len(content) - at > PIECE_BYTES:
        end = at + cut(content[at : at + PIECE_BYTES + 1])
        yield content[at:end]
        at = end
    yield content[at:] if at else content


def cut(beginning: bytes) -> int:
    """Where the next piece of a document ends: bytes, 1 to PIECE_BYTES. It depends on the bytes up to there alone.

    `beginning` is more than PIECE_BYTES of the document, from where the last piece ended. The end is the last place
    with a letter or digit before it and a space or line end after it: each known pattern by which text is cut before
    merges are made has a border there, whatever stands around, so tokens are those of the whole document. Where there
    is none, a character ends there, and CRLF is not cut apart.
    """
    window = 1 << 10
    while True:
        found = _LAST_OF_WORD.finditer(beginning, max(0, PIECE_BYTES - window), PIECE_BYTES + 1)
        for end in reversed([match.end() for match in found]):
            if beginning[end - 1] < 0x80 or _is_letter(beginning[max(0, end - 4) : end]):
                return end
        if window >= PIECE_BYTES:
            break
        window *= 16
    end = PIECE_BYTES
    while beginning[end] & 0xC0 == 0x80 and end > PIECE_BYTES - 4:  # 10xxxxxx goes on a character
        end -= 1
    if beginning[end] & 0xC0 == 0x80:  # no character is so long: it is not UTF-8
        end = PIECE_BYTES
    return end - (beginning[end - 1 : end + 1] == b"\r\n")


_LAST_OF_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff](?=[ \r\n])")


def _is_letter(tail: bytes) -> bool:
    """Whether the last character is a letter or digit, and was one in Unicode 3.2: libraries know several versions."""
    start = max((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), default=0)
    try:
        character = tail[start:].decode()
    except UnicodeDecodeError:
        return False
    return character.isalnum() and unicodedata.ucd_3_2_0.category(character)[0] in "LN"
