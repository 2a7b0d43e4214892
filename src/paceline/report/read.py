"""A run's records as they lie in its folder: whole, cut short, still being written, or of an older paceline.

Everything here is data from a file that anybody may have written: a value of a wrong type is missing, a line that is no
row is counted and passed over, and nothing is believed to be there.
"""

import contextlib
import json
import math
import tomllib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import UserError
from paceline.record import folder

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Records:
    """One run, as read. Missing values are NaN; arrays of one table have one length."""

    name: str
    path: Path
    config: dict[str, Any]  # `section.field` -> value, as the user types the names; empty where it cannot be read
    steps: dict[str, Floats]  # column of metrics.jsonl -> (rows,), by rising step
    ranks: dict[str, Floats]  # column of lists -> (rows, ranks)
    evaluations: dict[str, Floats]
    events: list[dict[str, Any]]  # each has an `event`, a text
    num_unreadable: int  # lines that were no rows
    modified_s: float  # when the last record was written, in seconds since 1970

    @property
    def num_steps(self) -> int:
        """Rows, each of another step."""
        return len(self.steps["step"])

    def column(self, name: str) -> Floats:
        """Returns a column of the steps; all NaN where no row has it."""
        return self.steps.get(name, np.full(self.num_steps, np.nan))

    @property
    def num_ranks(self) -> int:
        """The most ranks that any row tells of; 0 where none does."""
        return max((values.shape[1] for values in self.ranks.values()), default=0)

    def by_rank(self, name: str) -> Floats:
        """Returns (rows, ranks); all NaN where no row has such a list."""
        return self.ranks.get(name, np.full((self.num_steps, self.num_ranks), np.nan))

    def evaluation(self, name: str) -> Floats:
        """Returns a column of the evaluations; all NaN where no row has it."""
        return self.evaluations.get(name, np.full(len(self.evaluations["step"]), np.nan))

    def training_s(self) -> Floats:
        """Returns the seconds of training up to each row, by adding up steps: only rows of evaluations have a clock
        in them (`elapsed_s`), and those may be few."""
        return np.asarray(np.cumsum(np.nan_to_num(self.column("step_ms")) * self.steps_per_row()) / 1e3)

    def steps_per_row(self) -> Floats:
        """Returns (rows,): the steps that each row stands for; with log.every above 1 also those that have none."""
        return np.diff(self.steps["step"], prepend=0)


def read_run(path: Path) -> Records:
    """Returns the records of the run in this folder; raises UserError where it is none, or cannot be read."""
    found = folder.find(path)
    table = _Table()
    for line in _lines(found.metrics):
        table.take(line)
    events, num_bad_events = _events(found.events)
    return Records(
        name=found.path.name or str(found.path),
        path=found.path,
        config=_config(found.config),
        steps=table.columns(table.steps),
        ranks=table.rank_columns(),
        evaluations=table.columns(table.evaluations),
        events=events,
        num_unreadable=table.num_unreadable + num_bad_events,
        modified_s=max(_modified_s(file) for file in (found.metrics, found.events, found.config)),
    )


class _Table:
    """Rows of metrics.jsonl taken in one by one, kept as columns: a million steps fit in memory.

    A step that comes again after a resume takes the place of what the first life wrote from there on.
    """

    def __init__(self) -> None:
        self.steps: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self.evaluations: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._ranks: defaultdict[str, list[array[float]]] = defaultdict(list)
        self.num_unreadable = 0

    def take(self, line: str) -> None:
        row = _row(line)
        step = _number(row.get("step")) if row else math.nan
        if row is None or not step >= 0:
            self.num_unreadable += 1
        elif "val_loss" in row:
            _cut(self.evaluations, bisect_left(self.evaluations["step"], step))
            _append(self.evaluations, row)
        else:
            self._forget_from(step)
            _append(self.steps, row)
            self._append_lists(row)

    def _forget_from(self, step: float) -> None:
        written = self.steps["step"]
        if written and step <= written[-1]:
            length = bisect_left(written, step)
            _cut(self.steps, length)
            for lists in self._ranks.values():
                del lists[length:]
            _cut(self.evaluations, bisect_left(self.evaluations["step"], step))

    def _append_lists(self, row: dict[str, Any]) -> None:
        length = len(self.steps["step"])
        for name, values in row.items():
            if isinstance(values, list) and name.startswith("rank_"):
                lists = self._ranks[name]
                lists += [array("d")] * (length - 1 - len(lists))
                lists.append(array("d", map(_number, values)))

    def columns(self, columns: dict[str, "array[float]"]) -> dict[str, Floats]:
        length = len(columns["step"])
        return {name: _padded(np.array(values), length) for name, values in columns.items()}

    def rank_columns(self) -> dict[str, Floats]:
        """Ranks that a row does not have are NaN in it: a run may go on with another world size."""
        length, found = len(self.steps["step"]), {}
        num_ranks = max((len(values) for lists in self._ranks.values() for values in lists), default=0)
        for name, lists in self._ranks.items():
            filled = np.full((length, num_ranks), np.nan)
            for index, values in enumerate(lists):
                filled[index, : len(values)] = values
            found[name] = filled
        return found


def _append(columns: defaultdict[str, "array[float]"], row: dict[str, Any]) -> None:
    length = len(columns["step"])
    for name, value in row.items():
        if not isinstance(value, list):
            column = columns[name]
            column.extend([math.nan] * (length - len(column)))  # rows before it did not have this
            column.append(_number(value))


def _cut(columns: defaultdict[str, "array[float]"], length: int) -> None:
    for column in columns.values():
        del column[length:]


def _padded(values: Floats, length: int) -> Floats:
    return np.concatenate([values, np.full(length - len(values), np.nan)])


def _number(value: Any) -> float:
    """NaN for what is no number, and for what is none a float can hold."""
    if not isinstance(value, int | float):
        return math.nan
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else math.nan
    return math.nan


def _lines(path: Path) -> Iterator[str]:
    """The whole lines of a file, none where there is no such file; a last one without its end is being written, or was
    cut short, and is no row. Raises UserError where the file cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; a report needs it as a file that you may read"
        ) from None


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _events(path: Path) -> tuple[list[dict[str, Any]], int]:
    rows = [_row(line) for line in _lines(path)]
    events = [row for row in rows if row is not None and isinstance(row.get("event"), str)]
    return events, len(rows) - len(events)


def _config(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, tomllib.TOMLDecodeError, RecursionError):
        return {}
    sections = {name: values for name, values in document.items() if isinstance(values, dict)}
    return {
        f"{section}.{name}".replace("_", "-"): value
        for section, values in sections.items()
        for name, value in values.items()
    }


def _modified_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
