"""The view of a run, for the terminal and, as JSON, for the page."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """A value as text, such as Loss, 2.345, nats a token."""

    label: str
    value: str
    note: str = ""


class Event(NamedTuple):
    time: str
    kind: str
    step: str
    facts: str


@dataclass(frozen=True, kw_only=True)
class RankView:
    """A rank's mean step, in milliseconds."""

    rank: int
    host: str
    work_ms: float  # data, forward, backward, optimizer
    parts: dict[str, float]  # part -> ms; they add up to the step
    is_slow: bool  # named a straggler, and not over yet


@dataclass(frozen=True, kw_only=True)
class RunView:
    name: str
    state: str = "waiting"  # there is no run yet; else record.state.Kind
    level: str = "open"  # or good, or bad
    said: str = "waiting for the run to begin"  # the state in words
    updated_s: float = math.nan  # when the newest record was written, since 1970
    step: str = ""  # 120 of 500
    frac: float = math.nan  # of the horizon; NaN if unknown
    facts: list[Fact] = field(default_factory=list)
    ranks: list[RankView] = field(default_factory=list)  # slowest first
    ranks_said: str = ""
    events: list[Event] = field(default_factory=list)  # newest first
    resumed: list[float] = field(default_factory=list)  # steps
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # loss, validation, rate (run.py)

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON has it: null for NaN."""
        found: dict[str, Any] = _without_nan(dataclasses.asdict(self))
        return found


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    return [_without_nan(each) for each in value] if isinstance(value, list | tuple) else value
