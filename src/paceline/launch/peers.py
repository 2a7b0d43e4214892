"""The launchers on other hosts: their states, and files of their run folders, read over HTTP (GET only).

Each launcher asks every other one for its state twice a second, and decides from what it has heard. Nothing is ever
sent unasked, so a lost message is repeated by itself. No clock of another host is read.
"""

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from paceline.base.errors import EXIT_DONE
from paceline.base.serving import QuietHandler, Server, fetch
from paceline.base.status import Status
from paceline.launch.options import Address
from paceline.launch.restarts import Failure

_ASK_EVERY_S = 0.5
_ANSWER_S = 5.0
_DEAD_S = 10.0  # without an answer: the host, its launcher or its cable is gone
_STATE_BYTES = 1 << 24  # far more than a state has
_READ_S = 3.0  # without a byte of a file
RECORDS = ("config.toml", "tokenizer.json", "metrics.jsonl", "events.jsonl")
_SERVED = re.compile(r"checkpoints/step-\d{8,}/(manifest\.json|[a-z]+-\d{5}-of-\d{5}\.safetensors)")


@dataclass(frozen=True)
class Member:
    """A host in a roster."""

    node: int
    start: str  # its launcher, see State
    num_ranks: int


@dataclass(frozen=True)
class Roster:
    """One attempt: its hosts in the order of their ranks. The first leads: it has rank 0 and the ranks' store."""

    id: str  # random
    number: int  # 1: the first attempt
    members: tuple[Member, ...]
    port: int  # of the ranks' store, at the leader's address

    @property
    def leader(self) -> Member:
        return self.members[0]


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a launcher, as it reports it."""

    job: str  # equal if the command is
    start: str  # random: a launcher that was started again has another
    num_ranks: int
    step: int  # of its newest complete checkpoint; -1: none
    phase: Literal["waiting", "running", "judging", "over"] = "waiting"
    roster: Roster | None = None  # of its latest attempt
    ranks: dict[str, Any] | None = None  # how its ranks ended in that attempt; None: they run
    stop: str = ""  # the signal by which its user asked to stop
    failures: tuple[Failure, ...] = ()  # of ranks, in all attempts
    status: int = EXIT_DONE  # the run's exit status, if it is over
    message: str = ""  # the run's error, if it is over

    @classmethod
    def read(cls, text: bytes) -> "State":
        """Raises ValueError, KeyError or TypeError for anything else."""
        found = json.loads(text)
        if found["roster"] is not None:
            members = tuple(Member(**member) for member in found["roster"].pop("members"))
            found["roster"] = Roster(members=members, **found["roster"])
        return cls(**{**found, "failures": tuple(Failure(**failure) for failure in found["failures"])})


class Peers:
    """The other hosts' launchers. Answers their questions, too, at this host's address only."""

    def __init__(self, addresses: Sequence[Address], node: int, run: Path, own: Callable[[], State]):
        """own: returns this launcher's state. Raises UserError if this host cannot listen at its address."""
        self._addresses, self._closed = addresses, threading.Event()
        self._heard: dict[int, tuple[State, float]] = {}
        self.problems = {n: "no answer" for n in range(len(addresses)) if n != node}  # why a host is not there
        self._server = Server(addresses[node], _handler(run, own))
        self._server.begin()
        for other in self.problems:
            threading.Thread(target=self._ask, args=(other,), daemon=True).start()

    def alive(self) -> dict[int, State]:
        """Returns node -> state of the hosts that have answered within 10 s; one that refuses to is gone at once."""
        now = time.monotonic()
        return {node: state for node, (state, at) in sorted(self._heard.items()) if now - at < _DEAD_S}

    def heard_s(self, node: int) -> float:
        """Returns when that host was asked for its latest state, monotonic."""
        found = self._heard.get(node)  # once: another thread may remove it
        return found[1] if found else float("-inf")

    def open(self, node: int, name: str) -> http.client.HTTPResponse:
        """Returns a file of that host's run folder, to read. Raises FileNotFoundError, OSError or HTTPException."""
        return fetch(self._addresses[node], name, _READ_S)

    def close(self) -> None:
        self._closed.set()
        self._server.end()

    def _ask(self, node: int) -> None:
        while True:
            asked_s = time.monotonic()
            try:
                with fetch(self._addresses[node], "state", _ANSWER_S) as answer:
                    self._heard[node] = State.read(answer.read(_STATE_BYTES)), asked_s
            except ConnectionRefusedError as error:  # the launcher has ended, and its ranks with it
                self._heard.pop(node, None)
                self.problems[node] = error.strerror or "refused"
            except (OSError, http.client.HTTPException) as error:
                self.problems[node] = str(error) or type(error).__name__
            except (ValueError, KeyError, TypeError, AttributeError):
                self.problems[node] = "another program, or another version of paceline, answers there"
            if self._closed.wait(_ASK_EVERY_S):
                return


def _handler(run: Path, own: Callable[[], State]) -> type[QuietHandler]:
    class Handler(QuietHandler):
        timeout = _READ_S

        def do_GET(self) -> None:
            name = self.path[1:]
            if name == "state":
                self.answer(json.dumps(asdict(own())).encode())
                return
            file = _open(run, name)
            if file is None:
                self.send_error(http.HTTPStatus.NOT_FOUND)
                return
            with file:
                size = os.fstat(file.fileno()).st_size  # records grow meanwhile
                self.begin(size)
                if size:
                    self.connection.sendfile(file, count=size)

    return Handler


def _open(run: Path, name: str) -> BinaryIO | None:
    if name not in RECORDS and not _SERVED.fullmatch(name):
        return None
    try:
        return os.fdopen(os.open(run / name, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError:
        return None


def ended_well(state: State) -> bool:
    """Whether all ranks of that host have finished, or stopped with their state saved."""
    found: Mapping[str, Any] = state.ranks["found"] if state.ranks else {}
    return len(found) == state.num_ranks and all(Status(**status).is_good for status in found.values())
