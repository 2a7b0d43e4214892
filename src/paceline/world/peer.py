"""The processes of a world, and whether they live."""

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from paceline.base.cores import physical_cores
from paceline.base.process import namespace, start_ticks
from paceline.base.units import listed
from paceline.world.cores import cgroup_quota
from paceline.world.env import Environment


@dataclass(frozen=True, kw_only=True)
class Peer:
    rank: int
    host: str  # host name
    pid: int
    local_rank: int
    boot_id: str  # of the running kernel and pid namespace: `pid` means the same where it is equal
    born_ticks: int  # start in clock ticks since boot, because pids are used again; 0: unknown
    cores: str = ""  # names the processors that this rank may use; equal where ranks share them
    gpu: str = ""  # its UUID; empty: none, or not known

    @property
    def shown(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def machine(self) -> str:
        """A text that is equal for the processes of one host; several machines may have one host name."""
        return f"{self.host} {self.boot_id}"

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs on this host; False for one of another host."""
        try:
            is_there = psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return is_there and self.boot_id == namespace("pid") and self.born_ticks == start_ticks(self.pid)


def ranks_by_gpu(peers: Sequence[Peer]) -> dict[str, list[int]]:
    """Returns by UUID the ranks that compute on each GPU."""
    ranks: dict[str, list[int]] = {}
    for peer in peers:
        if peer.gpu:
            ranks.setdefault(peer.gpu, []).append(peer.rank)
    return ranks


def warn_of_shared_gpus(peers: Sequence[Peer]) -> tuple[str, ...]:
    """Returns a warning for each GPU on which several ranks compute."""
    return tuple(
        f"ranks {listed(ranks, 16)} share a GPU, as PACELINE_SHARE_GPU allows for tests: each waits for its turn"
        for ranks in ranks_by_gpu(peers).values()
        if len(ranks) > 1
    )


def this_process(env: Environment, gpu: str = "") -> Peer:
    return Peer(
        rank=env.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        local_rank=env.local_rank,
        boot_id=namespace("pid"),
        cores=_cores(),
        gpu=gpu,
        born_ticks=start_ticks(os.getpid()),
    )


def _cores() -> str:
    """Names this process's processors. Containers with a quota have processors of their own; without one they share the
    machine's."""
    machine = namespace("pid") if math.isfinite(cgroup_quota()) else namespace("pid").split()[0]
    return f"{machine} {sum(1 << core for core in physical_cores()):x}"
