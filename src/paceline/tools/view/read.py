"""Reads the records of runs: of one that ended, still trains, was cut short, is of an older paceline, or has not begun.

The files are not trusted: values of a wrong type count as missing, and lines that are no rows are counted and skipped.
"""

import dataclasses
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.base.jsonl import Row, Tail
from paceline.record.events import STARTS
from paceline.record.folder import RunFolder
from paceline.record.rate import NUM_ROWS
from paceline.record.read import number
from paceline.record.rows import LISTS, MOST_LISTED, NUMBERS, EvalRow
from paceline.record.state import read_config

Floats = NDArray[np.float64]
# The parts of a step in order: name -> column by rank. What is left of a step is `other`.
PARTS = {
    "data": "rank_data_ms",
    "forward": "rank_forward_ms",
    "backward": "rank_backward_ms",
    "exposed communication": "rank_exposed_comm_ms",
    "optimizer": "rank_optim_ms",
}
WORK = ("data", "forward", "backward", "optimizer")  # a rank's other parts are waits
_EVAL_COLUMNS = [field.name for field in dataclasses.fields(EvalRow)]
LOGGED = "logged "  # before the name of a number of the script's own
_OF_STEPS = {*NUMBERS, *LISTS, "unit", "num_steps"}  # every other name may be one
_OF_EVALUATIONS = {"step", "val_loss", "tokens", "unit", "elapsed_s"}  # the same, of rows of `run.evaluated`
_MOST_LOGGED = 24  # further ones are not shown


class Columns:
    """Numbers by increasing step, 8 bytes each, so that a million rows fit in memory. NaN is a missing value."""

    def __init__(self, names: Sequence[str]):
        self._values = {name: array("d") for name in names}
        self.logged: list[str] = []  # columns of the script's own numbers

    def __len__(self) -> int:
        return len(self._values["step"])

    def __getitem__(self, name: str) -> Floats:
        return np.array(self._values[name])

    def last(self, name: str) -> float:
        """Returns the last number that is known; NaN if none is."""
        return next((value for value in reversed(self._values[name]) if math.isfinite(value)), math.nan)

    def cut(self, step: float) -> None:
        """Drops the rows from this step on: a resumed run makes them again."""
        length = bisect_left(self._values["step"], step)
        for column in self._values.values():
            del column[length:]

    def append(self, row: Mapping[str, Any]) -> None:
        for name in row:
            if name.startswith(LOGGED) and name not in self._values and len(self.logged) < _MOST_LOGGED:
                self.logged.append(name)
                self._values[name] = array("d", [math.nan] * len(self))
        for name, column in self._values.items():
            column.append(number(row.get(name)))


