"""Finds documents: which files, which part of each is for training, and their text.

A document is a file, or the part of one. Its text is its bytes read as UTF-8, without a byte order mark, every line end
(CRLF, CR) made a line feed; bytes that are not UTF-8 become U+FFFD. All of that is decided here and nowhere else.
"""

import codecs
import hashlib
import io
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import UserError

SNIFF_BYTES = 8192  # of a file's beginning, looked at to tell text from what is not
PIECE_BYTES = 1 << 18  # text is read and tokenized in pieces of about this, whatever a file's size
VALIDATION_PARTS = 20  # one file in so many is validation
TAIL_FRAC = 0.1  # where files are too few or too unequal for that: this much of each file's end
REPLACEMENT = "\ufffd"

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
class Corpus:
    """Text files: (relative name with slashes, absolute path), sorted by name. `skipped` counts files that are not."""

    name: str
    files: tuple[tuple[str, Path], ...]
    skipped: int = 0


@dataclass(frozen=True)
class Document:
    """The bytes start..stop-1 of a file."""

    name: str
    path: Path
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """The documents of each side, in the order of their names; no byte is on both."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def embedded() -> Corpus:
    """The Python standard library's own `.py` sources, without tests and without what is installed beside them.

    The same Python version gives the same corpus on every machine, but for what a distribution left out. Raises
    UserError where Python came without sources (a zipped library).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if _is_library(name))
        found += [Path(folder, name) for name in files if name.endswith(".py") and _is_library(name)]
    named = [(path.relative_to(root).as_posix(), path) for path in found if path.stat().st_size]
    if not named:
        raise UserError(f"this Python has no sources in {root} to train on; give --data.path a folder of text files")
    version = ".".join(platform.python_version_tuple()[:2])
    return Corpus(f"python-{version}-library", tuple(sorted(named)))


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY and not name.startswith(_NOT_LIBRARY_PREFIXES)


def from_path(path: Path | str) -> Corpus:
    """A folder of text files, at any depth, or one text file.

    Hidden files and folders, links to folders and empty files are passed over; what is not text is passed over and
    counted. Raises UserError for a path that is missing, can not be read, or holds no text.
    """
    given = Path(os.path.expanduser(path))  # unlike pathlib's, leaves a ~user that nobody is
    if not os.path.exists(given):
        raise UserError(
            f"data.path {given} does not exist; give a prepared folder, a folder of text files, or a text file"
        )
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in given.resolve().name).strip("-.") or "text"
    skipped = 0
    files = []
    for relative, file in _files(given.resolve()):
        if _is_text(file):
            files.append((relative, file))
        elif file.stat().st_size:
            skipped += 1
    if not files:
        raise UserError(_no_text(given, skipped))
    return Corpus(name, tuple(sorted(files)), skipped)


def has_text(path: Path | str) -> None:
    """Raises UserError where `from_path` would, and stops at the first text file: cheap on a large folder."""
    given = Path(os.path.expanduser(path))
    if os.path.exists(given) and any(_is_text(file) for _, file in _files(given.resolve())):
        return
    from_path(given)


def _no_text(given: Path, skipped: int) -> str:
    if given.is_file():
        what = "is not UTF-8 text" if given.stat().st_size else "is empty"
        return f"data.path {given} {what}; other encodings: iconv -f LATIN1 -t UTF-8 IN > OUT"
    if skipped:
        return (
            f"data.path {given} holds no UTF-8 text: none of its {skipped} files that are not empty or hidden is text"
        )
    return f"data.path {given} holds no text files"


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, absolute path) of the regular files under path, or of path itself."""
    if path.is_file():
        yield path.name, path
        return

    def refuse(error: OSError) -> None:
        raise UserError(f"data.path: {error.filename} can not be read: {error.strerror}")

    for folder, folders, files in os.walk(path, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():  # a pipe would block, a broken link fail
                yield file.relative_to(path).as_posix(), file


def _open(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"data.path: {path} can not be read: {error.strerror}") from error


def _is_text(path: Path) -> bool:
    """Whether the beginning is UTF-8 without NUL, and not empty. UTF-16 and Latin-1 are not."""
    with _open(path) as file:
        head = file.read(SNIFF_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # incremental: the last character may be cut
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head


def digest(corpus: Corpus) -> str:
    """sha256 over names, lengths and bytes of all files: equal exactly where the corpus is the same."""
    total = hashlib.sha256()
    for name, path in corpus.files:
        with _open(path) as file:
            content = hashlib.file_digest(file, "sha256").digest()
        total.update(hashlib.sha256(os.fsencode(name)).digest() + content)
    return total.hexdigest()


def split(corpus: Corpus) -> Split:
    """Cuts a corpus into training and validation, the same way wherever the files are the same.

    By file, where a hash of the name chooses one in 20 and that comes to 1% to 20% of the bytes: a file then stays on
    its side when others are added. Else, with few files or very unequal ones, the last tenth of each file is
    validation, from the beginning of a line on; one file, even of one line, gives both sides.
    """
    documents = [Document(name, path, 0, path.stat().st_size) for name, path in corpus.files]
    validation = tuple(document for document in documents if _chosen(document.name))
    part = sum(document.num_bytes for document in validation)
    if 0.01 <= part / sum(document.num_bytes for document in documents) <= 0.2:
        return Split(tuple(document for document in documents if not _chosen(document.name)), validation)
    cuts = [_cut(document) for document in documents]
    heads = [Document(d.name, d.path, 0, cut) for d, cut in zip(documents, cuts, strict=True)]
    tails = [Document(d.name, d.path, cut, d.stop) for d, cut in zip(documents, cuts, strict=True)]
    return Split(tuple(d for d in heads if d.num_bytes), tuple(d for d in tails if d.num_bytes))


def _chosen(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "little") % VALIDATION_PARTS == 0


def _cut(document: Document) -> int:
    """The byte at which the tail of a file begins: a line's beginning near it, else a character's."""
    wanted = int(document.stop * (1 - TAIL_FRAC))
    with _open(document.path) as file:
        file.seek(wanted)
        after = file.read(1 << 16)
    line = after.find(b"\n") + 1
    if line and wanted + line < document.stop:
        return wanted + line
    character = next((i for i, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)  # 10xxxxxx goes on a character
    return wanted + character


def pieces(document: Document) -> Iterator[str]:
    """The document's text in pieces that end at line ends, about 256 KiB each (a longer line is cut, up to twice that).

    Tokens do not run from one piece into the next, so where pieces end belongs to the format; it depends on the bytes
    alone. Memory is that of a piece.
    """
    encoding = "utf-8-sig" if document.start == 0 else "utf-8"  # a byte order mark is one at the beginning only
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)("replace"), translate=True)
    with _open(document.path) as file:
        file.seek(document.start)
        left = document.num_bytes
        while left > 0:
            block = file.read(min(PIECE_BYTES, left))
            block += file.readline(min(PIECE_BYTES, left - len(block))) if len(block) < left else b""
            if not block:
                raise UserError(f"{document.path} became shorter while it was read; start again")
            left -= len(block)
            text = decoder.decode(block, final=left == 0)
            if text:
                yield text
