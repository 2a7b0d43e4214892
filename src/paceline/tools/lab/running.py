"""Runs a lab: makes and connects hosts, starts and watches their ranks, and removes the hosts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Protocol

import psutil

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER, RunError, UserError
from paceline.base.process import die_with_parent, say
from paceline.tools.lab.hosts import INTERFACE, Host, Layout
from paceline.tools.lab.inside import Orders
from paceline.tools.lab.network import plug_in, start_switch
from paceline.tools.lab.processors import Controller
from paceline.tools.lab.state import FOLDER, State, only_lab, write_names

_PORT = 29500  # of the ranks' store; every port is free in a new namespace
_LOOK_EVERY_S = 0.05
# After a rank failed. Ranks that wait for it notice at once; those behind a cut link notice by their own watchdogs, a
# second or two apart, and their messages matter, too.
_FAILURE_GRACE_S = 5.0
_SAVE_GRACE_S = 60.0  # after a signal, to end the step and save
_PATIENCE_S = 5.0  # for the kernel to end a host's processes
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")


class Asked(Protocol):
    """The stop requests that signals to this process made."""

    first: signal.Signals | None
    since_s: float | None  # monotonic: the time of a request with a deadline

    @property
    def is_urgent(self) -> bool: ...

    @property
    def passed_on(self) -> signal.Signals: ...


def run_lab(layout: Layout, command: list[str], asked: Asked, announce: Callable[[], None]) -> int:
    """Makes the hosts, runs the command as every rank of them, and returns the ranks' common exit status.

    The status is 2 if any rank's is 2; else that of the first rank that failed (128 + the signal that ended it, if it
    was passed on); else 1 if a host was lost; else 75 if any rank's is 75; else 0. Rank 0 has this process's terminal.
    `announce` is called when all hosts are made, before ranks start. No part of the lab remains afterwards.

    Raises UserError if a lab is already running or this machine cannot make one; RunError naming a rank that was
    killed; KeyboardInterrupt after a second Ctrl-C.
    """
    with only_lab() as state:
        lab = _Lab(layout, state)
        try:
            lab.make(command)
            announce()
            return lab.run(asked) if asked.first is None else 128 + asked.first
        finally:
            lab.take_down()


class _Lab:
    def __init__(self, layout: Layout, state: State):
        self._layout, self._state = layout, state
        self._switch: subprocess.Popen[str] | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lines: dict[str, Connection] = {}
        self._ends = _Ends({host.name: set(host.ranks) for host in layout.hosts})

    # ---- making ----

    def make(self, command: list[str]) -> None:
        controller = self._controller()
        scratch = FOLDER / "scratch"
        scratch.mkdir()
        names = write_names({host.name: host.address for host in self._layout.hosts})
        self._switch = start_switch()
        self._state.switch = self._switch.pid
        for host in self._layout.hosts:
            group = controller.make(host.name, host.share) if controller else None
            self._start_host(host)
            orders = Orders(
                name=host.name,
                names=str(names),
                scratch=str(scratch),
                group=str(group or ""),
                group_mount=str(controller.mount) if controller else "",
                cores=list(host.cores),
                command=command,
                environments=[self._environment(host, rank) for rank in host.ranks],
            )
            self._send(host.name, orders)
        for host in self._layout.hosts:
            self._wait_until_made(host)
            first = psutil.Process(self._processes[host.name].pid).children()[0].pid
            self._state.hosts[host.name] = first
            plug_in(self._switch.pid, host, first)
        self._state.write()

    def _controller(self) -> Controller | None:
        """Returns the cgroups' controller; None if this machine has none, and no host has a share."""
        try:
            controller = Controller.find()
            self._state.groups = str(controller.top)
            self._state.write()  # before the first group is made, so that clean_up finds it
            controller.open()
        except UserError:
            if any(host.share for host in self._layout.hosts):
                raise
            return None
        return controller

    def _start_host(self, host: Host) -> None:
        """Starts a host's first process in new namespaces. `unshare` waits for it, and ends it if the lab is killed."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes[host.name] = subprocess.Popen(
                [
                    *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                    *(sys.executable, "-m", "paceline.tools.lab.inside", str(theirs.fileno())),
                ],
                stdin=None if host.first_rank == 0 else subprocess.DEVNULL,
                stdout=None if host.first_rank == 0 else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal sends Ctrl-C to all of its foreground: the lab alone passes it on
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._lines[host.name] = Connection(ours.detach())

    def _environment(self, host: Host, rank: int) -> dict[str, str]:
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank - host.first_rank,
            "WORLD_SIZE": self._layout.hosts[-1].ranks.stop,
            "LOCAL_WORLD_SIZE": host.num_ranks,
            "GROUP_RANK": self._layout.hosts.index(host),
            "GROUP_WORLD_SIZE": len(self._layout.hosts),
            "MASTER_ADDR": self._layout.hosts[0].address,
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }
        if not self._layout.has_own_cores and not host.share and "OMP_NUM_THREADS" not in os.environ:
            num_hosts = len(self._layout.hosts)
            environment["OMP_NUM_THREADS"] = max(1, self._layout.num_cores // (num_hosts * host.num_ranks))
        return {name: str(value) for name, value in environment.items()}

    def _wait_until_made(self, host: Host) -> None:
        try:
            message = self._lines[host.name].recv()
        except (EOFError, OSError):  # unshare has printed why
            raise UserError(
                f"could not make namespaces ({' '.join(_NAMESPACES)}) for host {host.name}, see above; in a container "
                "this takes more rights than root's: start it with --privileged"
            ) from None
        if isinstance(message, str):
            raise UserError(message)

    # ---- running ----

    def run(self, asked: Asked) -> int:
        names = {line: name for name, line in self._lines.items()}
        for name in self._lines:
            self._send(name, True)
        was_passed_on = False
        while self._ends.running():
            for line in wait(list(names), _LOOK_EVERY_S):
                assert isinstance(line, Connection)
                if not self._hear(names[line], line):
                    del names[line]
            if asked.first and not was_passed_on:
                was_passed_on = True
                for name in self._lines:
                    self._send(name, int(asked.passed_on))
            if asked.is_urgent:
                raise KeyboardInterrupt
            if time.monotonic() > min(self._ends.deadline_s(), (asked.since_s or float("inf")) + _SAVE_GRACE_S):
                break
        return self._ends.status(asked)

    def _send(self, name: str, what: object) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is noticed when it is heard
            self._lines[name].send(what)

    def _hear(self, name: str, line: Connection) -> bool:
        """Records a host's message; False if the host is gone."""
        try:
            message = line.recv()
        except (EOFError, OSError):
            self._ends.lose(name)
            return False
        if isinstance(message, str):
            raise UserError(message)
        self._ends.note(name, *message)
        return True

    # ---- taking down ----

    def take_down(self) -> None:
        for line in self._lines.values():
            line.close()  # the host's first process treats it as a power cut
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)  # the kernel has ended the host's other processes by then
            process.kill()
            process.wait()
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()


