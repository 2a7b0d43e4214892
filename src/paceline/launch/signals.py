"""What the launcher is asked by signals: noted at once, acted on by whoever looks. So none comes at a bad moment."""

import contextlib
import re
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT")
_ASKS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_LOOK_EVERY_S = 0.05
_PATIENT = (signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGINT))
_KNOWN_TO_RANKS = (*_PATIENT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


def has_handler(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles this signal itself; where the system does not tell (only Linux does), it is assumed."""
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return True
    return found is None or bool(int(found[1], 16) >> (number - 1) & 1)


class Asked:
    """While it is open, signals that ask for the end are noted instead of ending this process."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.since_s: float | None = None  # monotonic: when the end was asked for in a way that has a deadline
        self._num_interrupts = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Asked":
        for number in _ASKS:
            before = signal.getsignal(number)
            if number == getattr(signal, "SIGHUP", None) and before == signal.SIG_IGN:
                continue  # nohup
            self._previous[number] = before
            signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, before in self._previous.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python cannot be set again
                signal.signal(number, before)  # type: ignore[arg-type]

    @property
    def is_urgent(self) -> bool:
        """A second Ctrl-C: end at once."""
        return self._num_interrupts > 1

    @property
    def passed_on(self) -> signal.Signals:
        """What the ranks get: what was asked for, where it would not kill them."""
        assert self.first is not None
        return self.first if self.first in _KNOWN_TO_RANKS else signal.SIGTERM

    def wait(self, seconds: float) -> bool:
        """Returns whether the end was asked for, within these seconds."""
        until = time.monotonic() + seconds
        while self.first is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_EVERY_S))  # no Event: setting one in a handler can wait for this very thread
        return self.first is not None

    def _note(self, number: int, _: FrameType | None) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self.first is None:
            self.first = signal.Signals(number)
        # Whoever sends SIGUSR1 or Ctrl-C comes again when it takes too long; the others send SIGKILL next.
        if self.since_s is None and number not in _PATIENT:
            self.since_s = time.monotonic()
