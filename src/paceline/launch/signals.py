"""Signals that ask a launcher to stop are recorded, and handled at a safe moment."""

import re
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType

from paceline.base.process import handled

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
_LOOK_EVERY_S = 0.05
_PATIENT = (signal.SIGINT, signal.SIGUSR1)
_KNOWN_TO_RANKS = (*_PATIENT, signal.SIGTERM, signal.SIGHUP)


def has_handler(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles this signal itself; assumed where the system does not tell (only Linux does)."""
    try:
        match = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return True
    return match is None or bool(int(match[1], 16) >> (number - 1) & 1)


class StopSignals:
    """While it is open, stop signals are recorded instead of ending this process."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.since_s: float | None = None  # monotonic: when a signal came that is usually followed by SIGKILL
        self._num_interrupts = 0
        self._handled = handled(_HANDLED, self._record)

    def __enter__(self) -> "StopSignals":
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handled.__exit__(kind, error, tb)

    @property
    def is_urgent(self) -> bool:
        """A second Ctrl-C: end at once."""
        return self._num_interrupts > 1

    @property
    def passed_on(self) -> signal.Signals:
        """The signal for the ranks: the first one, unless it would kill them."""
        assert self.first is not None
        return self.first if self.first in _KNOWN_TO_RANKS else signal.SIGTERM

    def wait(self, seconds: float) -> bool:
        """Returns whether a signal has come, after at most these seconds."""
        until = time.monotonic() + seconds
        while self.first is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_EVERY_S))  # no Event: setting it in a handler can wait for this very thread
        return self.first is not None

    def _record(self, number: int, _: FrameType | None) -> None:
        self._num_interrupts += number == signal.SIGINT
        self.first = self.first or signal.Signals(number)
        # After SIGUSR1 or Ctrl-C the sender repeats the signal if it takes too long; after others it sends SIGKILL.
        if self.since_s is None and number not in _PATIENT:
            self.since_s = time.monotonic()
