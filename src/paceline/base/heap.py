"""How glibc keeps the memory of a training process. Imports no torch: its threads would have arenas before."""

import contextlib
import ctypes
import sys

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_ARENA_MAX = -3, -1, -8  # malloc.h


def keep_freed_memory() -> None:
    """Asks glibc to keep large freed buffers, else each step on CPUs would fault them in again, and to keep them in one
    arena, else every thread that allocates would keep its own (docs/LOG.md)."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError, OSError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_ARENA_MAX, 1)
