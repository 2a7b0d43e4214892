"""How a run is asked to stop: a signal or the clock raises a hand, the ranks vote at the end of each step, and all
stop together. And how long ranks wait for each other: long until the first step is done, then short."""

import signal
import time
from types import FrameType, TracebackType

from paceline.train.state import Run

SPEAKS_FIRST_S = 5.0  # the watchdog knows who is missing; a collective that gives up before it knows nothing

_NAMES = ("SIGINT", "SIGUSR1", "SIGHUP", "SIGTERM")  # the last one set says to the launcher that all are
_GRACEFUL = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class StopRequest:
    """While it is open, SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask for a stop after the current step instead of ending at
    once, and so do `after_s` seconds since the process began to train (0: never).

    A SIGHUP that is ignored (nohup) stays so. A second SIGINT ends at once. Python runs the handler when the main
    thread is back from a collective; a peer that died ends the collective, one that hangs lets it run into its timeout.
    """

    def __init__(self, after_s: float = 0.0) -> None:
        self._signal: str | None = None
        self._after_s, self._began = after_s, time.monotonic()
        self._previous: dict[int, object] = {}

    @property
    def reason(self) -> str | None:
        """Why this rank asks for a stop; None while it does not."""
        if self._signal is None and 0 < self._after_s <= time.monotonic() - self._began:
            return "train.stop-after"
        return self._signal

    def __enter__(self) -> "StopRequest":
        for number in _GRACEFUL:
            if number != getattr(signal, "SIGHUP", None) or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == "SIGINT":
            raise KeyboardInterrupt
        self._signal = signal.Signals(number).name


def tighten_timeouts(run: Run, step_s: float) -> None:
    """After the first step of this process: from here on silence means trouble sooner than while ranks compiled, read
    and met. A step that takes long by itself is no trouble: ten of them are waited for."""
    if run.timeout_s is not None:
        return
    slowest = max(row[0] for row in run.group.share([step_s]))
    run.timeout_s = max(run.config.parallel.step_timeout_s, 10 * slowest)
    run.watchdog.timeout_s = run.timeout_s
    run.group.set_timeout(run.timeout_s + SPEAKS_FIRST_S)
    run.group.take_traffic()
