"""The first process of a host: makes the host, starts its ranks, reports their end to the lab.

running.py runs it as `python -m paceline.tools.lab.inside FD` in new namespaces. FD is a socket to the lab with one
JSON object a line: orders, "ready", "start", then signals to pass on and the ends of ranks. The socket closes when the
lab ends, and the kernel ends all processes of a host with the first one.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paceline.base.errors import PacelineError
from paceline.tools.lab.processors import enter
from paceline.tools.lab.system import call

_MOST_READS = 16  # of 64 KiB at a time, so that a rank that always prints can still be ended


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


class Line:
    """One end of the socket between the lab and a host: one JSON object a line."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.unread: list[dict[str, Any]] = []  # received but not yet returned by `next`
        self._received = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends one object; ignores that the peer is gone."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for at least one object and returns all received ones; None: the peer is gone."""
        while not self.unread:
            try:
                more = self.connection.recv(1 << 16)
            except ConnectionError:
                return None
            if not more:
                return None
            *lines, self._received = (self._received + more).split(b"\n")
            self.unread = [json.loads(line) for line in lines]
        messages, self.unread = self.unread, []
        return messages

    def next(self) -> dict[str, Any] | None:
        """Waits for one object and returns it; None: the peer is gone."""
        messages = self.receive()
        if messages is None:
            return None
        self.unread = messages[1:]
        return messages[0]


def main() -> None:
    lab = Line(socket.socket(fileno=int(sys.argv[1])))
    orders = Orders(**_next(lab))
    try:
        _make_host(orders)
        lab.send(ready=True)
        _next(lab)
        _Ranks(orders, lab).run()
    except (PacelineError, OSError) as error:
        lab.send(error=f"host {orders.name}: {error}")
        _next(lab)


def _next(lab: Line) -> dict[str, Any]:
    message = lab.next()
    if message is None:
        _power_off()
    return message


def _power_off() -> NoReturn:
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


class _Ranks:
    """The ranks of this host, from their start until the lab ends."""

    def __init__(self, orders: Orders, lab: Line):
        self._orders, self._lab = orders, lab
        self._selector = selectors.DefaultSelector()
        self._living: dict[int, tuple[int, _Voice | None]] = {}  # pid -> rank, and its output

    def run(self) -> NoReturn:
        children, wakeup = socket.socketpair()
        children.setblocking(False)
        wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(children, selectors.EVENT_READ)
        self._selector.register(self._lab, selectors.EVENT_READ)
        for environment in self._orders.environments:
            self._start(environment)
        if self._lab.unread:
            self._obey()
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._lab:
                    self._obey()
                elif key.fileobj is children:
                    children.recv(1 << 10)
                    self._bury()
                elif not key.data.speak():
                    self._selector.unregister(key.fileobj)
                    key.data.close()

    def _start(self, environment: dict[str, str]) -> None:
        """Rank 0 has the terminal; other ranks' lines get their name as a prefix."""
        rank = int(environment["RANK"])
        output = None if rank == 0 else subprocess.PIPE
        process = subprocess.Popen(
            self._orders.command,
            env={**os.environ, **environment},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=output,
            stderr=None if rank == 0 else subprocess.STDOUT,
        )
        voice = None
        if process.stdout is not None:
            voice = _Voice(os.dup(process.stdout.fileno()), f"[{self._orders.name}{rank}] ")
            process.stdout.close()
            self._selector.register(voice.descriptor, selectors.EVENT_READ, voice)
        self._living[process.pid] = rank, voice
        process.returncode = 0  # _bury waits for it, and for other inherited processes

    def _obey(self) -> None:
        messages = self._lab.receive()
        if messages is None:
            _power_off()
        for message in messages:
            for pid in self._living:
                os.kill(pid, message["signal"])

    def _bury(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                rank, voice = self._living.pop(ended[0], (None, None))
                if voice is not None:
                    voice.speak()  # remaining output comes before the rank's end
                if rank is not None:
                    self._lab.send(rank=rank, status=os.waitstatus_to_exitcode(ended[1]))


class _Voice:
    """Passes on a rank's output by lines, each in one write so that ranks do not mix."""

    def __init__(self, descriptor: int, prefix: str):
        os.set_blocking(descriptor, False)
        self.descriptor, self._prefix = descriptor, prefix.encode()
        self._rest = b""
        self._is_closed = False

    def speak(self) -> bool:
        """Passes on the available output; False: the output has ended."""
        if self._is_closed:
            return False
        is_open = True
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                more = os.read(self.descriptor, 1 << 16)
                self._rest += more
                if not more:
                    is_open = False
                    break
        if not is_open and self._rest and not self._rest.endswith(b"\n"):
            self._rest += b"\n"
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            with contextlib.suppress(OSError):  # a closed terminal ends no rank
                os.write(2, self._prefix + line + b"\n")
        return is_open

    def close(self) -> None:
        """Closes the descriptor; later output is lost."""
        self._is_closed = True
        os.close(self.descriptor)


if __name__ == "__main__":
    main()
