"""One file of a checkpoint: what its writer owned, as safetensors, streamed from memory to the disk and back.

A file is 8 bytes with the header's length, a JSON header, then the elements of its pieces one behind the other. A whole
tensor stands under its name and in its shape, so that any reader of safetensors can use what one writer wrote; a part
is flat, under `name[start:stop]`. Nothing here unpickles, follows a symbolic link, or believes a length it has not
compared with the file's.
"""

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.base.ownership import Slice

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 8 << 20  # hashing, writing and reading release the interpreter's lock for so long at a time
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own bound
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name a manifest has for a dtype: "float32". Raises ValueError for one that cannot be kept."""
    if dtype not in _CODES:
        raise ValueError(f"tensors of {dtype} cannot be kept in a checkpoint")
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a manifest's name. Raises ValueError where there is none."""
    if name not in _BY_NAME:
        raise ValueError(f"unknown dtype {name!r}")
    return _BY_NAME[name]


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor, and under which key and in which shape a file has them."""

    key: str
    item: Slice
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.item.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What a file holds: its first bytes, then the pieces' elements in this order."""

    pieces: tuple[Piece, ...]
    header: bytes

    @property
    def num_data_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def lay_out(items: Mapping[Slice, torch.dtype], shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Returns the layout of these slices of tensors with these shapes, the same for any order they are given in.

    Wide elements come first, so each piece begins where its elements may be read in place.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    pieces: list[Piece] = []
    begin = 0
    for item in sorted(items, key=lambda item: (-items[item].itemsize, item)):
        whole = tuple(shapes[item.name])
        is_whole = item.start == 0 and item.stop == math.prod(whole)
        key, shape = (item.name, whole) if is_whole else (part_key(item), (item.num_elements,))
        piece = Piece(key, item, items[item], shape)
        end = begin + piece.num_bytes
        entries[key] = {"dtype": _CODES[piece.dtype], "shape": list(shape), "data_offsets": [begin, end]}
        pieces.append(piece)
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(tuple(pieces), len(text).to_bytes(8, "little") + text)


def part_key(item: Slice) -> str:
    """Returns the key of a part of a tensor."""
    return f"{item.name}[{item.start}:{item.stop}]"


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor in the host's memory; in place where it is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()


def chunks(layout: Layout, image: torch.Tensor) -> Iterator[Bytes]:
    """Yields a file's bytes: the header, then `image`, its pieces as they lie in memory; two chunks of it at least, so
    that a small file has a middle, too."""
    yield np.frombuffer(layout.header, dtype=np.uint8)
    data = image.numpy()
    size = min(CHUNK_BYTES, max(8, (len(data) // 2 + 7) // 8 * 8))
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@dataclass(frozen=True)
class Written:
    """Size and digest of a file, of the bytes as they were in memory when they were written."""

    num_bytes: int
    sha256: str


class NewFile:
    """A file that is being written, for its owner only; hashed on the way. Raises OSError that names it."""

    def __init__(self, path: Path):
        self.path = path
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        with _naming(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    def write(self, chunk: Bytes) -> None:
        """Appends the bytes."""
        view = chunk.data
        self._digest.update(view)
        self._num_bytes += len(view)
        with _naming(self.path):
            while len(view):
                view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        """Returns when all of it is on the disk, and in the disk only: what is read next comes from there."""
        with _naming(self.path):
            os.fsync(self._descriptor)
            _forget(self._descriptor)

    def close(self) -> Written:
        """Returns what it holds."""
        os.close(self._descriptor)
        return Written(self._num_bytes, self._digest.hexdigest())


def require_same(path: Path, expected: Iterable[Bytes]) -> None:
    """Returns if the disk holds the bytes that memory has; raises OSError where it does not.

    Comparing takes an eighth of the time of a second digest (5.0 and 0.6 GB/s here).
    """
    with open_regular(path) as file, _naming(path):
        descriptor = file.fileno()
        room = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for chunk in expected:
            for begin in range(0, len(chunk), CHUNK_BYTES):
                wanted = torch.from_numpy(_writable(chunk[begin : begin + CHUNK_BYTES]))
                found = room[: len(wanted)]
                num_bytes = file.readinto(found.numpy())
                if num_bytes != len(wanted) or not _are_equal(found, wanted):
                    raise OSError(errno.EIO, "the disk gives back other bytes than were written to it", str(path))
        _forget(descriptor)


def require_digest(path: Path, sha256: str) -> None:
    """`require_same` for bytes that memory has no longer."""
    if digest(path) != sha256:
        raise OSError(errno.EIO, "the disk gives back other bytes than were written to it", str(path))
    with open_regular(path) as file:
        _forget(file.fileno())


def digest(path: Path) -> str:
    """Returns the sha256 of a file's bytes as they are now."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file for its owner only and returns when it is on the disk."""
    file = NewFile(path)
    try:
        file.write(np.frombuffer(data, dtype=np.uint8))
        file.sync()
    finally:
        file.close()


@contextmanager
def open_regular(path: Path) -> Iterator[Any]:
    """Yields the file, unbuffered, open for reading. Raises OSError for what is not a plain file: a link could lead out
    of the folder, and a pipe would be waited for."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "is not a plain file", str(path))
            yield file


class Reader:
    """Reads elements of the pieces of one verified file, and not more of it than is asked for."""

    def __init__(self, file: Any, path: Path, wanted: Iterable[Piece]):
        """`wanted` are the pieces that will be read. Raises ValueError where the header says otherwise of them."""
        self._descriptor, self._path = file.fileno(), path
        self._num_bytes = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if not 0 < length <= min(_MOST_HEADER_BYTES, self._num_bytes - 8):
            raise ValueError(f"{path.name} is no safetensors file: its header would have {length} bytes")
        self._first = 8 + length
        try:
            entries = json.loads(os.pread(self._descriptor, length, 8))
            self._begins = {piece.item: self._begin(entries[piece.key], piece) for piece in wanted}
        except (KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path.name}: its header does not hold what its manifest says ({error})") from None

    def read(self, item: Slice, part: Slice, out: torch.Tensor) -> None:
        """Fills `out`, flat, with the elements `part` of the piece `item`."""
        offset = self._begins[item] + (part.start - item.start) * out.element_size()
        room = bytes_of(out).data
        while len(room):
            num_read = os.preadv(self._descriptor, [room[: 64 << 20]], offset)
            if not num_read:
                raise OSError(errno.EIO, "ends before its tensors do", str(self._path))
            room, offset = room[num_read:], offset + num_read

    def _begin(self, entry: dict[str, Any], piece: Piece) -> int:
        """Where in the file the piece begins."""
        begin, end = entry["data_offsets"]
        is_right = entry["dtype"] == _CODES[piece.dtype] and tuple(entry["shape"]) == piece.shape
        if not is_right or type(begin) is not int or begin < 0 or end != begin + piece.num_bytes:
            raise ValueError(f"{self._path.name}: {piece.key} is not what its manifest says: {entry}")
        if self._first + end > self._num_bytes:
            raise ValueError(f"{self._path.name} ends before {piece.key} does")
        return self._first + begin


def write_file(
    path: Path, content: Iterable[Bytes], passed: Callable[[int], object], before_sync: Callable[[], object]
) -> Written:
    """Returns what was written and is on the disk. `passed` is called after each chunk with its bytes."""
    file = NewFile(path)
    try:
        for chunk in content:
            file.write(chunk)
            passed(len(chunk))
        before_sync()
        file.sync()
    finally:
        written = file.close()
    return written


def file_facts(written: Written, layout: Layout) -> dict[str, Any]:
    """Returns what a manifest says of a file."""
    pieces = [[piece.key, piece.item.name, piece.item.start, piece.item.stop] for piece in layout.pieces]
    return {"bytes": written.num_bytes, "sha256": written.sha256, "pieces": pieces}


def dtype_names(layout: Layout) -> dict[str, str]:
    """Returns the dtypes of the tensors that a file has elements of, by name. Raises ValueError where one has two."""
    found: dict[str, str] = {}
    for piece in layout.pieces:
        name = dtype_name(piece.dtype)
        if found.setdefault(piece.item.name, name) != name:
            raise ValueError(f"{piece.item.name} is of {found[piece.item.name]} and of {name}")
    return found


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Eight bytes at a time, which is five times faster than one."""
    words = len(a) // 8 * 8
    return torch.equal(a[:words].view(torch.int64), b[:words].view(torch.int64)) and torch.equal(a[words:], b[words:])


def _writable(chunk: Bytes) -> Bytes:
    """torch warns of memory that it could not write to: the header's few bytes are copied."""
    return chunk if chunk.flags.writeable else chunk.copy()


def _forget(descriptor: int) -> None:
    """Drops a file's clean pages from memory, where the system can: training's data needs them more."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error about an open file does not say which: this one does."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
