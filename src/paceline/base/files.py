"""Files that survive a crash: complete on the disk, or absent."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 8 << 20
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)


def exists(path: Path) -> bool:
    """Whether there is anything at this path. Raises OSError if that cannot be told, as for a name of 300 characters or
    in a folder that may not be entered: there `Path.exists` says no since Python 3.14."""
    try:
        path.stat()
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    return True


def sync(path: Path) -> None:
    """Returns when a file is on the disk; for a folder, its list of names: without it a crash can undo a rename. Some
    shared file systems cannot do that for a folder: they are left alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def set_mode(path: Path, mode: int) -> None:
    """Sets the permissions, where the file system has any: CIFS, exFAT and mounted buckets refuse."""
    with contextlib.suppress(OSError):
        path.chmod(mode)


def write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a file and returns when it is on the disk. A new file gets `mode` less the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replaces a file by writing a second one and renaming it: a crash leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)  # a file that a crash left keeps its mode
    write_synced(aside, data, mode)
    os.replace(aside, path)


def tail(path: Path, num_bytes: int) -> bytes:
    """Returns the last bytes of a file, at most so many; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            return file.read()
    except OSError:
        return b""


def sha256_of(path: Path, progress: Callable[[], object] = lambda: None) -> str:
    """Returns the hex digest of a file's bytes. Calls `progress` after every 8 MiB."""
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(chunk):
            digest.update(chunk[:num_bytes])
            progress()
    return digest.hexdigest()
