"""A run's events: its end, restarts and stragglers, and a table. Plain text, not escaped."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.base import units
from paceline.base.jsonl import Row
from paceline.record.events import STARTS, clock, details, ending, starts, text
from paceline.record.read import number

_STOPS = ("end", "failed", "hang")


def status(events: Sequence[Row]) -> tuple[str, str]:
    """Returns (good, open or bad; a description)."""
    kind, why = ending(events)
    if kind == "failed":
        return "bad", "failed"
    if kind == "stopped":
        return "open", f"stopped: {why}"
    if kind != "ended":
        return "open", "no end is recorded: still running, or cut short"
    return ("open", "finished, with repaired replicas") if repairs(events) else ("good", "finished")


def repairs(events: Sequence[Row]) -> list[float]:
    return [number(event.get("step")) for event in events if event["event"] == "repaired"]


def restarts(events: Sequence[Row]) -> tuple[int, int]:
    """Returns (number of restarts, number of repeated steps)."""
    again = starts(events)[1:]
    reached = np.nan_to_num([number(event.get("reached")) for event in again])
    begun = np.nan_to_num([number(event.get("step")) for event in again])  # a `start` begins at 0 and has no step
    return len(again), int(np.maximum(reached - begun, 0).sum())


def straggler_cost_s(events: Sequence[Row]) -> float:
    """Returns the seconds of waiting for reported stragglers; NaN if no event has them."""
    costs: list[float] = []
    stretches: list[float] = []  # of one attempt
    at_end = math.nan  # their sum, if the attempt recorded its end
    for event in [*events, {"event": "start"}]:
        if event["event"] in STARTS:
            costs += [at_end] if math.isfinite(at_end) else stretches
            at_end, stretches = math.nan, []
        elif event["event"] == "end":
            at_end = number(event.get("straggler_cost_s"))
        elif event["event"] == "straggler over":
            stretches.append(number(event.get("cost_s")))
    known = [cost for cost in costs if math.isfinite(cost)]
    return sum(known) if known else math.nan


@dataclass(frozen=True)
class Slow:
    """A stretch of steps in which a rank was reported as a straggler."""

    rank: int
    since_step: float
    until_step: float  # where the rank caught up, or the records end
    text: str


def slow_stretches(events: Sequence[Row], last_step: float) -> list[Slow]:
    """Returns the stretches in the order of their ends. last_step: of the records; NaN without any."""
    found: list[Slow] = []
    reported: dict[int, Row] = {}

    def close(rank: int, until: float, cost_s: float) -> None:
        event = reported.pop(rank)
        known = [step for name in ("since_step", "step") if math.isfinite(step := number(event.get(name)))]
        if known:
            until = max(known[0], until if math.isfinite(until) else last_step)
            found.append(Slow(rank, known[0], until, _slow_text(event, rank, known[0], until, cost_s)))

    for event in [*events, {"event": "end", "step": last_step}]:
        kind, rank = event["event"], number(event.get("rank"))
        if kind == "straggler" and rank >= 0:
            reported.setdefault(int(rank), event)
        elif kind == "straggler over" and rank in reported:
            close(int(rank), number(event.get("step")), number(event.get("cost_s")))
        elif kind in (*STARTS, *_STOPS):
            for slow in list(reported):
                close(slow, number(event.get("reached" if kind in STARTS else "step")), math.nan)
    return found


def _slow_text(event: Row, rank: int, since: float, until: float, cost_s: float) -> str:
    host, phase = text(event.get("host")), text(event.get("phase"))
    ms, median_ms = number(event.get("ms")), number(event.get("median_ms"))
    said = f"rank {rank}" + (f" (host {host})" if host else "") + f" was slow in steps {since:,.0f} to {until:,.0f}"
    if phase and math.isfinite(ms) and math.isfinite(median_ms):
        said += f": {phase} took it {ms:,.3g} ms, the median rank {median_ms:,.3g} ms"
    return said + (f"; it cost {units.duration(cost_s)}" if math.isfinite(cost_s) else "")


def table(events: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Returns rows of time, event, step and details; consecutive checkpoints share a row."""
    found = []
    for _, group in itertools.groupby(enumerate(events), lambda at: "" if at[1]["event"] == "checkpoint" else at[0]):
        alike = [event for _, event in group]
        first, last = alike[0], alike[-1]
        several = len(alike) > 1
        steps = f"{_step(first)} to {_step(last)}" if several else _step(first)
        said = details({**last, "step": None})  # shown in its own column
        said = f"{len(alike)} of them; the last: {said}" if several else said
        found.append((clock(first), text(first["event"]), text(steps), text(said)))
    return found


def _step(event: Row) -> str:
    step = event.get("step")
    return f"{step:,}" if isinstance(step, int) else text(step)
