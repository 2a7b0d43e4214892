"""Exchanges the hosts' reports over HTTP (GET only), without torch's connections.

Each host serves its report, and asks the others for theirs until all have reached the same phase. A host that cannot
be reached keeps nobody waiting for longer than the time given, and the report of each other one says who is.
"""

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline import __version__
from paceline.base.serving import QuietHandler, Server, fetch
from paceline.tools.doctor.finding import Finding

Address = tuple[str, int]  # host, port

_ANSWER_S = 2.0
_ASK_EVERY_S = 0.05
_PHASE_S = 15.0  # for a host that was heard to reach the next phase
_CLOCK_ASKS = 5
STILL_BUSY = "it has not ended its own checks"
_OVER = 1000  # the phase in which a host has read all reports


@dataclass(kw_only=True)
class Report:
    """A host's report to the others."""

    host: str
    version: str = __version__
    phase: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    heard: list[int] = field(default_factory=list)  # other hosts, by their place in the list
    problems: dict[str, str] = field(default_factory=dict)  # why it did not hear others, by their place
    links: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the other host's place

    @classmethod
    def read(cls, text: bytes) -> "Report":
        """Raises ValueError, KeyError or TypeError for anything else."""
        report = json.loads(text)
        if report["version"] != __version__:
            raise ValueError(f"paceline {report['version']} answers there, and this is {__version__}")
        return cls(**{**report, "findings": [Finding(**finding) for finding in report["findings"]]})


class Meeting:
    def __init__(self, address: Address, report: Report):
        """Serves `report` at this address only. Raises UserError if this host cannot listen there."""
        self.report, self.node = report, 0
        self.heard: dict[int, Report] = {}  # the latest report of each other host
        self.problems: dict[int, str] = {}  # why another one was not heard
        self.addresses: Sequence[Address] = (address,)
        self._published = json.dumps(asdict(report)).encode()
        self._server = Server(address, self._handler())
        self.port = self._server.port
        self._server.begin()

    def invite(self, addresses: Sequence[Address], node: int) -> None:
        self.addresses, self.node = addresses, node
        self.problems = {other: "no answer" for other in range(len(addresses)) if other != node}

    def reach(self, phase: int, wait_s: float = 0.0) -> None:
        """Publishes this host's report in that phase, and returns when all hosts are there. wait_s: for hosts that do
        not answer, in the first phase; those that did have 15 s more, and in later phases only they count."""
        self.report.phase, self.report.heard = phase, sorted(self.heard)
        self.report.problems = {str(node): why for node, why in self.problems.items() if node not in self.heard}
        self._published = json.dumps(asdict(self.report)).encode()
        missing = {node for node in self.problems if phase == 1 or node in self.heard}
        deadline = time.monotonic() + wait_s
        while missing:
            with ThreadPoolExecutor(len(missing)) as pool:
                reached = list(pool.map(lambda node: self._ask(node, phase), sorted(missing)))
            missing -= {node for node, is_there in zip(sorted(missing), reached, strict=True) if is_there}
            now = time.monotonic()
            living = {node for node in missing if node in self.heard or self.problems[node] == STILL_BUSY}
            missing = {node for node in missing if now < deadline + (_PHASE_S if node in living else 0.0)}
            time.sleep(_ASK_EVERY_S)

    def clock_offset_s(self, node: int) -> float | None:
        """Returns how far that host's wall clock is ahead of this one's, by the fastest of some answers; None if it
        does not answer."""
        best, offset = float("inf"), 0.0
        for _ in range(_CLOCK_ASKS):
            began, asked = time.monotonic(), time.time()
            try:
                theirs = float(_get(self.addresses[node], "now"))
            except (OSError, http.client.HTTPException):
                return None
            took = time.monotonic() - began
            if took < best:
                best, offset = took, theirs - (asked + took / 2)
        return offset

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until the others have read all, too, except after an error."""
        if kind is None:
            self.reach(_OVER)
        self._server.end()

    def _ask(self, node: int, phase: int) -> bool:
        """Whether that host has reached the phase, or has left."""
        try:
            report = Report.read(_get(self.addresses[node], "report"))
        except ConnectionRefusedError as error:
            self.problems[node] = str(error.strerror)
            return node in self.heard  # it is over there
        except (OSError, http.client.HTTPException) as error:
            self.problems[node] = str(getattr(error, "strerror", None) or error) or type(error).__name__
            return False
        except (ValueError, KeyError, TypeError) as error:
            self.problems[node] = str(error)
            return False
        if report.phase == 0:
            self.problems[node] = STILL_BUSY
            return False
        self.heard[node] = report
        return report.phase >= phase

    def _handler(self) -> type[QuietHandler]:
        meeting = self

        class Handler(QuietHandler):
            timeout = _ANSWER_S

            def do_GET(self) -> None:
                self.answer(repr(time.time()).encode() if self.path == "/now" else meeting._published)

        return Handler


def _get(address: Address, name: str) -> bytes:
    with fetch(address, name, _ANSWER_S) as answer:
        return answer.read()
