"""`paceline launch`: one command on several hosts, which ssh starts, and which one terminal watches and ends.

Each host runs what `--hosts` runs (hosts.py): a launcher of its own, which starts, watches and restarts its ranks and
agrees with the others. So no disk need be shared, and this file only opens and closes connections (agent.py).
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO

from paceline import __version__
from paceline.base.early import EXIT_INTERRUPTED, stopped_early
from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER, RunError, Stopped, UserError
from paceline.base.say import say
from paceline.launch.agent import END_S, GREETING, SIGN_OF_LIFE_S, Greeting, Order
from paceline.launch.options import NamedHost
from paceline.launch.signals import StopSignals

# After the user's own in --ssh: ssh takes the first value that it gets. A ControlMaster that we would start stays, and
# keeps our pipes open; one that is there is used.
_OPTIONS = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=4",
)
_GREETING_S = 40.0  # Python from a slow network disk, on a busy machine
_LOOK_EVERY_S = 0.05
_OUTPUT_S = 2.0  # for the rest of a command's output, after its end
_SAME_S = 5.0  # a line that another host prints later is news of that host
_REFUSED_S = 2.0  # for the other hosts to end, after one was refused or lost
_PASSED_ON = ("PACELINE_", "OMP_", "NCCL_", "GLOO_", "WANDB_", "MLFLOW_", "TRACKIO_")  # beginnings of variables
_SAID = (EXIT_USER, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_DONE)  # statuses that came with a message
_CONNECTION_LOST = 255  # ssh(1): an error of ssh itself, or a signal killed the remote command
# What ssh or a remote shell prints, and what helps.
_ADVICE = {
    "Permission denied": "put your public key there (ssh-copy-id {name}), or load it here (ssh-add)",
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
    port: int  # of each host's launcher
    grace_s: float  # for ranks to save; the others have it, too, after a host has failed

    def line(self, name: str) -> list[str]:
        """Returns the command line that starts an agent."""
        options = [word for option in _OPTIONS for word in ("-o", option)]
        # Python needs it before it can read anything. The order has the rest: others can see command lines.
        path = os.environ.get("PYTHONPATH")
        environment = ["env", f"PYTHONPATH={path}"] if path else []
        agent = shlex.join(["exec", *environment, self.python, "-m", "paceline.launch.agent"])
        return [*shlex.split(self.command), *options, "--", name, agent]


class _Output:
    """The terminal. A line that two hosts print at about the same time, such as the end of the run, is printed once."""

    def __init__(self) -> None:
        self._recent: dict[bytes, tuple[str, float]] = {}  # line -> the host that printed it first, and when
        self._lock = threading.Lock()
        self.names: dict[str, str] = {}  # address -> the user's name of the host
        self.is_closed = False

    def print(self, host: str, line: bytes) -> None:
        with self._lock:
            now = time.monotonic()
            self._recent = {each: (by, at) for each, (by, at) in self._recent.items() if now - at < _SAME_S}
            if self.is_closed or self._recent.setdefault(line, (host, now))[0] != host:
                return
            text = line.decode(errors="replace").rstrip()
            for address, name in self.names.items():
                text = text.replace(f"{address}:", f"{name}:")
            say(f"{host}: {text}")


class _Host:
    """A host with its agent."""

    def __init__(self, name: str, line: list[str], output: _Output):
        self.name, self._output = name, output
        self.greeting: Greeting | None = None
        self._ended_s: float | None = None  # monotonic
        self.complaint = ""  # the last line on standard error before the greeting
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
            for target, stream in ((self._pass_on, self._process.stdout), (self._print, self._process.stderr))
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

    def send(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # its end shows in `status`
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Tells the agent to end."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, until_s: float) -> None:
        """Returns when the connection has ended. At that time (monotonic) it is cut, and the agent notices that."""
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            say(f"host {self.name} does not end: the connection to it is cut")
            self._process.kill()
            self._process.wait()

    def _pass_on(self, stream: IO[bytes]) -> None:
        for line in stream:
            if self.greeting:
                with contextlib.suppress(OSError):  # a closed terminal does not end the run
                    os.write(1, line)
            elif line.startswith(GREETING):
                with contextlib.suppress(ValueError, AttributeError):
                    found = json.loads(line.removeprefix(GREETING))  # another version may have other fields
                    self.greeting = Greeting(str(found.get("version")), str(found.get("address", "")))

    def _print(self, stream: IO[bytes]) -> None:
        for line in stream:
            if self.greeting:
                self._output.print(self.name, line)
            else:
                self.complaint = line.decode(errors="replace").strip() or self.complaint


def launch(hosts: Sequence[NamedHost], command: Sequence[str], ssh: Ssh) -> int:
    """Runs `paceline COMMAND` on all hosts, and returns their common exit status: 2 beats 1 beats 75 beats 0.

    Nothing of it runs on any host afterwards. Raises UserError if a host cannot be used, RunError if one is lost,
    Stopped or KeyboardInterrupt after a signal before the command was started.
    """
    output = _Output()
    with StopSignals() as signals, contextlib.ExitStack() as stack:
        connected: list[_Host] = []
        stack.callback(_end, connected, output, ssh.grace_s + END_S + SIGN_OF_LIFE_S)
        for host in hosts:
            connected.append(_Host(host.name, ssh.line(host.name), output))  # noqa: PERF401  a failure ends these
        addresses = _greet(connected, signals)
        output.names = {address: host.name for address, host in zip(addresses, hosts, strict=True)}
        place = ["--hosts", ",".join(f"{address}:{ssh.port}" for address in addresses)] if len(hosts) > 1 else []
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        for number, host in enumerate(hosts):
            own = [*place, "--node-rank", str(number)] if place else []
            line = ["-m", "paceline", *command, "--nproc", host.num_ranks, *own]
            connected[number].send(json.dumps(asdict(Order(line, ssh.folder, passed_on, ssh.grace_s))))
        return _watch(connected, signals, ssh.grace_s)


def _greet(hosts: list[_Host], signals: StopSignals) -> list[str]:
    """Returns each host's address when all agents have answered. Raises UserError naming all that cannot be used."""
    until_s = time.monotonic() + _GREETING_S
    while any(host.greeting is None and host.status() is None for host in hosts) and time.monotonic() < until_s:
        if signals.wait(_LOOK_EVERY_S):
            assert signals.first
            raise KeyboardInterrupt if signals.first == signal.SIGINT else Stopped(stopped_early(signals.first.name))
    problems = [f"{host.name}: {problem}" for host in hosts if (problem := _problem(host, len(hosts) > 1))]
    if problems:
        raise UserError("cannot start on " + "; ".join(problems))
    addresses = [host.greeting.address for host in hosts if host.greeting]
    if len(set(addresses)) < len(addresses):
        both = ", ".join(f"{host.name} is {address}" for host, address in zip(hosts, addresses, strict=True))
        raise UserError(f"two names lead to one host ({both}); name it once, with all its ranks")
    return addresses


