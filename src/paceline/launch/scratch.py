"""A folder in which a launcher's ranks record how they end. The launcher removes it, or the next one after kill -9."""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

_PREFIX = "paceline-launcher-"
_LOCK = "lock"
_YOUNG_S = 60.0  # a new one may not be locked yet


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields an empty temporary folder; removes those of this user's dead launchers. A live one holds a lock on its
    folder: a pid would be ambiguous between containers that share the place."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made, filelock.FileLock(Path(made) / _LOCK):
        inside = Path(made) / "ranks"
        inside.mkdir()
        yield inside


def _sweep(place: Path) -> None:
    with contextlib.suppress(OSError, NotImplementedError):  # a failed clean-up must not stop a start
        for folder in list(place.glob(f"{_PREFIX}*")):
            if _is_ours_and_old(folder):
                with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / _LOCK, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_ours_and_old(folder: Path) -> bool:
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())
    return is_ours and time.time() - found.st_mtime > _YOUNG_S
