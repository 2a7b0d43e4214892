"""A process's start time, and how a process ends with its parent."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from paceline.base.errors import EXIT_FAILED
from paceline.base.say import say


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when its parent ends; else ranks keep training after kill -9 of a launcher.

    parent: its pid. If it is dead already, this process says so and ends at once. None: the parent if that is torchrun;
    processes that a shell started (ssh, nohup) outlive it.
    """
    if sys.platform != "linux" or (parent is None and "TORCHELASTIC_RUN_ID" not in os.environ):
        return
    pr_set_pdeathsig = 1  # linux/prctl.h
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        say(
            f"error: pid {parent}, which PACELINE_LAUNCHER names or which started this process, is not its parent: it "
            "has ended, or the environment is a copy of a rank's (unset PACELINE_LAUNCHER)"
        )
        os._exit(EXIT_FAILED)


def start_ticks(pid: int) -> int:
    """Returns when a process of this host started, in clock ticks since boot; 0 if the system does not tell. With the
    pid this is unique: psutil's seconds since 1970 change when the clock is set."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # starttime, proc(5)
    return 0
