"""Reads the records of one run as arrays, also of a run that was cut short, still runs, or is of an older paceline.

The files are not trusted: values of a wrong type count as missing; lines that are no rows are counted and skipped.
"""

import dataclasses
import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import UserError
from paceline.base.jsonl import Row, rows
from paceline.record import folder
from paceline.record.read import number
from paceline.record.rows import EvalRow, StepRow
from paceline.record.state import read_config

Floats = NDArray[np.float64]
_STEP_FIELDS = [field.name for field in dataclasses.fields(StepRow)]
_EVAL_FIELDS = [field.name for field in dataclasses.fields(EvalRow)]


@dataclass(frozen=True)
class Records:
    """One run. Missing values are NaN; arrays of one table have equal lengths."""

    path: Path
    config: dict[str, Any]  # `section.field` -> value, named like the flags; empty if unreadable
    steps: dict[str, Floats]  # each number of a StepRow -> (rows,), by increasing step
    ranks: dict[str, Floats]  # each list of a StepRow -> (rows, ranks)
    evaluations: dict[str, Floats]  # each number of an EvalRow -> (rows,)
    events: list[Row]  # each has an `event`, a text
    num_unreadable: int  # lines that are no rows

    @property
    def num_steps(self) -> int:
        return len(self.steps["step"])

    def training_s(self) -> Floats:
        """Returns (rows,): seconds of training up to each row, as the sum of step times."""
        return np.asarray(np.cumsum(np.nan_to_num(self.steps["step_ms"]) * self.steps_per_row()) / 1e3)

    def steps_per_row(self) -> Floats:
        """Returns (rows,): the number of steps of each row; more than 1 if log.every is."""
        return np.diff(self.steps["step"], prepend=0)


def read_run(path: Path) -> Records:
    """Returns the records of the run in this folder; raises UserError if it is none, or cannot be read."""
    found = folder.find(path)
    table = _Table()
    try:
        for row in rows(found.metrics):
            table.add(row)
        lines = list(rows(found.events))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}; it must be a readable file") from None
    events = [row for row in lines if row and isinstance(row.get("event"), str)]
    return Records(
        found.path,
        read_config(found.config),
        {name: np.array(column) for name, column in table.steps.items()},
        table.by_rank(),
        {name: np.array(column) for name, column in table.evaluations.items()},
        events,
        table.num_unreadable + len(lines) - len(events),
    )


class _Table:
    """The rows of metrics.jsonl as columns of 8 bytes a value, so that a million steps fit in memory."""

    def __init__(self) -> None:
        self.steps = {name: array("d") for name in _STEP_FIELDS if not name.startswith("rank_")}
        self.ranks: dict[str, list[array[float]]] = {name: [] for name in _STEP_FIELDS if name.startswith("rank_")}
        self.evaluations = {name: array("d") for name in _EVAL_FIELDS}
        self.num_unreadable = 0

    def add(self, row: Row | None) -> None:
        """Appends a row. A step repeated after a resume replaces the rows from there on."""
        step = number(row.get("step")) if row else math.nan
        if row is None or not step >= 0:
            self.num_unreadable += 1
            return
        _cut(self.evaluations, step)
        if "val_loss" in row:
            _append(self.evaluations, row)
            return
        length = _cut(self.steps, step)
        _append(self.steps, row)
        for name, column in self.ranks.items():
            del column[length:]
            values = row.get(name)
            column.append(array("d", map(number, values if isinstance(values, list) else ())))

    def by_rank(self) -> dict[str, Floats]:
        """Returns name -> (rows, ranks). NaN marks a rank that a row lacks: a run may resume at another world size."""
        num_ranks = max((len(values) for column in self.ranks.values() for values in column), default=0)
        found = {name: np.full((len(column), num_ranks), np.nan) for name, column in self.ranks.items()}
        for name, column in self.ranks.items():
            for index, values in enumerate(column):
                found[name][index, : len(values)] = values
        return found


def _cut(columns: dict[str, "array[float]"], step: float) -> int:
    """Drops the rows from this step on. Returns how many remain."""
    length = bisect_left(columns["step"], step)
    if length < len(columns["step"]):
        for column in columns.values():
            del column[length:]
    return length


def _append(columns: dict[str, "array[float]"], row: Row) -> None:
    for name, column in columns.items():
        column.append(number(row.get(name)))


# ---- shorter curves: each bucket of steps keeps its mean, lowest and highest, so that no outlier is lost ----

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
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan
