"""Latency and bandwidth of a collective from its times, and where a model's all-reduce spends its time. Plain numbers.

The model is Hockney's: a collective of s bytes takes alpha + s / beta (R. Hockney, "The communication challenge for
MPP", Parallel Computing 20, 1994, equation 1). Bytes are the buffer's, so beta is the algorithm bandwidth that large
buffers tend to; the factors that make it a bus bandwidth are nccl-tests' (doc/PERFORMANCE.md in NVIDIA/nccl-tests).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")


def bus_factor(collective: str, num_ranks: int) -> float:
    """Returns bus bandwidth over algorithm bandwidth: how many times a buffer's bytes must pass the busiest link.

    The buffer of a reduce-scatter is what each rank puts in, that of an all-gather what each rank gets.
    """
    share = (num_ranks - 1) / num_ranks
    return {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "broadcast": 1.0}[collective]


@dataclass(frozen=True)
class Fit:
    """time = alpha_s + bytes / beta, over some measured sizes."""

    alpha_s: float
    beta_bytes_per_s: float
    residual_frac: float  # mean of |fitted - measured| / measured
    worst_frac: float  # the largest of them, with its sign
    worst_bytes: int  # where

    def seconds(self, num_bytes: float) -> float:
        """What a collective of so many bytes takes by this fit."""
        return self.alpha_s + num_bytes / self.beta_bytes_per_s


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Returns the alpha and beta with the least sum of absolute relative errors, neither negative.

    Relative, because the times span five orders of magnitude. Absolute and not squared, because some sizes follow other
    rules (a token bucket lets the first bytes pass, an algorithm changes with the size), and squares would bend the
    whole line for them: at 1 Gbit they put beta 10% above what every size from 1 MiB on was measured at. The best line
    then goes through two of the points, so all pairs are tried.

    Needs two sizes; raises ValueError with fewer.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"a fit of latency and bandwidth needs two sizes, and {len(set(sizes))} was measured")
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    pairs = [(i, j) for i in range(len(x)) for j in range(i) if x[i] != x[j]]
    slopes = [(y[i] - y[j]) / (x[i] - x[j]) for i, j in pairs]
    lines = [(y[i] - slope * x[i], slope) for (i, _), slope in zip(pairs, slopes, strict=True)]
    lines += [(0.0, t / size) for t, size in zip(y, x, strict=True)] + [(float(t), 0.0) for t in y]
    possible = [(alpha, slope) for alpha, slope in lines if alpha >= 0 and slope >= 0]
    alpha, slope = min(possible, key=lambda line: float(np.abs((line[0] + line[1] * x - y) / y).sum()))
    errors = (alpha + x * slope - y) / y
    worst = int(np.abs(errors).argmax())
    return Fit(
        alpha_s=float(alpha),
        beta_bytes_per_s=1 / float(slope) if slope else math.inf,
        residual_frac=float(np.abs(errors).mean()),
        worst_frac=float(errors[worst]),
        worst_bytes=int(x[worst]),
    )
