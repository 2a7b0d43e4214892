"""How much memory this host has left. Needs no torch."""

from pathlib import Path

import psutil

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
