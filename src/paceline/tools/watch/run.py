"""Follows the records of a run. They are not trusted: values of a wrong type count as missing."""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.base import units
from paceline.base.jsonl import Row, Tail
from paceline.record.events import clock, details, hosts, starts, text
from paceline.record.folder import RunFolder
from paceline.record.rate import Rate
from paceline.record.read import number
from paceline.record.state import RunState, read_config, read_state
from paceline.tools.view.findings import not_over, slow_stretches, state_text
from paceline.tools.watch.ranks import mean_steps, said
from paceline.tools.watch.view import Event, Fact, RunView

_NUM_RECENT = 20  # rows over which the times of ranks are averaged
_NUM_EVENTS = 100
_STATE_EVERY_S = 5.0  # without a new record: a process may have died


class Run:
    """One run, which may not have begun yet. Keeps a bounded part of its rows. `view` is what to show."""

    def __init__(self, path: Path):
        self._folder = RunFolder(path)
        self._metrics, self._log = Tail(self._folder.metrics), Tail(self._folder.events)
        self._begin_rows()
        self._begin_events()
        self._looked_s = -math.inf
        self.view = RunView(name=path.name)

    def update(self) -> bool:
        """Reads what is new. Returns whether `view` is another one."""
        is_new = _follow(self._metrics, self._begin_rows, self._add_row)
        is_new |= _follow(self._log, self._begin_events, self._add_event)
        now_s = time.monotonic()
        if not is_new and now_s - self._looked_s < _STATE_EVERY_S:
            return False
        self._looked_s = now_s
        before, self.view = self.view, self._viewed()
        return is_new or before.said != self.view.said

    def _begin_events(self) -> None:
        self._events: list[Row] = []

    def _add_event(self, event: Row) -> None:
        if isinstance(event.get("event"), str):
            self._events.append(event)

    def _begin_rows(self) -> None:
        self._curves = {"loss": Curve(), "validation": Curve(), "rate": Curve()}
        self._recent: deque[Row] = deque(maxlen=_NUM_RECENT)
        self._evaluation: Row = {}
        self._step = self._seconds = 0.0

    def _add_row(self, row: Row) -> None:
        step, tokens, step_ms = number(row.get("step")), number(row.get("tokens")), number(row.get("step_ms"))
        if not step >= 0:
            return
        if "val_loss" in row:
            self._evaluation = row
            self._curves["validation"].add(step, tokens, self._seconds, number(row["val_loss"]))
            return
        if step_ms > 0:
            self._seconds += step_ms * max(1.0, step - self._step) / 1e3
        self._step = step
        self._curves["loss"].add(step, tokens, self._seconds, number(row.get("loss")))
        self._curves["rate"].add(step, tokens, self._seconds, number(row.get("tokens_per_s")))
        if self._recent and self._recent[-1].get("world_size") != row.get("world_size"):
            self._recent.clear()
        self._recent.append(row)

    # ---- what to show ----

    def _viewed(self) -> RunView:
        state = read_state(self._folder)
        if not state.updated_s:  # there is no file
            return RunView(name=self.view.name)
        step_ms = state.rate.step_ms if state.rate else math.nan
        begun = starts(self._events)
        slow = not_over(slow_stretches(self._events, self._step, state.is_running), len(begun))
        ranks = mean_steps(self._recent, hosts(self._events), {stretch.rank for stretch in slow})
        frac, left_s = self._horizon(state, step_ms)
        level, words = state_text(state, self._events)
        return RunView(
            name=self.view.name,
            state=state.kind,
            level=level,
            said=words,
            updated_s=state.updated_s,
            step=f"{self._step:,.0f}" + (f" of {state.num_steps:,}" if state.num_steps else ""),
            frac=frac,
            facts=self._facts(state.rate, left_s if state.is_running else math.nan),
            ranks=ranks,
            ranks_said=said(ranks, slow),
            events=[_event(event) for event in reversed(self._events[-_NUM_EVENTS:])],
            resumed=[number(event.get("step")) for event in begun[1:] if event["event"] == "resume"],
            curves={name: curve.columns() for name, curve in self._curves.items()},
        )

    def _facts(self, rate: Rate | None, left_s: float) -> list[Fact]:
        tokens_per_s, step_ms, mfu = (rate.tokens_per_s, rate.step_ms, rate.mfu) if rate else (math.nan,) * 3
        last, evaluation = self._recent[-1] if self._recent else {}, self._evaluation
        saved = next((event for event in reversed(self._events) if event["event"] == "checkpoint"), {})
        num_starts, names = len(starts(self._events)), list(dict.fromkeys(hosts(self._events)))
        bits = number(evaluation.get("val_bpb"))
        evaluated = f"at step {text(evaluation.get('step'))}" + (f"; {bits:.3f} bits a byte" if bits > 0 else "")
        found: list[tuple[str, float, Callable[[float], str], str]] = [
            ("Loss", number(last.get("loss")), "{:.3f}".format, "nats a token"),
            ("Validation loss", number(evaluation.get("val_loss")), "{:.3f}".format, evaluated),
            ("Time left", left_s, units.duration, "of training"),
            ("Throughput", tokens_per_s, units.count, "tokens a second"),
            ("Step", step_ms, units.milliseconds, f"mean of the last {rate.num_rows if rate else 0} rows"),
            ("MFU", mfu, "{:.1%}".format, "of the ranks' peak"),
            ("Ranks", number(last.get("world_size")), "{:.0f}".format, f"on {units.listed(names)}" if names else ""),
            ("Tokens", number(last.get("tokens")), units.count, ""),
            ("Training time", self._seconds, units.duration, f"without pauses; attempt {num_starts}"),
            ("Checkpoint", number(saved.get("step")), "step {:,.0f}".format, clock(saved)[11:]),
        ]
        return [Fact(label, shown(value), note) for label, value, shown, note in found if math.isfinite(value)]

    def _horizon(self, state: RunState, step_ms: float) -> tuple[float, float]:
        if state.num_steps:
            return self._step / state.num_steps, max(0.0, state.num_steps - self._step) * step_ms / 1e3
        budget_s = number(read_config(self._folder.config).get("train.time-budget"))
        if not budget_s > 0:
            return math.nan, math.nan
        return min(1.0, self._seconds / budget_s), max(0.0, budget_s - self._seconds)


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


