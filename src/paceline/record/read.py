"""What readers of a run's records need: its rows, and their values, which are not trusted."""

import math
from typing import Any

from paceline.base.jsonl import Row


def step_of(row: Row) -> int:
    """Returns the step of a row or an event; 0 if it has none, or one that no run can have come to."""
    step = row.get("step")
    return step if isinstance(step, int) and 0 <= step < 1 << 63 else 0


def number(value: Any) -> float:
    """Returns a recorded value as a float; NaN if it is no number, or too large."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan
