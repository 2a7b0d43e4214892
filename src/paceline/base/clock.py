"""Time, told apart: what a step spent where, and how much of a run was training.

Intervals are pairs of milliseconds on one clock. Wall-clock time is never used to decide anything: it jumps.
"""

import time
from collections.abc import Iterable

Interval = tuple[float, float]


def union_ms(intervals: Iterable[Interval]) -> float:
    """Returns the total length covered by the intervals; overlaps count once. Concurrent all-reduces are one wait."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def clip_intervals(intervals: Iterable[Interval], start_ms: float, end_ms: float) -> list[Interval]:
    """Returns the parts of the intervals that lie between start and end."""
    return [(max(a, start_ms), min(b, end_ms)) for a, b in intervals if min(b, end_ms) > max(a, start_ms)]


class Stopwatch:
    """Seconds that ran while it was not paused. Training time: evaluation, saving and sampling pause it."""

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
