"""How a run is asked to stop: a signal sets a flag, the ranks vote at the end of each step, and all stop together."""

import signal
from types import FrameType, TracebackType

_GRACEFUL = (signal.SIGINT, signal.SIGTERM) + ((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ())


class StopRequest:
    """While it is open, SIGINT, SIGTERM and SIGUSR1 ask for a stop after the current step instead of ending at once.

    A second SIGINT ends at once. Python runs the handler when the main thread is back from a collective; a peer that
    died ends the collective, one that hangs lets it run into its timeout.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in _GRACEFUL:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
