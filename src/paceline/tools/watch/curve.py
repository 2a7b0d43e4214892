"""A curve of bounded length, whatever the number of rows."""

import math
from bisect import bisect_left
from dataclasses import dataclass

_MOST_POINTS = 400  # of a curve: about three pixels of a wide screen each


@dataclass
class _Point:
    """Consecutive rows. Its place on the axes is that of the last one, so that a curve reaches the present."""

    step: float
    tokens: float
    seconds: float
    total: float
    low: float
    high: float
    count: int = 1

    def add(self, later: "_Point") -> None:
        self.step, self.tokens, self.seconds = later.step, later.tokens, later.seconds
        self.total, self.count = self.total + later.total, self.count + later.count
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)


class Curve:
    """Values by step. Each point keeps the mean, lowest and highest of equally many rows, so that no spike is lost."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._rows_per_point = 1

    def add(self, step: float, tokens: float, seconds: float, value: float) -> None:
        """Appends a value. Drops the points from this step on: a resumed run computes them again. Ignores a value that
        is not finite."""
        del self._points[bisect_left(self._points, step, key=lambda point: point.step) :]
        if not math.isfinite(value):
            return
        new = _Point(step, tokens, seconds, value, value, value)
        if self._points and self._points[-1].count < self._rows_per_point:
            self._points[-1].add(new)
            return
        self._points.append(new)
        if len(self._points) > _MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        self._rows_per_point *= 2
        for point, later in zip(self._points[::2], self._points[1::2], strict=False):
            point.add(later)
        self._points = self._points[::2]

    def columns(self) -> dict[str, list[float]]:
        """Returns the columns step, tokens, seconds, mean, low and high, with as many digits as a screen shows. Low and
        high are empty if each point is one row."""
        points = self._points
        edges = points if self._rows_per_point > 1 else []
        return {
            "step": [point.step for point in points],
            "tokens": [point.tokens for point in points],
            "seconds": [round(point.seconds, 1) for point in points],
            "mean": [_rounded(point.total / point.count) for point in points],
            "low": [_rounded(point.low) for point in edges],
            "high": [_rounded(point.high) for point in edges],
        }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
