"""One file of a checkpoint: safetensors, written from host memory and read back slice by slice.

A file is 8 bytes with the header's length, a JSON header, then the elements of its slices. A complete tensor is stored
under its name in its shape, for any reader of safetensors; a part of a tensor is stored flat, under `name[start:stop]`.
Nothing here unpickles, follows a symbolic link, or trusts a length before comparing it with the file's size.
"""

import contextlib
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
from paceline.base.units import dtype_name

Bytes = npt.NDArray[np.uint8]
Strike = Callable[[str], object]  # injects faults: called with the name of each phase

CHUNK_BYTES = 8 << 20  # bytes that are written, read and compared at a time
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
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
_BY_NAME = {dtype_name(dtype): dtype for dtype in _CODES}


def can_store(dtype: torch.dtype) -> bool:
    return dtype in _CODES


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a manifest's name, such as "float32". Raises ValueError for an unknown name."""
    if name not in _BY_NAME:
        raise ValueError(f"unknown dtype {name!r}")
    return _BY_NAME[name]


@dataclass(frozen=True)
class Entry:
    """A slice of a tensor in a file: its key in the header and its shape there."""

    key: str
    item: Slice
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.item.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What a file holds: its header, then the elements of the entries in this order."""

    header: bytes  # padded to a multiple of 8 bytes, so that the elements are aligned
    entries: tuple[Entry, ...]
    tensors: dict[str, dict[str, Any]]  # name -> shape and dtype of the complete tensor, as in the manifest

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(entry.num_bytes for entry in self.entries)


def lay_out(items: Mapping[Slice, torch.dtype], shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Returns the layout of these slices of tensors with these shapes, for any order of `items` the same. Wide elements
    come first, so all are aligned. Raises ValueError for a dtype that cannot be stored."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    entries: list[Entry] = []
    tensors: dict[str, dict[str, Any]] = {}
    begin = 0
    for item in sorted(items, key=lambda item: (-items[item].itemsize, item)):
        dtype, full_shape = items[item], tuple(shapes[item.name])
        if dtype not in _CODES:
            raise ValueError(f"{item.name}: tensors of {dtype} cannot be stored in a checkpoint")
        is_complete = item.start == 0 and item.stop == math.prod(full_shape)
        key = item.name if is_complete else f"{item.name}[{item.start}:{item.stop}]"
        entry = Entry(key, item, dtype, full_shape if is_complete else (item.num_elements,))
        end = begin + entry.num_bytes
        header[key] = {"dtype": _CODES[dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        tensors[item.name] = {"shape": list(full_shape), "dtype": dtype_name(dtype)}
        entries.append(entry)
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, tuple(entries), tensors)


def file_facts(layout: Layout, image: Bytes) -> dict[str, Any]:
    pieces = [[entry.key, entry.item.name, entry.item.start, entry.item.stop] for entry in layout.entries]
    return {"bytes": len(image), "sha256": hashlib.sha256(image.data).hexdigest(), "pieces": pieces}


# ---- writing ----


def chunks(image: Bytes) -> Iterator[Bytes]:
    for begin in range(0, len(image), CHUNK_BYTES):
        yield image[begin : begin + CHUNK_BYTES]


def write_checked(path: Path, image: Bytes, strike: Strike = lambda phase: None) -> None:
    """Writes a new file and compares what is on the disk with it. Raises OSError with the path."""
    write_file(path, chunks(image), strike)
    strike("save.verify")
    with open_regular(path) as file, _naming(path):
        found = np.empty(CHUNK_BYTES, dtype=np.uint8)
        for chunk in chunks(image):
            num_bytes = file.readinto(found[: len(chunk)])
            if not np.array_equal(found[:num_bytes], chunk):
                raise not_as_written(path)
        _drop_from_cache(file.fileno())


def write_file(path: Path, content: Iterable[Bytes], strike: Strike = lambda phase: None) -> None:
    """Writes a new file that only its owner can read; returns when it is on the disk and not in the page cache."""
    with _naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for chunk in content:
                left = chunk.data
                while len(left):
                    left = left[file.write(left) :]
                    strike("save.write")
            strike("save.sync")
            os.fsync(descriptor)
            _drop_from_cache(descriptor)


def not_as_written(path: Path) -> OSError:
    """Returns the error for a file that the disk did not store correctly."""
    return OSError(errno.EIO, "the disk returns other bytes than were written", str(path))


def _drop_from_cache(descriptor: int) -> None:
    """Drops a file from the page cache: the next read comes from the disk, and training data keeps the cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


