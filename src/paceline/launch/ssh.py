"""A host with its agent, at the other end of an ssh connection."""

import contextlib
import json
import os
import shlex
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

from paceline import __version__
from paceline.base.errors import UserError
from paceline.base.process import say
from paceline.launch.agent import PREFIX, SILENCE_S, Greeting, Silence, State

# After the user's own in --ssh: ssh takes the first value that it gets. A ControlMaster that we would start stays, and
# keeps our pipes open; one that is there is used.
_OPTIONS = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=4",
)
START_S = 40.0  # Python from a slow network disk, on a busy machine
_OUTPUT_S = 2.0  # for the rest of a command's output, after its end
_SAME_S = 5.0  # a line that another host prints later is news of that host
# What ssh or a remote shell prints, and what helps.
_ADVICE = {
    "Permission denied (": "put your public key there (ssh-copy-id {name}), or load it here (ssh-add)",  # (publickey)
    "Permission denied": "name an interpreter that you may run there by --python",
    "Host key verification failed": "connect once by hand (ssh {name}) and compare the key's fingerprint",
    "Could not resolve hostname": "correct the name, or give it a HostName in ~/.ssh/config",
    "Connection refused": "start sshd there, or set its Port in ~/.ssh/config",
    "No module named": "install the same paceline there, or name its interpreter by --python",
    "not found": "name the interpreter that has paceline there by --python",
    "No such file": "name the interpreter that has paceline there by --python",
}


@dataclass(frozen=True)
class Ssh:
    """How to reach the hosts, and where they run the command."""

    command: str  # ssh and its own options
    python: str
    folder: str

    def line(self, name: str, *module: str) -> list[str]:
        """Returns the command line that runs a module on a host, with arguments, in the folder of the login."""
        options = [word for option in _OPTIONS for word in ("-o", option)]
        # Python needs it before it can read anything. The task has the rest: others can see command lines.
        path = os.environ.get("PYTHONPATH")
        environment = ["env", f"PYTHONPATH={path}"] if path else []
        words = shlex.join(["exec", *environment, self.python, "-m", *module])
        return [*shlex.split(self.command), *options, "--", name, words]


class Output:
    """The terminal. A line that two hosts print at about the same time, such as the end of the run, is printed once."""

    def __init__(self) -> None:
        self._recent: dict[bytes, tuple[str, float]] = {}  # line -> the host that printed it first, and when
        self._lock = threading.Lock()
        self.is_closed = False

    def print(self, host: str, line: bytes) -> None:
        with self._lock:
            now = time.monotonic()
            self._recent = {each: (by, at) for each, (by, at) in self._recent.items() if now - at < _SAME_S}
            if not self.is_closed and self._recent.setdefault(line, (host, now))[0] == host:
                say(f"{host}: {line.decode(errors='replace').rstrip()}")


class Connection:
    """An agent. Its state is the latest that it has reported."""

    def __init__(self, name: str, line: list[str], output: Output):
        self.name, self._output = name, output
        self.greeting: Greeting | None = None
        self.state: State | None = None
        self.complaint = ""  # the last line on standard error before the greeting
        self.silence = Silence(START_S)
        self._prints = False
        self._ended_s: float | None = None  # monotonic
        self._lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal sends Ctrl-C to its foreground: only this launcher gets it
            )
        except OSError as error:
            raise UserError(f"cannot run {line[0]}: {error.strerror}; install OpenSSH's client") from None
        self._readers = [
            threading.Thread(target=target, args=(stream,), daemon=True)
            for target, stream in ((self._read, self._process.stdout), (self._print, self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def status(self) -> int | None:
        """Returns the exit status, when all output has been read, or two seconds after the end: a process that the
        command has left behind may keep the output open. None before."""
        status = self._process.poll()
        if status is not None and self._ended_s is None:
            self._ended_s = time.monotonic()
        if self._ended_s is None or time.monotonic() - self._ended_s < _OUTPUT_S:
            return None if any(reader.is_alive() for reader in self._readers) else status
        return status

    def is_lost(self) -> bool:
        """Whether the connection has ended, or nothing comes from the agent any more. Ask it every second."""
        # While a terminal is stopped, nobody reads what the agent says.
        is_silent = self.silence.is_too_long() and not self._prints
        return is_silent or self._process.poll() is not None

    def send(self, message: dict[str, Any] | None = None) -> None:
        """Sends a message, or a sign of life."""
        assert self._process.stdin
        line = json.dumps(message) if message else ""
        with self._lock, contextlib.suppress(OSError, ValueError):  # its end shows in `status`
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Tells the agent to end."""
        assert self._process.stdin
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, until_s: float) -> None:
        """Returns when the connection has ended. At that time (monotonic) it is cut, and the agent notices that."""
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            say(f"host {self.name} does not end: the connection to it is cut")
            self.cut()

    def cut(self) -> None:
        self._process.kill()
        self._process.wait()

    def problem(self, needs_address: bool) -> str:
        """Returns why this host cannot be used, and what helps; empty: it can. One host alone needs no address."""
        if self.greeting is None:
            if self.status() is None:
                return f"no answer within {START_S:g} s; try `ssh {self.name} true`"
            advice = next((text for sign, text in _ADVICE.items() if sign in self.complaint), "try `ssh {name} true`")
            return f"{self.complaint or 'ssh ended without a message'}; {advice.format(name=self.name)}"
        if self.greeting.version != __version__:
            return f"paceline {self.greeting.version} is there, {__version__} here; install the same, or use --python"
        if needs_address and "." not in self.greeting.address:
            return (
                f"ssh reached it at '{self.greeting.address}', and ranks need an IPv4 address; "
                "give it, or set AddressFamily inet in ~/.ssh/config"
            )
        return ""

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            if line.startswith(PREFIX):
                with contextlib.suppress(ValueError, TypeError, AttributeError):
                    self._take(json.loads(line.removeprefix(PREFIX)))
            elif self.greeting:
                self._prints = True
                with contextlib.suppress(OSError):  # a closed terminal does not end the run
                    os.write(1, line)
                self.silence.heard()
                self._prints = False

    def _take(self, message: dict[str, Any]) -> None:
        self.silence.heard()
        if self.greeting is None:  # another version may have other fields
            self.greeting = Greeting(str(message.get("version")), str(message.get("address", "")))
        else:
            self.silence.most_s = SILENCE_S
            self.state = State(**message) if message else self.state

    def _print(self, stream: IO[bytes]) -> None:
        for line in stream:
            if self.greeting:
                self._output.print(self.name, line)
            else:
                self.complaint = line.decode(errors="replace").strip() or self.complaint