def _event(event: Row) -> Event:
    facts = {name: value for name, value in event.items() if name != "step"}
    return Event(clock(event), text(event["event"]), text(event.get("step")), " ".join(details(facts).split()))


# ---- all runs at a path ----

_MOST_RUNS = 32  # of a folder, the newest: as many as have a colour and a dash of their own
_MARKS = ("config.toml", "metrics.jsonl", "events.jsonl")  # a folder with one of these is a run


class Runs:
    """The runs at a path, in the order in which they appeared. Each has an index, and so a colour, which it keeps until
    it is no longer among the newest and a new run takes its place."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self._runs: dict[Path, tuple[int, Run]] = {}

    def update(self) -> list[tuple[int, RunView]]:
        """Reads what is new; returns index and view of the runs that changed."""
        found = self._found()
        for path in found:
            if path not in self._runs:
                index = len(self._runs)
                if index == _MOST_RUNS:
                    index, _ = self._runs.pop(next(known for known in self._runs if known not in found))
                self._runs[path] = index, Run(path)
        return [(index, run.view) for index, run in self._runs.values() if run.update()]

    @property
    def views(self) -> list[RunView]:
        return [run.view for _, run in self._runs.values()]

    @property
    def is_one(self) -> bool:
        """Whether the path is a run, not a folder of runs."""
        return self.path in self._runs

    def _found(self) -> list[Path]:
        if self.is_one or _begun_s(self.path):
            return [self.path]
        try:
            begun = {path: seconds for path in self.path.iterdir() if (seconds := _begun_s(path))}
        except OSError:  # it is not there yet
            return []
        return sorted(begun, key=lambda path: begun[path])[-_MOST_RUNS:]


def _begun_s(path: Path) -> float:
    times = []
    for mark in _MARKS:
        try:
            times.append((path / mark).stat().st_mtime)
        except OSError:  # not there, or not to be read
            continue
    return min(times, default=0.0)


# ---- curves ----

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