def _logged(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the script's own numbers, by column; a trainer's row has no unit, and none of them."""
    if "unit" not in row:
        return {}
    known = _OF_EVALUATIONS if "val_loss" in row else _OF_STEPS
    logged = {name: number(value) for name, value in row.items() if name not in known}
    return {LOGGED + name: value for name, value in logged.items() if math.isfinite(value)}


class Run:
    """The records of one run, which may not have begun yet."""

    def __init__(self, path: Path, name: str = "", num_parameters: Callable[[Path], int] = lambda path: 0):
        """name: on the page, else that of the folder. num_parameters: of the run's model, 0 if unknown."""
        self.folder, self.name = RunFolder(path), name or path.name
        self.config: dict[str, Any] = {}  # `section.field` -> value, named like the flags; empty if unreadable
        self.num_parameters = 0
        self._count_parameters = num_parameters
        self._metrics, self._log = Tail(self.folder.metrics), Tail(self.folder.events)
        self._begin_rows()
        self._begin_events()

    def read(self) -> bool:
        """Reads what is new; returns whether anything is."""
        is_new = _follow(self._metrics, self._begin_rows, self._add_row)
        is_new |= _follow(self._rank_rows, self.ranks.drop_large, self._add_ranks)
        is_new |= _follow(self._log, self._begin_events, self._add_event)
        if not self.config and (config := read_config(self.folder.config)):
            self.config, self.num_parameters = config, self._count_parameters(self.folder.path)
        return is_new

    @property
    def unit(self) -> str:
        """What the run's rows count: tokens; samples, or what the script said, in the run of a script."""
        return str(self.config.get("run.unit", "tokens"))

    @property
    def dealt(self) -> str:
        """What is divided among the ranks: sequences; what rows count, in the run of a script."""
        return str(self.config.get("run.unit", "sequences"))

    @property
    def num_unreadable(self) -> int:
        """Lines that are no rows."""
        num_skipped = sum(tail.num_skipped for tail in (self._metrics, self._rank_rows, self._log))
        return num_skipped + self._num_bad_rows + self._num_bad_events

    def _begin_rows(self) -> None:
        self.steps = Columns([*NUMBERS, "seconds", "wait_ms"])
        self.evaluations = Columns(_EVAL_COLUMNS)
        self._evaluation: Row = {}  # the last one
        self.ranks = RankHistory()
        self.recent: deque[Row] = deque(maxlen=NUM_ROWS + 2)  # of which two may be unusual
        self._num_bad_rows = 0
        self._rank_rows = Tail(self.folder.ranks)  # of a world of more ranks than a row of metrics.jsonl lists

    def _add_row(self, row: Row) -> None:
        step = number(row.get("step"))
        if not step >= 0:
            self._num_bad_rows += 1
            return
        row = row | _logged(row)
        if "val_loss" in row:
            if self.evaluations.last("step") == step:  # a script may evaluate a step twice, for other numbers
                row = self._evaluation | {name: value for name, value in row.items() if value is not None}
            self._evaluation = row
            self.evaluations.cut(step)
            self.evaluations.append(row)
            return
        self.evaluations.cut(step + 1)  # one of this step may have come before
        if step <= self.steps.last("step"):  # else ranks.jsonl may have this step, and was read first
            self.ranks.cut(step)
        self.steps.cut(step)
        while self.recent and number(self.recent[-1]["step"]) >= step:
            self.recent.pop()
        self.recent.append(row)
        before = (self.steps.last("step"), self.steps.last("seconds")) if len(self.steps) else (0.0, 0.0)
        step_ms = number(row.get("step_ms"))
        seconds = before[1] + (step_ms * (step - before[0]) / 1e3 if step_ms > 0 else 0.0)
        work = work_ms(row)
        known = [ms for ms in work if ms > 0]
        usual_ms = median_low(known) if known else math.nan
        self.steps.append(row | {"seconds": seconds, "wait_ms": max(known, default=math.nan) - usual_ms})
        if len(work) > 1:
            self.ranks.add(step, [_slower(ms, usual_ms) for ms in work], by_rank(row, "rank_sequences"))

    def _add_ranks(self, row: Row) -> None:
        step, work = number(row.get("step")), work_ms(row)
        if step >= 0 and work:
            self.ranks.add(step, [_slower(ms, median_low(work)) for ms in work], by_rank(row, "rank_sequences"))
            for recent in self.recent:
                if recent["step"] == step:
                    recent.update(row)

    def _begin_events(self) -> None:
        self.events: list[Row] = []  # each has an `event`, a text
        self._num_bad_events = 0

    def _add_event(self, event: Row) -> None:
        if isinstance(event.get("event"), str):
            self.events.append(event)
            if event["event"] in STARTS:
                self.config = {}  # an attempt may have another one
        else:
            self._num_bad_events += 1


def _follow(tail: Tail, begin: Callable[[], None], add: Callable[[Row], None]) -> bool:
    """Reads a file up to its end; returns whether anything is new."""
    is_any = False
    while True:
        is_anew, rows = tail.read()
        if is_anew:
            begin()
        for row in rows:
            add(row)
        is_any |= is_anew or bool(rows)
        if not rows:
            return is_any


# ---- ranks ----


def by_rank(row: Row, name: str) -> list[float]:
    """Returns a list of a row; empty if it has none."""
    values = row.get(name)
    return [number(value) for value in values] if isinstance(values, list) else []


def rank_parts(row: Row) -> dict[str, list[float]]:
    """Returns part -> milliseconds by rank, `other` last. Older rows have data, forward and backward as one part."""
    parts = {part: by_rank(row, column) for part, column in PARTS.items()}
    if not all(parts.values()):
        parts = {"compute": by_rank(row, "rank_compute_ms")}
    sums = [sum(values) for values in zip(*parts.values(), strict=False)]
    # A rank that began the step before rank 0 did took longer for it.
    own_ms, step_ms = by_rank(row, "rank_step_ms"), number(row.get("step_ms"))
    own_ms += [step_ms] * (len(sums) - len(own_ms))
    return parts | {
        "other": [max(0.0, step_ms - ms, whole_ms - ms) for whole_ms, ms in zip(own_ms, sums, strict=False)]
    }


def work_ms(row: Row) -> list[float]:
    """Returns the milliseconds of each rank's own work: data, forward, backward, optimizer; without the last in older
    rows."""
    parts = [by_rank(row, PARTS[part]) for part in WORK]
    return [sum(values) for values in zip(*parts, strict=False)] or by_rank(row, "rank_compute_ms")


def _slower(ms: float, usual_ms: float) -> float:
    """Returns by which share a time is above that of the median rank; 0 if it is not."""
    return max(0.0, ms / usual_ms - 1) if usual_ms > 0 and math.isfinite(ms) else math.nan


MOST_COLUMNS, _MOST_CELLS = 300, 20_000  # of the history


@dataclass
class _Stretch:
    """Consecutive rows. Its place is that of the last one. Lists are by rank."""

    step: float
    num_rows: int
    slowness: list[float]  # sums
    slowest: list[float]
    sequences: list[float]  # sums

    def add(self, later: "_Stretch") -> None:
        if len(later.slowness) != len(self.slowness):  # another number of ranks: what is later counts
            self.__dict__.update(vars(later))
            return
        self.step, self.num_rows = later.step, self.num_rows + later.num_rows
        self.slowness = [a + b for a, b in zip(self.slowness, later.slowness, strict=True)]
        self.slowest = list(map(max, self.slowest, later.slowest))
        self.sequences = [a + b for a, b in zip(self.sequences, later.sequences, strict=False)]


class RankHistory:
    """By how much each rank was slower than the median rank, and its sequences, over the whole run. Keeps at most
    MOST_COLUMNS stretches of equally many rows, so that its memory is bounded."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self.rows_per_stretch = 1

    def cut(self, step: float) -> None:
        if self._stretches and self._stretches[-1].step >= step:
            del self._stretches[bisect_left(self._stretches, step, key=lambda stretch: stretch.step) :]

    def drop_large(self) -> None:
        """Drops the rows of ranks.jsonl, which begins anew."""
        self._stretches = [each for each in self._stretches if len(each.slowness) <= MOST_LISTED]

    def add(self, step: float, slowness: list[float], sequences: list[float]) -> None:
        """Adds a row at its place: one of ranks.jsonl may be read after later steps of a smaller world."""
        new = _Stretch(step, 1, slowness, slowness, sequences)
        place = bisect_left(self._stretches, step, key=lambda stretch: stretch.step)
        if place and self._stretches[place - 1].num_rows < self.rows_per_stretch:
            self._stretches[place - 1].add(new)
            return
        self._stretches.insert(place, new)
        if len(self._stretches) > max(8, min(MOST_COLUMNS, _MOST_CELLS // len(slowness))):
            self._halve()

    def _halve(self) -> None:
        self.rows_per_stretch *= 2
        for stretch, later in zip(self._stretches[::2], self._stretches[1::2], strict=False):
            stretch.add(later)
        self._stretches = self._stretches[::2]

    @property
    def steps(self) -> list[float]:
        return [stretch.step for stretch in self._stretches]

    def slowness(self) -> tuple[list[list[float]], list[list[float]]]:
        """Returns, by stretch and rank, the mean and the most of its rows."""
        means = [[ms / stretch.num_rows for ms in stretch.slowness] for stretch in self._stretches]
        return means, [stretch.slowest for stretch in self._stretches]

    def sequences(self) -> list[list[float]]:
        """Returns, by stretch and rank, the mean number of sequences of a step."""
        return [[count / stretch.num_rows for count in stretch.sequences] for stretch in self._stretches]


# ---- shorter curves: each bucket of rows keeps its mean, lowest and highest, so that no outlier is lost ----

MOST_POINTS = 400  # of a curve: three to six pixels of a wide screen each


def buckets(num_rows: int, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Returns where buckets begin: at most `most` of 1, 2, 4, ... rows each, so that earlier points of a growing curve
    stay where they are."""
    width = 1
    while num_rows > width * most:
        width *= 2
    return np.arange(0, num_rows, width)


def last_of(values: Floats, begins: NDArray[np.intp]) -> Floats:
    """Returns a column's value in the last row of each bucket, so that a curve reaches the present."""
    return np.asarray(values[np.append(begins[1:], len(values)) - 1])


def in_buckets(values: Floats, begins: NDArray[np.intp]) -> tuple[Floats, Floats, Floats]:
    """Returns mean, lowest and highest of the finite values of each bucket; NaN if it has none."""
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.float64), begins)
    sums = np.add.reduceat(np.where(known, values, 0.0), begins)
    finite = np.where(known, values, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    return mean, np.fmin.reduceat(finite, begins), np.fmax.reduceat(finite, begins)
