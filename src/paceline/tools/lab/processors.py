"""Limits CPU time: a cgroup for each host, version 1 or 2, with a quota in each short period.

All processes of a host together may use share x period of CPU time in a period, then they wait for the next one.
"""

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from paceline.base.errors import UserError
from paceline.tools.lab.system import mounts

# Of a lab, in /run and among cgroups. Labs with different names run beside each other.
NAME = "paceline-lab" + re.sub(r"\W", "-", os.environ.get("PACELINE_LAB", ""))
# A slow host must be slow evenly. After a wait a rank has the whole period's quota, so work of 10 ms at 35% runs at 77%
# of a core's speed with periods of 20 ms, at 40% with 5; in shorter ones, work of any length becomes slower than 35%
# (docs/LOG.md). The kernel's default is 100 ms.
_PERIOD_US = 5_000
_LEAST_QUOTA_US = 1_000  # that the kernel accepts
_PATIENCE_S = 5.0  # for killed processes to end


class Controller:
    """The cgroup controller of CPU time. `top` is the folder of a lab's groups."""

    def __init__(self, mount: Path, parent: Path, version: int):
        self.mount, self.top, self.version = mount, parent / NAME, version

    @classmethod
    def find(cls) -> "Controller":
        """Returns version 1's `cpu` controller, else version 2's. Raises UserError if neither is mounted."""
        mounted = mounts()
        for where, kind, options in mounted:
            if kind == "cgroup" and "cpu" in options:
                group = where / _own_group().lstrip("/")
                return cls(where, group if group.is_dir() else where, 1)
        for where, kind, _ in mounted:
            if kind == "cgroup2" and "cpu" in (where / "cgroup.controllers").read_text().split():
                return cls(where, where, 2)
        raise UserError(
            "no cgroup controller `cpu` is mounted here (version 1 or 2), so no host can have a share of the "
            "processors; leave --cpu out, or mount it"
        )

    def open(self) -> None:
        """Makes the folder of a lab's groups. Raises UserError on failure."""
        try:
            self.top.mkdir(exist_ok=True)
            if self.version == 2:
                for above in (self.top.parent, self.top):
                    (above / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            raise UserError(f"could not make the cgroup {self.top} for shares of the processors: {error}") from None

    def make(self, name: str, share: float | None) -> Path:
        """Makes the group of a host with this share, and returns its folder. Raises UserError on failure."""
        folder = self.top / name
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"could not make the cgroup {folder} of a host: {error.strerror}") from None
        set_share(folder, share)
        return folder


def remove_groups(top: Path) -> None:
    """Kills all processes in the groups of a lab under `top` and removes the groups, if there are any."""
    groups = [folder for folder in top.iterdir() if folder.is_dir()] if top.exists() else []
    deadline = time.monotonic() + _PATIENCE_S
    while not _removed([*groups, top]) and time.monotonic() < deadline:
        for pid in _pids(groups):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def set_share(folder: Path, share: float | None) -> None:
    """Sets a group's share, 1.0: the time of one core; None: no limit. Raises UserError if the kernel refuses, as it
    does for more than a parent group may use."""
    period_us = _PERIOD_US if share is None else max(_PERIOD_US, math.ceil(_LEAST_QUOTA_US / share))
    quota_us = None if share is None else round(share * period_us)
    try:
        if (folder / "cpu.cfs_quota_us").exists():  # version 1
            # Without a limit first: of a new period and the old quota the kernel may refuse the share.
            (folder / "cpu.cfs_quota_us").write_text("-1")
            (folder / "cpu.cfs_period_us").write_text(str(period_us))
            if quota_us is not None:
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
    except OSError as error:
        raise UserError(f"the kernel refuses a share of {share} of a core for {folder}: {error.strerror}") from None


def enter(folder: Path) -> None:
    """Moves this process and its later children into a group."""
    (folder / "cgroup.procs").write_text("0")


def _own_group() -> str:
    """Returns this process's group under version 1's `cpu`, whose limit also holds for a lab."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return path
    return "/"


def _removed(folders: Iterable[Path]) -> bool:
    """Whether all of these are removed; the kernel refuses while a process is in one."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _pids(groups: Iterable[Path]) -> list[int]:
    pids = []
    for folder in groups:
        with contextlib.suppress(OSError):
            pids += [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    return pids
