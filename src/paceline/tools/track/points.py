"""What a run has recorded since a position, as points to send.

Each step and each evaluation is sent once. Steps that a resumed run makes again, since its checkpoint was older, are
not: most trackers cannot replace a row, and the law of resume says that the losses are the same.
"""

import copy
import json
import math
from dataclasses import dataclass, field
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from paceline.record.folder import RunFolder
from paceline.record.read import Row

MOST = 200  # points in a batch, about
_MOST_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row or event."""

    index: int  # 0, 1, 2 ... over all points of a run
    step: int
    time_s: float  # since 1970
    row: Row  # as recorded
    values: dict[str, float | str]  # "train/loss" -> 2.5; an event also has a text


@dataclass
class Position:
    """Up to where a tracker has everything. Saved as JSON."""

    step: int = 0  # of the last training row
    eval_step: int = 0
    events: int = 0  # bytes of events.jsonl
    event_step: int = 0  # of the last event: some have none
    index: int = 0  # of the next point
    clock_s: float = 0.0  # the time of the last row: rows have no time, so it is counted from the events
    counts: dict[str, int] = field(default_factory=dict)  # of events, by kind
    attempts: list[tuple[int, float]] = field(default_factory=list)  # begun after this step at this time


class Reader:
    """Reads metrics.jsonl and events.jsonl of one run, which may go on, and may be resumed meanwhile."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._metrics: BufferedReader | None = None

    def read(self, at: Position, limit: Position | None = None) -> tuple[list[Point], Position]:
        """Returns the points after `at`, at most about MOST, and the position after them. Each row is read once: a
        caller that cannot send the points keeps them. With a limit reads exactly to there: after a crash the same
        points have the same index and time. Raises OSError."""
        after = copy.deepcopy(at)
        found = [(_step(row), 0, row) for row in self._rows(after, limit)]
        for event in self._events(after, limit):
            if "step" in event or event["event"] == "start":
                after.event_step = _step(event)
            found.append((after.event_step, 1, event))
            if event["event"] in ("start", "resume") and (when := _time_s(event)):
                after.attempts.append((after.event_step, when))
        found.sort(key=lambda each: each[:2])  # stable: a row comes before the events after its step
        clock = _Clock(after, at.step)
        points = []
        for step, _, row in found:
            values = _values_of_event(row, after) if "event" in row else _values(row)
            points.append(Point(index=after.index, step=step, time_s=clock.time_s(step, row), row=row, values=values))
            after.index += 1
        return points, after

    def _rows(self, after: Position, limit: Position | None) -> list[Row]:
        found: list[Row] = []
        self._open_newest()
        while self._metrics is not None and len(found) < MOST:
            place = self._metrics.tell()
            line = self._metrics.readline()
            if not line.endswith(b"\n"):
                self._metrics.seek(place)
                break
            row = _row(line)
            if row is None or not ("loss" in row or "val_loss" in row):
                continue
            name = "eval_step" if "val_loss" in row else "step"
            if limit is not None and _step(row) > getattr(limit, name):
                self._metrics.seek(place)
                break
            if _step(row) > getattr(after, name):
                setattr(after, name, _step(row))
                found.append(row)
        return found

    def _open_newest(self) -> None:
        """A resumed run replaces metrics.jsonl. While the old file is open, the new one has another inode."""
        path = self._folder.metrics
        try:
            if self._metrics is None or path.stat().st_ino != Path(f"/dev/fd/{self._metrics.fileno()}").stat().st_ino:
                self.close()
                self._metrics = path.open("rb")
        except FileNotFoundError:
            return

    def _events(self, after: Position, limit: Position | None) -> list[Row]:
        try:
            with self._folder.events.open("rb") as file:
                file.seek(after.events)
                data = file.read() if limit is None else file.read(max(0, limit.events - after.events))
        except FileNotFoundError:
            return []
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)[:MOST]
        after.events += sum(map(len, lines))
        return [row for line in lines if (row := _row(line)) and isinstance(row.get("event"), str)]

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


class _Clock:
    """Gives rows their times: an attempt's begin, and the time of each step since."""

    def __init__(self, position: Position, step: int):
        self._position, self._step = position, step

    def time_s(self, step: int, row: Row) -> float:
        at = self._position
        if "event" in row:
            return _time_s(row) or at.clock_s
        while at.attempts and step > at.attempts[0][0]:
            at.clock_s = max(at.clock_s, at.attempts.pop(0)[1])
        ms = row.get("eval_ms" if "val_loss" in row else "step_ms")
        if isinstance(ms, int | float):
            num_steps = 1 if "val_loss" in row else max(1, step - self._step)  # a row may stand for several steps
            at.clock_s += num_steps * ms / 1e3
        self._step = step
        return at.clock_s


def _values(row: Row) -> dict[str, float | str]:
    values: dict[str, float | str] = {}
    for name, value in row.items():
        if isinstance(value, int | float) and math.isfinite(value) and name != "step":
            group = "eval" if "val_loss" in row else "time" if name.endswith("_ms") else "train"
            values[f"{group}/{name}"] = value
    by_rank = row.get("rank_compute_ms")
    if isinstance(by_rank, list) and len(by_rank) > 1:
        values |= {"time/slowest_rank_compute_ms": max(by_rank), "time/fastest_rank_compute_ms": min(by_rank)}
    return values


def _values_of_event(event: Row, position: Position) -> dict[str, float | str]:
    kind = event["event"]
    position.counts[kind] = position.counts.get(kind, 0) + 1
    facts = {name: value for name, value in event.items() if not name.endswith(("digest", "digests"))}
    return {f"events/{kind.replace(' ', '_')}": position.counts[kind], "event": json.dumps(facts)[:_MOST_TEXT]}


def _row(line: bytes) -> Row | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _step(row: Row) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _time_s(event: Row) -> float:
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return 0.0
