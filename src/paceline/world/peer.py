"""The processes of a world, and whether they live."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.base.parent import start_ticks
from paceline.world.env import Environment


@dataclass(frozen=True, kw_only=True)
class Peer:
    rank: int
    host: str  # host name
    pid: int
    local_rank: int
    boot_id: str  # of the running kernel and pid namespace: `pid` means the same where it is equal
    born_ticks: int  # start in clock ticks since boot, because pids are used again; 0: unknown

    @property
    def shown(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs on this host; False for one of another host."""
        try:
            is_there = psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return is_there and self.boot_id == _namespace("pid") and self.born_ticks == start_ticks(self.pid)


def this_process(env: Environment) -> Peer:
    return Peer(
        rank=env.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        local_rank=env.local_rank,
        boot_id=_namespace("pid"),
        born_ticks=start_ticks(os.getpid()),
    )


def network_id() -> str:
    """Returns a text that is equal for processes that share loopback."""
    return _namespace("net")


def _namespace(kind: str) -> str:
    """This kernel's boot and this process's namespace: containers of one machine share the boot id, but not always pids
    or loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"
    except OSError:
        return socket.gethostname()
