"""How many cores this process may use, and how much memory is free. Needs no torch."""

import contextlib
import math
import os
from pathlib import Path

import psutil

from paceline.base.cores import physical_cores


def usable_cores() -> int:
    """Returns the physical cores that this process may use, limited by its affinity mask and the cgroup's quota."""
    machine = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, int(min(len(physical_cores()) or machine, machine, cgroup_quota())))


def cgroup_quota() -> float:
    """Returns the CPUs that the cgroup (v2, then v1) grants; infinity without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        base = Path("/sys/fs/cgroup/cpu")
        quota_us = int((base / "cpu.cfs_quota_us").read_text())
        return quota_us / int((base / "cpu.cfs_period_us").read_text()) if quota_us > 0 else math.inf
    return math.inf


_CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Returns the bytes that processes may still use: the machine's free memory, limited by the cgroup."""
    return min(psutil.virtual_memory().available, _left_in_cgroup(_CGROUPS))


def _left_in_cgroup(root: Path) -> int:
    """Returns the bytes that a container's cgroup (v2, then v1) still grants; the largest int64 without a limit. Its
    usage includes the file cache, of which the kernel can free what was not read lately."""
    for folder, limit, usage, cached in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(counts.get(cached, 0))
            return max(0, int((folder / limit).read_text()) - used)
        except (OSError, ValueError):  # ValueError: "max" stands for no limit
            continue
    return (1 << 63) - 1
