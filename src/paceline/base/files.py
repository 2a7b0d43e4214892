"""Files that survive: on the disk and not only in memory, whole or not at all."""

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Returns when a file, or a folder's list of names, is on the disk: without the second a rename can be lost."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a file and returns when it is on the disk. A new one gets this mode, less what the umask takes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def replace(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a whole file aside, with this mode less what the umask takes, and renames it in: a crash leaves either the
    old file or the new one."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)  # what a crash left has a mode of its own
    write_synced(aside, data, mode)
    os.replace(aside, path)


def sha256_of(path: Path) -> str:
    """Returns the hex digest of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
