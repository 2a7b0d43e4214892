"""A run's events: its restarts, the cost of stragglers, and a table. Plain text, not escaped."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from paceline.base.jsonl import Row
from paceline.record.events import STARTS, clock, details, starts, text
from paceline.record.read import number


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
