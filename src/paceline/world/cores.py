"""How many cores this process may use, and how much memory is free. Needs no torch."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from paceline.base.cores import physical_cores

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Returns the physical cores that this process may use, limited by its affinity mask and its cgroups' quotas."""
    machine = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, int(min(len(physical_cores()) or machine, machine, cgroup_quota())))


def cgroup_quota() -> float:
    """Returns the CPUs that this process's cgroup and those above it grant; infinity without a limit."""
    return min(map(_quota, _own_groups("cpu")), default=math.inf)


def free_memory() -> int:
    """Returns the bytes that processes may still use: the machine's free memory, limited by the cgroups."""
    return min([psutil.virtual_memory().available, *map(_left, _own_groups("memory"))])


def _own_groups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroup and of those above it, by the controller (v1) and of v2. In a
    container the path may be that on the host: then only the top exists, which is the container's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                group = Path(path.lstrip("/"))
                top = _CGROUPS / controller if controllers else _CGROUPS
                yield from (top / folder for folder in (group, *group.parents))


def _quota(group: Path) -> float:
    """Returns the CPUs that a cgroup (v2, then v1) grants; infinity without a limit."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max" stands for no limit
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        return quota_us / int((group / "cpu.cfs_period_us").read_text()) if quota_us > 0 else math.inf
    return math.inf


def _left(group: Path) -> int:
    """Returns the bytes that a cgroup (v2, then v1) still grants; the largest int64 without a limit. Its usage includes
    the file cache, of which the kernel can free what was not read lately."""
    for limit, usage, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / usage).read_text()) - int(counts.get(cached, 0))
            return max(0, int((group / limit).read_text()) - used)
    return (1 << 63) - 1
