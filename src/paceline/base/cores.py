"""Finds the physical cores that this process may use."""

import os
from pathlib import Path


def physical_cores() -> tuple[int, ...]:
    """Returns one usable logical CPU for each physical core; empty where a process cannot be pinned (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    first: dict[str, int] = {}  # by hardware threads of one core
    for number in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text().strip() if siblings.exists() else str(number), number)
    return tuple(first.values())
