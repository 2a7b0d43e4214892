"""The first process of a host: makes the host, starts its ranks, reports their end to the lab.

running.py runs it as `python -m paceline.tools.lab.inside FD` in new namespaces. FD is a connection to the lab. It
receives Orders, then a request to start, then signals to pass on; it sends True when the host is made, (rank, exit
status) when a rank has ended, and a text if something failed. The connection closes when the lab ends, and the kernel
ends all processes of a host with the first one.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from paceline.base.errors import PacelineError
from paceline.tools.lab.processors import enter
from paceline.tools.lab.system import call

_LAST_WORDS_S = 1.0  # for output that a rank left; a process that it started may keep the pipe open


@dataclass(frozen=True, kw_only=True)
class Orders:
    name: str
    names: str  # the file to mount as /etc/hosts
    scratch: str  # an empty folder
    group: str  # its cgroup's folder; empty: none
    group_mount: str  # mount point of the cgroups that limit CPU time
    cores: list[int]
    command: list[str]  # of its ranks
    environments: list[dict[str, str]]  # of its ranks, added to that of this process


def main() -> None:
    lab: Connection = Connection(int(sys.argv[1]))
    orders = _next(lab)
    try:
        _make_host(orders)
        lab.send(True)
        _next(lab)
        _run(orders, lab)
    except (PacelineError, OSError) as error:
        with contextlib.suppress(OSError):
            lab.send(f"host {orders.name}: {error}")
        _next(lab)


def _next(lab: Connection) -> Any:
    """Waits for one object and returns it; ends this process, and so the host, if the lab is gone."""
    try:
        return lab.recv()
    except (EOFError, OSError):
        os._exit(1)


def _make_host(orders: Orders) -> None:
    """Sets up the host's name, processors, /etc/hosts, interfaces and share."""
    socket.sethostname(orders.name)
    os.sched_setaffinity(0, orders.cores)
    if orders.group:
        enter(Path(orders.group))
    purpose = f"host {orders.name}'s own view of the system"
    call(("mount", "--bind", orders.names, "/etc/hosts"), purpose)
    # A new /sys shows this host's interfaces but hides the cgroups, which are mounted again.
    call(("mount", "--rbind", "/sys/fs/cgroup", orders.scratch), purpose)
    call(("mount", "-t", "sysfs", "sysfs", "/sys"), purpose)
    call(("mount", "--rbind", orders.scratch, "/sys/fs/cgroup"), purpose)
    if orders.group:  # as in a container: its group is the root, so that programs see its limit
        call(("mount", "--bind", orders.group, orders.group_mount), purpose)


def _run(orders: Orders, lab: Connection) -> None:
    """Starts the ranks, and reports their ends. Rank 0 has the terminal; other ranks' lines get their name as a prefix.
    Waits for inherited processes, too: this is the host's process 1."""
    ranks: dict[int, int] = {}  # pid -> rank
    voices: dict[int, threading.Thread] = {}
    for environment in orders.environments:
        rank = int(environment["RANK"])
        process = subprocess.Popen(
            orders.command,
            env={**os.environ, **environment},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.STDOUT,
        )
        ranks[process.pid] = rank
        process.returncode = 0  # waited for below
        if process.stdout is not None:
            prefix = f"[{orders.name}{rank}] ".encode()
            voices[process.pid] = threading.Thread(target=pass_on, args=(process.stdout, prefix), daemon=True)
            voices[process.pid].start()
    listener = threading.Thread(target=_obey, args=(lab, ranks))
    listener.start()
    while ranks:
        pid, status = os.waitpid(-1, 0)
        if pid in voices:
            voices[pid].join(_LAST_WORDS_S)
        if pid in ranks:
            with contextlib.suppress(OSError):  # the lab is gone: the listener ends this process
                lab.send((ranks.pop(pid), os.waitstatus_to_exitcode(status)))
    listener.join()


def _obey(lab: Connection, ranks: dict[int, int]) -> None:
    """Passes signals on to the ranks."""
    while True:
        number = _next(lab)
        for pid in list(ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def pass_on(output: IO[bytes], prefix: bytes) -> None:
    """Writes a rank's lines with their prefix to stderr, each in one write so that ranks do not mix."""
    for line in output:
        with contextlib.suppress(OSError):  # a closed terminal ends no rank
            os.write(2, prefix + line.removesuffix(b"\n") + b"\n")


if __name__ == "__main__":
    main()
