"""What a run has recorded since a position, as points to send.

A run that resumes from an older checkpoint makes some steps again, and replaces their rows. A tracker that can forget
gets the new rows, too. The others keep the first ones: the law of resume says that the losses are the same.
"""

import copy
import json
import math
from dataclasses import dataclass, field
from datetime import datetime

from paceline.base.jsonl import Row, Tail
from paceline.record.events import STARTS
from paceline.record.folder import RunFolder
from paceline.record.read import number, step_of

_MOST = 200  # rows in a batch
_MOST_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row or event."""

    index: int  # 0, 1, 2 ... over all points of a run
    step: int
    time_s: float  # since 1970
    values: dict[str, float | str]  # "train/loss" -> 2.5; an event also has a text
    row: Row = field(default_factory=dict)  # as recorded


@dataclass
class Position:
    """Up to where a tracker has everything. Saved as JSON."""

    step: int = 0  # of the last training row
    eval_step: int = -1  # of the last evaluation: one may come before the first step
    eval_names: list[str] = field(default_factory=list)  # numbers of its rows; empty: it has no further rows to send
    events: int = 0  # number of them
    event_step: int = 0  # of the last event: some have none
    index: int = 0  # of the next point
    clock_s: float = 0.0  # the time of the last row: rows have no time, so it is counted from the events
    counts: dict[str, int] = field(default_factory=dict)  # of events, by kind
    attempts: list[tuple[int, float]] = field(default_factory=list)  # begun after this step at this time


class Reader:
    """Reads metrics.jsonl and events.jsonl of one run from a position on, while it trains and is resumed."""

    def __init__(self, folder: RunFolder, position: Position, can_forget: bool):
        self._folder, self._can_forget = folder, can_forget
        self._metrics, self._events = Tail(folder.metrics), Tail(folder.events)
        num_known = position.events
        while num_known and (known := self._events.read(num_known)[1]):
            num_known -= len(known)

    def read(self, at: Position) -> tuple[list[Point], Position]:
        """Returns the points after `at`, at most 2 * _MOST, and the position after them; no points: there are no more
        yet. Each is read once, so the caller keeps them until they are sent."""
        after = copy.deepcopy(at)
        events = self._read_events(after)  # first: a resumed run drops rows before it records that it resumes
        if after.step < at.step or after.eval_step < at.eval_step:
            self._metrics = Tail(self._folder.metrics)  # the new rows are for the next batch, without this event
        else:
            events += self._read_rows(after)
            events.sort(key=lambda each: each[:2])  # stable: a row comes before the events after its step
        clock = _Clock(after, at.step)
        points = []
        for step, _, row in events:
            values = _values_of_event(row, after) if is_event(row) else _values(row)
            points.append(Point(index=after.index, step=step, time_s=clock.time_s(step, row), values=values, row=row))
            after.index += 1
        return points, after

    def _read_events(self, after: Position) -> list[tuple[int, int, Row]]:
        points = []
        rows = self._events.read(_MOST)[1]
        after.events += len(rows)
        for event in rows:
            if not is_event(event):
                continue
            begins = event["event"] in STARTS
            if "step" in event or begins:
                after.event_step = step_of(event)
            if begins and (when := _time_s(event)):
                after.attempts.append((after.event_step, when))
            if begins and self._can_forget:
                after.step = min(after.step, after.event_step)
                if after.event_step < after.eval_step:
                    after.eval_step, after.eval_names = after.event_step, []  # the tracker keeps that step's rows
            points.append((after.event_step, 1, event))
        return points

    def _read_rows(self, after: Position) -> list[tuple[int, int, Row]]:
        rows_of_steps: list[tuple[int, int, Row]] = []
        while not rows_of_steps and (rows := self._metrics.read(_MOST)[1]):
            rows_of_steps.extend((step_of(row), 0, row) for row in rows if _pass(row, after))
        return rows_of_steps


def is_event(row: Row) -> bool:
    """Returns whether it is a row of events.jsonl: a script may log a number that is named event."""
    return isinstance(row.get("event"), str)


def _pass(row: Row, after: Position) -> bool:
    """Moves the position after a row of metrics.jsonl; returns whether the row is new."""
    if "val_loss" in row:
        return _pass_evaluation(row, after)
    if "loss" not in row or step_of(row) <= after.step:
        return False
    after.step = step_of(row)
    return True


def _pass_evaluation(row: Row, after: Position) -> bool:
    """The same of an evaluation. One of the last step is new if it has further numbers."""
    step, names = step_of(row), {name for name, value in row.items() if value is not None}
    known = set(after.eval_names)
    if step < after.eval_step or (step == after.eval_step and (not known or names <= known)):
        return False
    after.eval_step, after.eval_names = step, sorted(names | (known if step == after.eval_step else set()))
    return True


class _Clock:
    """Gives rows their times: an attempt's begin, and the time of each step since."""

    def __init__(self, position: Position, step: int):
        self._position, self._step = position, step

    def time_s(self, step: int, row: Row) -> float:
        at = self._position
        if is_event(row):
            return _time_s(row) or at.clock_s
        while at.attempts and max(step, 1) > at.attempts[0][0]:  # an evaluation of step 0 is of the first attempt
            at.clock_s = max(at.clock_s, at.attempts.pop(0)[1])
        is_evaluation = "val_loss" in row
        ms = number(row.get("eval_ms" if is_evaluation else "step_ms"))
        if math.isfinite(ms):
            num_steps = 1 if is_evaluation else max(1, step - self._step)  # a row may stand for several steps
            at.clock_s += num_steps * ms / 1e3
        if not is_evaluation:
            self._step = step
        return at.clock_s


def _values(row: Row) -> dict[str, float | str]:
    values: dict[str, float | str] = {}
    for name, value in row.items():
        if name not in ("step", "num_steps") and math.isfinite(number(value)):
            group = "eval" if "val_loss" in row else "time" if name.endswith("_ms") else "train"
            values[f"{group}/{name}"] = value
    spread = row.get("least_median_most")
    by_rank = row.get("rank_compute_ms", spread.get("compute_ms") if isinstance(spread, dict) else None)
    known = [ms for ms in map(number, by_rank) if math.isfinite(ms)] if isinstance(by_rank, list) else []
    if len(known) > 1:
        values |= {"time/slowest_rank_compute_ms": max(known), "time/fastest_rank_compute_ms": min(known)}
    return values


def _values_of_event(event: Row, position: Position) -> dict[str, float | str]:
    kind = event["event"]
    position.counts[kind] = position.counts.get(kind, 0) + 1
    facts = {name: value for name, value in event.items() if not name.endswith(("digest", "digests"))}
    return {f"events/{kind.replace(' ', '_')}": position.counts[kind], "event": json.dumps(facts)[:_MOST_TEXT]}


def _time_s(event: Row) -> float:
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return 0.0
