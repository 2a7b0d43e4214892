"""This machine's processor: its name, and the physical cores that this process may use."""

import contextlib
import functools
import os
import platform
import re
from pathlib import Path


def cpu_name() -> str:
    """Returns the name of this machine's processor."""
    return _said_of_cpu("model name") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Returns the names of the processor's abilities, as Linux has them: flags on x86, Features on ARM."""
    return set((_said_of_cpu("flags") or _said_of_cpu("Features")).split())


@functools.cache
def is_amd_with_avx512() -> bool:
    """Whether this machine's processor is AMD's and has AVX-512: since Zen 4."""
    return "AMD" in cpu_name() and "avx512f" in cpu_flags()


@functools.cache
def has_wide_units() -> bool:
    """Whether an AMD processor computes 512 bits at once: since Zen 5, family 26. Zen 4 takes two turns of 256."""
    return int(_said_of_cpu("cpu family") or 0) >= 26


def _said_of_cpu(field: str) -> str:
    match = re.search(rf"^{field}\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return match[1] if match else ""


@functools.cache
def _cpuinfo() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text(errors="replace")
    return ""


def physical_cores() -> tuple[int, ...]:
    """Returns one usable logical CPU for each physical core; empty where a process cannot be pinned (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    first: dict[str, int] = {}  # by hardware threads of one core
    for number in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text().strip() if siblings.exists() else str(number), number)
    return tuple(first.values())
