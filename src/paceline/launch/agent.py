"""The part of `paceline launch` on each host: it starts this host's ranks when the coordinator says so, and reports how
they end. ssh starts it.

It prints a greeting, reads an order, and becomes the ordered command, whose launcher calls `serve`. After that, lines
of JSON come on standard input, and the state of this host goes out on standard output, between the lines that ranks
print. At the end of the input, ranks get SIGTERM, save and end; after 13 s without a line (a cable is out, or the
coordinator's machine is off) they have 15 s for that, because other hosts may be out of reach, too.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.base.clock import AwakeClock
from paceline.base.errors import EXIT_RESUMABLE, EXIT_USER
from paceline.base.locks import file_lock
from paceline.base.net import LOOPBACK, listen
from paceline.base.process import OVER_SSH, say
from paceline.launch.attempt import Order, Place
from paceline.launch.local import HostRanks
from paceline.launch.restarts import Records

PREFIX = b"paceline-agent "  # of our lines; before the first, a shell's start-up files may print
LIFE_EVERY_S = 1.0
SILENCE_S = 13.0  # a pause of 10 s harms nothing
_ADDRESS = "PACELINE_AGENT_ADDRESS"
_LAST_SAVE_S = 15.0
_LOOK_EVERY_S = 0.05
_COPY_ENDS_S = 5.0  # for a copy that has arrived, and removes older ones


class Silence:
    """How long the other end has said nothing while this process was awake. Look at it every second."""

    def __init__(self, most_s: float):
        self.most_s, self._heard_s, self._clock = most_s, 0.0, AwakeClock()

    def heard(self) -> None:
        self._heard_s = self._clock.now()

    def is_too_long(self) -> bool:
        return self._clock.now() - self._heard_s > self.most_s


@dataclass(frozen=True)
class Greeting:
    version: str
    address: str  # of this host, as the ssh connection arrived at it


@dataclass(frozen=True)
class Task:
    """What the agent is to become."""

    command: list[str]  # for the interpreter that runs the agent
    folder: str
    environment: dict[str, str]  # in addition to this host's own
    address: str  # at which ranks of this host listen


@dataclass(frozen=True, kw_only=True)
class State:
    """A host, as its agent reports it each second, and at each change."""

    num_ranks: int = 0  # 0: it still checks its data
    port: int = 0  # where the store of all ranks would listen
    attempt: int = -1  # the latest that it has begun
    is_running: bool = False
    step: int = 0  # the last in its records
    newest: int | None = None  # its newest checkpoint
    began_at: int | None = None  # the step at which the attempt began to train; None: it has not
    reports: dict[str, Any] = field(default_factory=dict)  # by rank, after an attempt
    exits: dict[str, int] = field(default_factory=dict)


class Coordinator:
    """The other end of the connection. From now on it is listened to."""

    def __init__(self) -> None:
        self.address = os.environ.pop(_ADDRESS)
        os.environ[OVER_SSH] = "1"  # for ranks, and what they start
        self.place: dict[str, Any] | None = None  # of the next attempt
        self.order: Order = ""
        self.closing: list[Any] | None = None  # what to note in the records
        self.end: int | None = None  # the exit status
        self.is_gone = False
        self.was_silent = False
        self._state: State | None = None
        self._records: Records | None = None
        self._lock, self._reporting = threading.Lock(), threading.Lock()
        self._in, self._out = os.dup(0), os.dup(1)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)  # ranks read there, and what they start: ffmpeg would take our messages
        reader, writer = os.pipe()
        os.dup2(writer, 1)  # ranks print there
        os.close(writer)
        self._pump = threading.Thread(target=self._pass_on, args=(reader,), daemon=True)
        for thread in (self._pump, *(threading.Thread(target=t, daemon=True) for t in (self._listen, self._report))):
            thread.start()

    def post(self, records: Records | None = None, **changed: Any) -> None:
        """Changes this host's state, and reports it."""
        self._records = records or self._records
        self._state = dataclasses.replace(self._state or State(), **changed)
        self._send()

    def close(self) -> None:
        """Returns when all that was printed has gone out."""
        sys.stdout.flush()
        os.dup2(2, 1)  # the last end of the pipe
        self._pump.join(2.0)

    def _send(self) -> None:
        with self._reporting:  # reading the records takes time: a state must not overtake the one after it
            state, records = self._state, self._records
            if state and records:
                state = dataclasses.replace(state, step=records.last_step(), newest=records.newest_checkpoint())
            self._write(PREFIX + json.dumps(asdict(state) if state else {}).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.write(self._out, line)

    def _report(self) -> None:
        while True:
            time.sleep(LIFE_EVERY_S)
            self._send()

    def _pass_on(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                self._write(line)

    def _listen(self) -> None:
        silence, rest = Silence(SILENCE_S), b""
        while not silence.is_too_long():
            if not select.select([self._in], [], [], LIFE_EVERY_S)[0]:
                continue
            chunk = os.read(self._in, 1 << 16)
            if not chunk:
                break
            silence.heard()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                self._take(json.loads(line))
        else:
            self.was_silent = True
        self.is_gone = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _take(self, message: dict[str, Any]) -> None:
        if "place" in message:
            self.order, self.place = "", message["place"]
        self.order = message.get("order", self.order)
        self.closing = message.get("close", self.closing)
        self.end = message.get("end", self.end)
        if "signal" in message:
            os.kill(os.getpid(), signal.Signals[message["signal"]])


def of_this_process() -> Coordinator | None:
    """Returns the coordinator, if an agent became this process."""
    return Coordinator() if _ADDRESS in os.environ else None


def serve(coordinator: Coordinator, ranks: HostRanks, num_ranks: int, port: int) -> int:
    """Runs this host's ranks in one attempt after another, until the coordinator ends the run; returns the exit status.
    port: of the store of all ranks, if this host has rank 0; 0: a free one. Raises UserError if it is taken."""
    records, listener = Records(ranks.folder), None
    ended: dict[str, Any] = {}  # how the latest attempt did
    while True:
        listener = listener or listen(coordinator.address, port)
        # The ends and the port in one: the next place of all ranks is at the port of the latest report.
        coordinator.post(records, num_ranks=num_ranks, port=listener.getsockname()[1], is_running=False, **ended)
        while coordinator.place is None:
            is_over = coordinator.end is not None or coordinator.is_gone  # read first: what it closes came before
            _close_records(coordinator, records)
            if is_over:
                listener.close()
                return EXIT_RESUMABLE if coordinator.end is None else coordinator.end
            time.sleep(_LOOK_EVERY_S)
        _close_records(coordinator, records)
        message, coordinator.place = coordinator.place, None
        place = Place(**message)
        if place.first_rank == 0:
            place = dataclasses.replace(place, listener=listener)
            listener = None
            _wait_for_writer(ranks.folder)
        coordinator.post(attempt=place.attempt, is_running=True, began_at=None, reports={}, exits={})
        reports, exits = ranks.run(place, lambda: _order(coordinator, ranks, records))
        ended = {
            "reports": {str(rank): asdict(status) for rank, status in reports.items()},
            "exits": {str(rank): code for rank, code in exits.items()},
        }
        if (began_at := records.began_at()) is not None:  # in the last moment
            ended["began_at"] = began_at


def _close_records(coordinator: Coordinator, records: Records) -> None:
    if coordinator.closing:
        what, was_said = coordinator.closing
        coordinator.closing = None
        records.close(what, was_said)


def _order(coordinator: Coordinator, ranks: HostRanks, records: Records) -> Order:
    """Returns what the ranks are to do. Reports at once where they have begun to train: this host may be lost."""
    if (began_at := records.began_at()) is not None:
        coordinator.post(began_at=began_at)
    if coordinator.was_silent:
        ranks.grace.seconds = min(ranks.grace.seconds, _LAST_SAVE_S)
    return coordinator.order


def _wait_for_writer(run: Path) -> None:
    """Returns when no copy of a checkpoint is being given its name in this folder any more (copies.py), or after some
    seconds: then another run writes there, and rank 0 says which, as it does of a lock that cannot be taken."""
    with contextlib.suppress(OSError):  # which filelock.Timeout is, too
        if (run / "lock").exists():
            with file_lock(run / "lock", mode=0o600, timeout=_COPY_ENDS_S, poll_interval=_LOOK_EVERY_S):
                pass


def main() -> int:
    address = (os.environ.get("SSH_CONNECTION", "").split() or [""])[-2:][0]  # client, its port, server, its port
    greeting = json.dumps(asdict(Greeting(__version__, address))).encode()
    os.write(1, b"\n" + PREFIX + greeting + b"\n")  # what start-up files print need not end its line
    line = bytearray()
    while not line.endswith(b"\n"):  # not one byte more: the rest is for the process that this becomes
        if not (byte := os.read(0, 1)):  # another host could not be reached
            return EXIT_RESUMABLE
        line += byte
    task = Task(**json.loads(line))
    try:
        os.chdir(task.folder)
    except OSError as error:
        say(f"error: cannot work in {task.folder}: {error.strerror}; make it, or name another folder by --chdir")
        return EXIT_USER
    environment = {**os.environ, **task.environment, _ADDRESS: task.address or LOOPBACK}
    os.execve(sys.executable, [sys.executable, *task.command], environment)


if __name__ == "__main__":
    sys.exit(main())
