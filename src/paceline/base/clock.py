"""Intervals of a step in milliseconds, training time, and calls with a timeout. Durations use the monotonic clock."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
Interval = tuple[float, float]
_LONGEST_GAP_S = 1.0


def union_ms(intervals: Iterable[Interval]) -> float:
    """Returns the total length that the intervals cover. Overlaps count once: concurrent all-reduces are one wait."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def clip_intervals(intervals: Iterable[Interval], start_ms: float, end_ms: float) -> list[Interval]:
    """Returns the parts of the intervals that lie between start and end."""
    return [(max(a, start_ms), min(b, end_ms)) for a, b in intervals if min(b, end_ms) > max(a, start_ms)]


class Stopwatch:
    """Seconds of training time. Evaluation, saving and sampling pause it."""

    def __init__(self, elapsed_s: float = 0.0):
        self._before = elapsed_s
        self._since: float | None = None

    @property
    def elapsed_s(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._before, self._since = self.elapsed_s, None


class AwakeClock:
    """Counts the seconds that this process was awake. If two looks are further apart than a thread ever waits for its
    core, the process was stopped or the machine slept: at most one second of the gap counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last, self._awake_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Returns the seconds so far. Call it several times a second."""
        with self._lock:
            last, self._last = self._last, time.monotonic()
            self._awake_s += min(self._last - last, _LONGEST_GAP_S)
            return self._awake_s


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what `call` returns, or raises what it raises; TimeoutError if it takes longer. The call runs in a daemon
    thread, which a timeout leaves behind: torch's store and resolvers may block for ever, and would block Ctrl-C."""
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
