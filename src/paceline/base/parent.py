"""The tie between a process and the one that started it."""

import contextlib
import ctypes
import os
import signal
import sys


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when its parent ends: kill -9 of a launcher leaves ranks training otherwise.

    parent: its pid, where it is known: a parent that died before it was asked about is a reason to end at once.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1  # linux/prctl.h
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
