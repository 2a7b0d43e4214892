"""What is found in the events of a run, in words: its state, and which ranks were slow. Page, report and terminal say
these sentences. Plain text, not escaped.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.base import units
from paceline.base.jsonl import Row
from paceline.record.events import ENDS, STARTS, starts, text
from paceline.record.read import number
from paceline.record.state import RunState
from paceline.tools.view.read import Run

Level = Literal["good", "open", "bad"]

_LEVELS: dict[str, Level] = {"running": "good", "ended": "good", "failed": "bad"}  # others: open
_WORDS = {"ended": "finished", "imported": "imported, not trained yet"}
_SILENT_S, _SILENT_STEPS = 30.0, 10  # a record that is later than this is missed: a save, an evaluation, or a fault
_MOST_NAMED = 3


def state_text(state: RunState) -> tuple[Level, str]:
    """Returns the level and the description of a run's state."""
    silent_s = time.time() - state.updated_s
    step_s = state.rate.step_ms / 1e3 if state.rate else math.nan
    if state.is_running and silent_s > max(_SILENT_S, _SILENT_STEPS * step_s):
        return "open", f"running, without a new record for {units.duration(silent_s)}"
    word = _WORDS.get(state.kind, state.kind)
    return _LEVELS.get(state.kind, "open"), f"{word}: {state.why}" if state.why else word


def warning(run: Run) -> str:
    """Returns what to read before the figures; empty if there is nothing."""
    if run.config.get("parallel.strategy") == "local":
        return (
            "Trained with local steps (parallel.strategy local), which is another algorithm than data-parallel "
            "training: the loss depends on the number of ranks."
        )
    return ""


def notices(run: Run) -> list[str]:
    """Returns what of the records is missing."""
    texts = []
    if not len(run.steps):
        texts.append("No step is recorded yet.")
    if run.num_unreadable:
        texts.append(
            f"{units.plural(run.num_unreadable, 'line')} of its records could not be read, and count for nothing."
        )
    if not run.config:
        texts.append("Its config.toml could not be read.")
    return texts


@dataclass(frozen=True)
class Slow:
    """A stretch of steps in which a rank was reported as a straggler."""

    rank: int
    attempt: int  # 0: the first
    since_step: float
    until_step: float  # where the rank caught up, or the records end
    is_over: bool  # the rank caught up
    text: str  # without a full stop


def slow_stretches(events: Sequence[Row], last_step: float, is_running: bool) -> list[Slow]:
    """Returns the stretches in the order of their ends. last_step: of the records; NaN without any. is_running: the
    run has not ended; then a stretch without an event that ends it has not ended either."""
    stretches: list[Slow] = []
    reported: dict[int, Row] = {}
    attempt = -1

    def close(rank: int, until: float, cost_s: float = math.nan, is_over: bool = False, goes_on: bool = False) -> None:
        event = reported.pop(rank)
        known = [step for name in ("since_step", "step") if math.isfinite(step := number(event.get(name)))]
        if known:
            until = max(known[0], until if math.isfinite(until) else last_step)
            said = _slow_text(event, rank, f"since step {known[0]:,.0f}" if goes_on else _steps(known[0], until))
            said += f"; it cost {units.duration(cost_s)}" if math.isfinite(cost_s) else ""
            stretches.append(Slow(rank, max(0, attempt), known[0], until, is_over, said))

    for event in events:
        kind, rank = event["event"], number(event.get("rank"))
        if kind == "straggler" and rank >= 0:
            reported.setdefault(int(rank), event)
        elif kind == "straggler over" and rank in reported:
            close(int(rank), number(event.get("step")), number(event.get("cost_s")), is_over=True)
        elif kind in (*STARTS, *ENDS):
            for slow in list(reported):
                close(slow, number(event.get("reached" if kind in STARTS else "step")))
            attempt += kind in STARTS
    for slow in list(reported):
        close(slow, last_step, goes_on=is_running)
    return stretches


def not_over(stretches: Sequence[Slow], num_attempts: int) -> list[Slow]:
    """Returns the stretches of the last attempt in which the rank did not catch up."""
    return [slow for slow in stretches if slow.attempt == max(0, num_attempts - 1) and not slow.is_over]


def slow_text(stretches: Sequence[Slow]) -> str:
    """Returns sentences about the first stretches, and how many more there are."""
    sentences = [f"{slow.text[0].upper()}{slow.text[1:]}." for slow in stretches[:_MOST_NAMED]]
    if len(stretches) > _MOST_NAMED:
        sentences.append(f"And so {len(stretches) - _MOST_NAMED} times more.")
    return " ".join(sentences)


def _steps(since: float, until: float) -> str:
    return f"in steps {since:,.0f} to {until:,.0f}"


def _slow_text(event: Row, rank: int, when: str) -> str:
    host, phase = text(event.get("host")), text(event.get("phase"))
    ms, median_ms = number(event.get("ms")), number(event.get("median_ms"))
    verb = "has been" if when.startswith("since") else "was"
    said = f"rank {rank}" + (f" (host {host})" if host else "") + f" {verb} slow {when}"
    if phase and math.isfinite(ms) and math.isfinite(median_ms):
        said += f": {phase} took it {ms:,.3g} ms, the median rank {median_ms:,.3g} ms"
    return said


# ---- restarts, and what stragglers cost ----


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