# ---- reading ----


@contextmanager
def open_regular(path: Path) -> Iterator[Any]:
    """Yields the file, unbuffered. Raises OSError for a link, which could lead out of the folder, or a pipe."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "is not a plain file", str(path))
            yield file


class Reader:
    """Reads elements of some entries of a verified file, and no other bytes."""

    def __init__(self, file: Any, path: Path, wanted: Iterable[Entry]):
        """Raises ValueError if the file's header contradicts its manifest about a wanted entry."""
        self._descriptor, self._path = file.fileno(), path
        self._num_bytes = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, self._num_bytes - 8):
            raise ValueError(f"{path.name} is not a safetensors file: its header would have {length} bytes")
        self._data_begin = 8 + length
        try:
            header = json.loads(os.pread(self._descriptor, length, 8))
            self._begins = {entry.item: self._begin(header[entry.key], entry) for entry in wanted}
        except (KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path.name}: its header does not hold what its manifest says ({error})") from None

    def read(self, item: Slice, part: Slice, out: torch.Tensor, progress: Callable[[], object]) -> None:
        """Fills `out`, a flat tensor on the CPU, with the elements `part` of the stored slice `item`."""
        offset = self._begins[item] + (part.start - item.start) * out.element_size()
        left = out.view(torch.uint8).numpy().data
        while len(left):
            num_read = os.preadv(self._descriptor, [left[:CHUNK_BYTES]], offset)
            if not num_read:
                raise OSError(errno.EIO, "ends before its tensors do", str(self._path))
            left, offset = left[num_read:], offset + num_read
            progress()

    def _begin(self, stored: dict[str, Any], entry: Entry) -> int:
        begin, end = stored["data_offsets"]
        is_right = stored["dtype"] == _CODES[entry.dtype] and tuple(stored["shape"]) == entry.shape
        if not is_right or type(begin) is not int or begin < 0 or end != begin + entry.num_bytes:
            raise ValueError(f"{self._path.name}: {entry.key} is not what its manifest says: {stored}")
        if self._data_begin + end > self._num_bytes:
            raise ValueError(f"{self._path.name} ends before {entry.key} does")
        return self._data_begin + begin


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError of a call on an open file, which has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


# ---- host memory ----


def ready_event(tensors: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
    """Returns an event for when the GPU has computed these tensors; None if none is on a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class HostImages:
    """One buffer for each kind of file, reused by every save; pinned if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(
        self, kind: str, layout: Layout, tensors: Mapping[Slice, torch.Tensor], ready: torch.cuda.Event | None
    ) -> Bytes:
        """Returns the bytes of a file with these tensors, valid until the next copy of this kind."""
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) != layout.num_bytes:
            self._buffers.pop(kind, None)  # free it before the new one is allocated
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=ready is not None)
            self._buffers[kind] = buffer
        begin = len(layout.header)
        buffer[:begin] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        with self._own_stream(ready):
            for entry in layout.entries:
                target, source = buffer[begin : begin + entry.num_bytes], tensors[entry.item].detach()
                if source.device.type == "cpu":  # by numpy: one thread, and it releases the GIL
                    np.copyto(target.numpy(), source.contiguous().view(-1).view(torch.uint8).numpy())
                else:
                    target.view(entry.dtype).copy_(source.reshape(-1), non_blocking=ready is not None)
                begin += entry.num_bytes
        return buffer.numpy()

    @contextlib.contextmanager
    def _own_stream(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Copies inside start once the tensors are computed, wait for no later work, and are complete at the end."""
        if ready is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(ready.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield
            self._stream.synchronize()
