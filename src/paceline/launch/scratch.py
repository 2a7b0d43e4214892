"""A folder in which the ranks of a launcher tell it how they end. It goes with the launcher; after kill -9 of that,
with the next one that starts here."""

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
_YOUNG_S = 60.0  # one that was made just now may not be locked yet


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields an empty folder of this process's own, in the system's place for such; removes what dead launchers of this
    user have left there.

    Alive is who holds the folder's lock. The kernel drops that with the process, and knows it across containers that
    share the place, where a pid would say nothing.
    """
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made, filelock.FileLock(Path(made) / _LOCK):
        inside = Path(made) / "ranks"
        inside.mkdir()
        yield inside


def _sweep(place: Path) -> None:
    with contextlib.suppress(OSError, NotImplementedError):  # tidying up stops nobody
        for folder in list(place.glob(f"{_PREFIX}*")):
            if _is_ours_and_old(folder):
                with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / _LOCK, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_ours_and_old(folder: Path) -> bool:
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())
    return is_ours and time.time() - found.st_mtime > _YOUNG_S