def _problem(host: _Host, needs_address: bool) -> str:
    """Returns why this host cannot be used, and what helps; empty: it can. One host alone needs no address."""
    if host.greeting is None:
        if host.status() is None:
            return f"no answer within {_GREETING_S:g} s; try `ssh {host.name} true`"
        help_text = next((text for sign, text in _ADVICE.items() if sign in host.complaint), "try `ssh {name} true`")
        return f"{host.complaint or 'ssh ended without a message'}; {help_text.format(name=host.name)}"
    if host.greeting.version != __version__:
        return f"paceline {host.greeting.version} is there, {__version__} here; install the same, or use --python"
    if needs_address and "." not in host.greeting.address:
        return (
            f"ssh reached it at '{host.greeting.address}', and ranks need an IPv4 address; "
            "give it, or set AddressFamily inet in ~/.ssh/config"
        )
    return ""


def _watch(hosts: list[_Host], signals: StopSignals, grace_s: float) -> int:
    """Passes signals on; returns the common exit status when all hosts have ended, or soon after one failed."""
    ends: dict[str, int] = {}
    until_s, alive_s, num_passed_on = float("inf"), 0.0, 0
    while len(ends) < len(hosts) and time.monotonic() < until_s:
        for host in hosts:
            if host.name not in ends and (status := host.status()) is not None:
                ends[host.name] = status
                if status not in (EXIT_DONE, EXIT_RESUMABLE):
                    left_s = grace_s if status == EXIT_FAILED else _REFUSED_S  # they copy the last checkpoint
                    until_s = min(until_s, time.monotonic() + left_s)
        wanted = (signals.first is not None) + signals.is_urgent
        line = signals.passed_on.name if wanted > num_passed_on else ""
        if line or time.monotonic() - alive_s > SIGN_OF_LIFE_S:
            num_passed_on, alive_s = wanted, time.monotonic()
            for host in hosts:
                host.send(line)
        time.sleep(_LOOK_EVERY_S)
    return _judge(ends)


def _judge(ends: dict[str, int]) -> int:
    """Returns one exit status for all hosts. Raises RunError for an end that no host has printed."""
    if EXIT_USER in ends.values():
        return EXIT_USER
    for name, status in ends.items():
        if status == _CONNECTION_LOST or status < 0:
            raise RunError(
                f"host {name} is lost: its agent was killed, or the connection has ended; the other hosts were "
                "stopped. `train ... --resume auto` continues from the newest checkpoint"
            )
        if status not in _SAID:
            raise RunError(f"on host {name} the command ended with status {status} and no message")
    return next(status for status in _SAID if status in ends.values())


def _end(hosts: list[_Host], output: _Output, most_s: float) -> None:
    """Ends what still runs, without printing what those hosts say about it."""
    output.is_closed = True
    until_s = time.monotonic() + most_s
    for host in hosts:
        host.close()
    for host in hosts:
        host.wait(until_s)
