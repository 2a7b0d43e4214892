"""Locks between processes, by flock(2) of a file. The kernel releases one when its process ends."""

from pathlib import Path
from typing import Any

import filelock


def file_lock(path: Path, **options: Any) -> filelock.FileLock:
    """Returns filelock's lock of this file, which stays. Where the file system has no flock, acquiring it raises
    OSError (ENOSYS): filelock's own substitute, a file that is there, would outlive a process that is killed."""
    return filelock.FileLock(path, fallback_to_soft=False, **options)
