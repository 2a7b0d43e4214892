"""One file of a checkpoint: safetensors, written from host memory, and read slice by slice with the library.

A complete tensor is stored under its name in its shape, for any reader of safetensors; a part of a tensor is stored
flat, under `name[start:stop]`. Nothing here unpickles or follows a symbolic link.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from paceline.base import faults
from paceline.base.files import sha256_of
from paceline.base.ownership import Slice
from paceline.base.units import dtype_name

Progress = Callable[[], object]  # called after every 8 MiB that are read
Shapes = Mapping[str, tuple[int, ...]]
Bytes = bytes | memoryview
Data = npt.NDArray[np.uint8]  # the bytes of a file
K = TypeVar("K", bound=str)

CHUNK_BYTES = 8 << 20  # bytes that are written and read at a time
CODES = {  # of what can be stored
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
_BY_CODE = {code: dtype for dtype, code in CODES.items()}
_BY_NAME = {dtype_name(dtype): dtype for dtype in CODES}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a manifest's name, such as "float32". Raises ValueError for an unknown name."""
    if name not in _BY_NAME:
        raise ValueError(f"unknown dtype {name!r}")
    return _BY_NAME[name]


def write(path: Path, copies: Mapping[Slice, torch.Tensor], shapes: Shapes, step: int) -> dict[str, Any]:
    """Writes a new file with these slices of tensors of these shapes, flat in host memory. Returns its size and sha256
    when it is on the disk, which has returned the same bytes. Raises OSError with the path."""
    header: dict[str, Any] = {}
    begin = 0
    # The library's writer would neither tell the digest of what it writes nor stop between two chunks.
    items = sorted(copies, key=lambda item: -copies[item].element_size())  # so that all are aligned
    for item in items:
        key, shape = _key(item, shapes[item.name]), list(shapes[item.name])
        end = begin + copies[item].nbytes
        header[key] = {
            "dtype": CODES[copies[item].dtype],
            "shape": shape if key == item.name else [item.num_elements],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def content() -> Iterator[Bytes]:
        yield len(text).to_bytes(8, "little") + text
        for item in items:
            data = copies[item].view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]

    return write_checked(path, content(), step)


def write_checked(path: Path, content: Iterable[Bytes], step: int = 0) -> dict[str, Any]:
    """Writes a new file that only its owner can read, and compares what is on the disk with it. Returns its size and
    sha256. Raises OSError with the path. step: for injected faults."""
    digest, num_bytes = hashlib.sha256(), 0
    with _naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for chunk in content:
                digest.update(chunk)
                num_bytes += len(chunk)
                left = memoryview(chunk)
                while len(left):
                    left = left[file.write(left) :]
                    faults.strike("save.write", step)
            faults.strike("save.sync", step)
            os.fsync(descriptor)
            _drop_from_cache(descriptor)
        faults.strike("save.verify", step)
        if sha256_of(path) != digest.hexdigest():
            raise OSError(errno.EIO, "the disk returns other bytes than were written", str(path))
        with open_regular(path) as file:
            _drop_from_cache(file.fileno())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def _drop_from_cache(descriptor: int) -> None:
    """Drops a file from the page cache: the next read comes from the disk, and training data keeps the cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[Any]:
    """Yields the file, unbuffered. Raises OSError for a link, which could lead out of the folder, or a pipe."""
    with _naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "is not a plain file", str(path))
            yield file


def read_whole(path: Path, num_bytes: int, progress: Progress) -> tuple[Data, str]:
    """Returns a file's bytes, at most so many, and their sha256, in one pass. Raises OSError."""
    data, digest, end = np.empty(num_bytes, np.uint8), hashlib.sha256(), 0
    with open_regular(path) as file:
        while size := file.readinto(data[end : end + CHUNK_BYTES]):
            digest.update(data[end : end + size].data)
            end += size
            progress()
    return data, digest.hexdigest()


Place = tuple[Slice, Slice, torch.Tensor]  # a stored slice, a part of it, and what gets that part, flat


def read(path: Path, places: Iterable[Place], shapes: Shapes, progress: Progress, data: Data | None) -> None:
    """Fills tensors of the CPU from a verified file, by `places`. data: its bytes, where this rank verified them; else
    they are read. Raises ValueError if what it holds under a name has not the dtype or the size that its manifest
    says."""
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(safe_open(path, framework="pt")) if data is None else _Verified(data)
            for stored, part, out in places:
                key = _key(stored, shapes[stored.name])
                flat = file.get_tensor(key).view(-1)  # mapped: only what is copied is read
                if flat.dtype != out.dtype or len(flat) != stored.num_elements:
                    raise ValueError(f"{key} is {flat.dtype}, {len(flat)}")
                step = CHUNK_BYTES // out.element_size()
                for begin in range(0, len(out), step):
                    end = min(begin + step, len(out))
                    out[begin:end] = flat[part.start - stored.start + begin : part.start - stored.start + end]
                    progress()
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:  # RecursionError is one
        raise ValueError(f"{path.name} is not what its manifest says: {error}") from None


class _Verified:
    """The tensors in the bytes of a file."""

    def __init__(self, data: Data):
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        self._header, self._data = json.loads(data[8:begin].tobytes()), data[begin:]

    def get_tensor(self, key: str) -> torch.Tensor:
        entry = self._header[key]
        begin, end = entry["data_offsets"]
        return torch.from_numpy(self._data[begin:end]).view(_BY_CODE[entry["dtype"]])


def _key(item: Slice, shape: Iterable[int]) -> str:
    """Returns the name in a file of a slice of a tensor of this shape."""
    is_complete = item.start == 0 and item.stop == math.prod(shape)
    return item.name if is_complete else f"{item.name}[{item.start}:{item.stop}]"


@contextlib.contextmanager
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


class HostCopies:
    """Flat copies of tensors in host memory, whose memory every save reuses; pinned if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, Slice, torch.dtype], torch.Tensor] = {}

    def copy(
        self, parts: Mapping[K, Mapping[Slice, torch.Tensor]], ready: torch.cuda.Event | None
    ) -> dict[K, dict[Slice, torch.Tensor]]:
        """Returns copies of tensors by kind and slice, valid until the next call."""
        wanted = {(kind, item, tensor.dtype): tensor for kind, part in parts.items() for item, tensor in part.items()}
        # Free what is of no use before more is allocated.
        self._copies = {place: copy for place, copy in self._copies.items() if place in wanted}
        with _own_stream(ready):
            for place, tensor in wanted.items():
                if place not in self._copies:
                    self._copies[place] = torch.empty(
                        tensor.numel(), dtype=tensor.dtype, pin_memory=ready is not None and tensor.numel() > 0
                    )
                target, source = self._copies[place], tensor.detach()
                if source.device.type == "cpu":  # by numpy: one thread, and it releases the GIL
                    flat = source.contiguous().view(-1).view(torch.uint8).numpy()
                    np.copyto(target.view(torch.uint8).numpy(), flat)
                else:
                    target.copy_(source.reshape(-1), non_blocking=ready is not None)
        return {
            kind: {item: self._copies[kind, item, tensor.dtype] for item, tensor in part.items()}
            for kind, part in parts.items()
        }


@contextlib.contextmanager
def _own_stream(ready: torch.cuda.Event | None) -> Iterator[None]:
    """Copies inside start once the tensors are computed, wait for no later work, and are complete at the end."""
    if ready is None:
        yield
        return
    stream = torch.cuda.Stream(ready.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        yield
        stream.synchronize()
