"""The rate of a run, by the one definition that `train` at its end, `runs`, `watch` and `report` share."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.base.jsonl import Row
from paceline.record.events import STARTS
from paceline.record.read import number, step_of

NUM_ROWS = 100  # the newest rows: the rate of a long run is that of now, and needs only the end of its records


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Of the steps of some rows together: their tokens and FLOPs, divided by their time."""

    tokens_per_s: float
    mfu: float  # NaN if the peak of the ranks is unknown
    step_ms: float
    num_rows: int


def rate_of(rows: Sequence[Row], events: Sequence[Row]) -> Rate | None:
    """Returns the rate over the usual rows; None without any. rows, events: as usual_rows has them."""
    chosen = usual_rows(rows, events)
    if not chosen:
        return None
    ms = [number(row["step_ms"]) for row in chosen]

    def mean(name: str) -> float:
        return sum(number(row.get(name)) * each for row, each in zip(chosen, ms, strict=True)) / sum(ms)

    return Rate(tokens_per_s=mean("tokens_per_s"), mfu=mean("mfu"), step_ms=sum(ms) / len(ms), num_rows=len(chosen))


def usual_rows(rows: Sequence[Row], events: Sequence[Row]) -> list[Row]:
    """Returns the last NUM_ROWS training rows of the newest attempt that has any. Its first step compiles, and a traced
    one is slow: they do not count, unless there are no others.

    rows, events: the ends of metrics.jsonl and events.jsonl, or more of them; evaluation rows do not count.
    """
    values = ("step", "tokens_per_s", "step_ms")  # damaged rows lack one of them
    timed = [row for row in rows if step_of(row) and all(number(row.get(name)) > 0 for name in values)]
    if not timed:
        return []
    begun = [step_of(event) for event in events if event.get("event") in STARTS]  # `start` has no step: 0
    begun_at = next((step for step in reversed(begun) if step < step_of(timed[-1])), 0)
    timed = [row for row in timed if step_of(row) > begun_at]
    not_usual = {begun_at + 1, *(step_of(event) for event in events if event.get("event") == "profile")}
    return ([row for row in timed if step_of(row) not in not_usual] or timed)[-NUM_ROWS:]