class _Ends:
    """The ranks' ends, in order."""

    def __init__(self, ranks: dict[str, set[int]]):
        self._running = ranks
        self._ended: list[tuple[str, int, int]] = []  # host, rank, exit status
        self._lost: list[str] = []
        self._failed_s: float | None = None

    def running(self) -> int:
        return sum(map(len, self._running.values()))

    def note(self, host: str, rank: int, status: int) -> None:
        self._running[host].discard(rank)
        self._ended.append((host, rank, status))
        if self._failed_s is None and status not in (EXIT_DONE, EXIT_RESUMABLE):
            self._failed_s = time.monotonic()

    def lose(self, host: str) -> None:
        """Records that a host is gone with all its ranks. Ranks on other hosts must find out by themselves."""
        self._lost.append(host)
        self._running[host].clear()
        say(f"host {host} is gone")

    def deadline_s(self) -> float:
        """When running ranks are ended, monotonic."""
        return float("inf") if self._failed_s is None else self._failed_s + _FAILURE_GRACE_S

    def status(self, asked: Asked) -> int:
        """Returns one exit status for all; raises RunError for a cause that no rank could print."""
        failures = [end for end in self._ended if end[2] not in (EXIT_DONE, EXIT_RESUMABLE)]
        if self.running():
            hanging = ", ".join(f"{rank} ({host})" for host, ranks in self._running.items() for rank in sorted(ranks))
            cause = asked.first.name if asked.first else "the failure of another"
            say(f"rank {hanging} did not end after {cause} and was killed")
        if any(status == EXIT_USER for _, _, status in failures):
            return EXIT_USER
        if failures:
            return _status_of(*failures[0], asked)
        if self._lost or self.running():
            return EXIT_FAILED
        return max(status for _, _, status in self._ended)


def _status_of(host: str, rank: int, status: int, asked: Asked) -> int:
    if status > 0:
        return status
    if asked.first and -status == asked.passed_on:
        return 128 - status
    raise RunError(f"rank {rank} on host {host} was killed by {signal.Signals(-status).name}")
