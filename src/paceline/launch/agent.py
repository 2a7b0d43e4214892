"""The part of `paceline launch` on each host: ssh starts it there, and it runs one command while the launcher lives.

It prints a greeting. On standard input come the order, a line of JSON, then names of signals for the command, a line
each, and empty lines as signs of life. At the end of the input, or after a minute without any (the launching machine
was switched off), the command gets SIGTERM, and later SIGKILL. If the agent is killed, the kernel kills the command.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial

from paceline import __version__
from paceline.base.errors import EXIT_RESUMABLE, EXIT_USER
from paceline.base.parent import die_with_parent
from paceline.base.say import say
from paceline.launch.signals import StopSignals

GREETING = b"paceline-agent "  # before it a shell's start-up files may print
SIGN_OF_LIFE_S = 5.0
END_S = 5.0  # for a command to end when its ranks have had their time to save
_SILENCE_S = 60.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Greeting:
    version: str
    address: str  # of this host, as the ssh connection arrived at it


@dataclass(frozen=True)
class Order:
    command: list[str]  # for the interpreter that runs the agent
    folder: str
    environment: dict[str, str]  # in addition to this host's own
    grace_s: float  # checkpoint.grace-s


class _Launcher(threading.Thread):
    """Passes on to the command what the launcher sends."""

    def __init__(self, command: "subprocess.Popen[bytes]"):
        super().__init__(daemon=True)
        self._command, self._heard_s = command, time.monotonic()

    def run(self) -> None:
        for line in sys.stdin:
            self._heard_s = time.monotonic()
            if name := line.strip():
                self._command.send_signal(signal.Signals[name])
        self._heard_s = float("-inf")

    @property
    def is_gone(self) -> bool:
        return time.monotonic() - self._heard_s > _SILENCE_S


def main() -> int:
    address = (os.environ.get("SSH_CONNECTION", "").split() or [""])[-2:][0]  # client, its port, server, its port
    sys.stdout.buffer.write(GREETING + json.dumps(asdict(Greeting(__version__, address))).encode() + b"\n")
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:  # another host could not be reached
        return EXIT_RESUMABLE
    order = Order(**json.loads(line))
    try:
        os.chdir(order.folder)
    except OSError as error:
        say(f"error: cannot work in {order.folder}: {error.strerror}; make it, or name another folder by --chdir")
        return EXIT_USER
    with StopSignals() as signals:
        command = subprocess.Popen(
            [sys.executable, *order.command],
            env={**os.environ, **order.environment},
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        return _follow(command, signals, order.grace_s + END_S)


def _follow(command: "subprocess.Popen[bytes]", signals: StopSignals, kill_after_s: float) -> int:
    launcher = _Launcher(command)
    launcher.start()
    kill_s = float("inf")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = command.wait(_LOOK_EVERY_S)
            return code if code >= 0 else 128 - code
        if kill_s == float("inf") and (launcher.is_gone or signals.first):
            command.terminate()
            kill_s = time.monotonic() + kill_after_s
        if time.monotonic() > kill_s:
            command.kill()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the thread waits for input
