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
from paceline.record import folder
from paceline.record.read import Row, number, rows
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
