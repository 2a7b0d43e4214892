"""Arithmetic of `paceline bench link`: sizes, bytes on a link, and latency and bandwidth from times.

The line is Hockney's: s bytes take alpha + s / beta ("The communication challenge for MPP", Parallel Computing 20,
1994, equation 1). Sizes and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md there).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")


def bus_factor(collective: str, num_ranks: int) -> float:
    """Returns how many times a buffer's bytes pass the busiest link. The buffer of a reduce-scatter is each rank's
    input, that of an all-gather each rank's output."""
    share = (num_ranks - 1) / num_ranks
    return {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "broadcast": 1.0}[collective]


def sizes(max_bytes: int) -> list[int]:
    """Returns 1 KiB times powers of 4, up to max_bytes."""
    return list(itertools.takewhile(lambda size: size <= max_bytes, (1024 * 4**i for i in itertools.count())))


@dataclass(frozen=True)
class Fit:
    """seconds = alpha_s + bytes / beta_bytes_per_s."""

    alpha_s: float
    beta_bytes_per_s: float
    residual_frac: float  # mean of |fitted - measured| / measured

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes / self.beta_bytes_per_s


def fit(num_bytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Returns the line with the least sum of absolute relative errors, with alpha >= 0 and beta > 0.

    Relative, because times span five orders of magnitude. Absolute, not squared, because some sizes are outliers: a
    token bucket passes the first bytes, an algorithm changes with the size. The best such line goes through two of the
    points, or one and the origin, so all of these are tried. Raises ValueError for a single size.
    """
    if len(set(num_bytes)) < 2:
        raise ValueError("a fit of latency and bandwidth needs two sizes")
    x, y = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    slopes = [(i, (y[i] - y[j]) / (x[i] - x[j])) for i in range(len(x)) for j in range(i) if x[i] != x[j]]
    lines = [(y[i] - slope * x[i], slope) for i, slope in slopes] + [(0.0, slope) for slope in y / x]

    def error(line: tuple[float, float]) -> float:
        return float(np.abs((line[0] + line[1] * x - y) / y).mean())

    alpha, slope = best = min(((a, b) for a, b in lines if a >= 0 and b > 0), key=error)
    return Fit(float(alpha), 1 / float(slope), error(best))
