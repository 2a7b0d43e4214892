"""Shortens long curves without losing outliers: each bucket of steps keeps its mean, lowest and highest."""

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.tools.report.read import Floats

MOST_POINTS = 750  # of a curve: two pixels of a wide screen each
MOST_COLUMNS = 400  # of a heat map
MOST_CELLS = 60_000  # of a heat map: 0.4 MB in the page

Edges = NDArray[np.intp]


@dataclass(frozen=True)
class Curve:
    """A column in buckets; NaN if a bucket has no finite value."""

    mean: Floats
    low: Floats
    high: Floats


def buckets(num_rows: int, most: int = MOST_POINTS) -> Edges:
    """Returns the borders of at most `most` nonempty buckets of rows, whose lengths differ by at most one row."""
    count = min(num_rows, most)
    return np.linspace(0, num_rows, count + 1).astype(np.intp)


def rows_per_bucket(num_rows: int, most: int = MOST_POINTS) -> int:
    return -(-num_rows // max(1, min(num_rows, most)))


def in_buckets(values: Floats, edges: Edges) -> Curve:
    """Returns mean, lowest and highest of each bucket of the first axis; (rows,) or (rows, ranks). Ignores NaN."""
    if len(edges) < 2:
        empty = values[:0]
        return Curve(empty, empty, empty)
    starts = edges[:-1]
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.float64), starts, axis=0)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    finite = np.where(known, values, np.nan)
    return Curve(mean, np.fmin.reduceat(finite, starts, axis=0), np.fmax.reduceat(finite, starts, axis=0))


def middles(values: Floats, edges: Edges) -> Floats:
    """Returns an increasing column's value in the middle row of each bucket."""
    return np.asarray(values[(edges[:-1] + edges[1:] - 1) // 2])


def lower_median(by_rank: Floats) -> Floats:
    """Returns (rows,): the median over ranks; of an even number of ranks the lower of the middle two. With two ranks
    that is the faster one, to which the other is compared."""
    if by_rank.shape[1] == 0:
        return np.full(len(by_rank), np.nan)
    ordered = np.sort(by_rank, axis=1)  # NaN, last, is a rank that the row lacks
    num_known = np.isfinite(by_rank).sum(axis=1)
    middle = np.maximum(num_known - 1, 0) // 2
    return np.asarray(ordered[np.arange(len(ordered)), middle])


def slowness(work_ms: Floats) -> Floats:
    """Returns (rows, ranks): a rank's time above the step's median rank, as a share of it; 0 if not slower."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = work_ms / lower_median(work_ms)[:, None] - 1.0
    ratio[~np.isfinite(ratio)] = np.nan
    return np.asarray(np.maximum(ratio, 0.0))


def median(values: Floats) -> float:
    """Returns the median of the finite values; NaN if there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an empty slice is valid here
        return float(np.nanmedian(values)) if values.size else float("nan")
