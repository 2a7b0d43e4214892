"""Warm ranks: one process imports torch and the trainer once, and each rank of each attempt is forked from it, in 20 ms
instead of two seconds.

The server starts with the launcher. A rank is forked twice, so that it becomes a child of the launcher, which is a
"subreaper" (prctl(2)): the launcher waits for it, and it dies with the launcher, like one that was started cold. The
server uses no GPU, because a CUDA context does not survive a fork, and starts no thread. Linux only; elsewhere, and
once the server is gone, ranks are started cold.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from paceline.base.process import die_with_parent
from paceline.launch.signals import StopSignals

_LOOK_EVERY_S = 0.05
_ADOPTED_S = 10.0  # for a rank to become the launcher's child; it takes a millisecond
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h


def is_supported() -> bool:
    """Whether ranks can be forked here, and become this process's children."""
    return sys.platform == "linux"


class WarmRank:
    """A forked rank, with what a launcher uses of a Popen."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status (negative: the signal that killed it), None while it runs."""
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Returns the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class WarmServer:
    """The launcher's side: starts the server, and asks it for ranks. Close it at the end."""

    def __init__(self, modules: Sequence[str], command: Sequence[str]):
        """modules: what ranks import. command: what each rank runs, as `python -m MODULE ARGUMENT ...`."""
        self._ended: list[WarmRank] = []
        # Before the server starts: the kernel notes at a fork whether there is a subreaper above.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours, theirs = socket.socketpair()
        with theirs:
            server = (sys.executable, "-m", "paceline.launch.warm", str(theirs.fileno()), ",".join(modules))
            self._process = subprocess.Popen(
                (*server, *command[2:]), pass_fds=[theirs.fileno()], start_new_session=True
            )
        with ours:
            self._descriptor = ours.fileno()  # open as long as the connection
            self._connection: IO[str] = ours.makefile("rw")

    def fork(self, environment: Mapping[str, str], signals: StopSignals) -> WarmRank | None:
        """Returns a rank with this environment, in a session of its own; None if the server is gone. Waits until the
        server has imported its modules, or a stop signal comes."""
        self._reap()
        request = {"environment": dict(environment), "launcher": os.getpid()}
        try:
            self._connection.write(json.dumps(request) + "\n")
            self._connection.flush()
            while not select.select([self._descriptor], [], [], _LOOK_EVERY_S)[0]:
                if signals.first is not None:  # it imports from a slow disk, or is stopped
                    self._process.kill()  # and with it a rank that would come too late
            answer = self._connection.readline()
        except OSError:  # the server was killed
            return None
        if not answer:
            return None
        self._ended.append(rank := WarmRank(int(answer)))
        return rank

    def close(self) -> None:
        """Ends the server. Ranks live on."""
        with contextlib.suppress(OSError):
            self._connection.close()
        self._process.kill()
        self._process.wait()
        self._reap()

    def _reap(self) -> None:
        """Waits for what ended ranks had started: killed with their rank's process group, they became children of this
        process."""
        for rank in self._ended:
            with contextlib.suppress(ChildProcessError):
                while rank.returncode is not None and os.waitpid(-rank.pid, os.WNOHANG)[0]:
                    pass


# ---- in the server ----


def _serve(connection: IO[str]) -> None:
    """Forks a rank for each request, and returns in that rank. Ends the server when the launcher closes the connection,
    and if there is no rank: the launcher, which waits for its answer, sees that, and starts it cold."""
    while line := connection.readline():
        request = json.loads(line)
        reader, writer = os.pipe()  # the rank writes there when it has answered
        try:
            child = os.fork()
            if not child and os.fork():
                os._exit(0)  # the rank loses its parent, and becomes the launcher's child
        except OSError:  # the system allows no more processes
            os._exit(0)
        if not child:
            _become_a_rank(request["launcher"], request["environment"])
            connection.write(f"{os.getpid()}\n")
            connection.close()
            with contextlib.suppress(OSError):  # the server was killed
                os.write(writer, b"\n")
            os.close(reader)
            os.close(writer)
            return
        os.close(writer)
        os.waitpid(child, 0)
        if not os.read(reader, 1):
            break
        os.close(reader)
    os._exit(0)


def _become_a_rank(launcher: int, environment: Mapping[str, str]) -> None:
    os.setsid()  # a process group, by which the launcher ends what this rank starts
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != launcher and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.environ.clear()
    os.environ.update(environment)
    # What `top` and `ps -o comm` show: all ranks have the server's command line.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"paceline-r{environment.get('RANK', '')}".encode(), 0, 0, 0)
    die_with_parent(launcher)


def main() -> None:
    """Imports the modules, serves, and in a rank runs the command."""
    die_with_parent(os.getppid())
    number, modules, name, *arguments = sys.argv[1:]
    with socket.socket(fileno=int(number)) as endpoint:
        connection = endpoint.makefile("rw")
    gc.disable()  # a tenth of the imports' time goes into collections that find nothing
    for module in modules.split(","):
        importlib.import_module(module)
    gc.freeze()  # what was imported stays: a collection in a rank would walk it, and copy its pages
    gc.enable()
    _serve(connection)
    command = importlib.import_module(f"{name}.__main__")
    sys.argv = [str(command.__file__), *arguments]
    sys.exit(command.main())


if __name__ == "__main__":
    main()
