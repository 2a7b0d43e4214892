"""Events of a run as text: kind, time and facts of a row of events.jsonl. Plain text, not escaped."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

from paceline.base import units
from paceline.base.jsonl import Row
from paceline.record.folder import COMPLETE
from paceline.record.read import number

STARTS = ("start", "resume")
ENDS = ("end", "failed", "hang")
_NOT_SHOWN = ("time", "event", "digest", "state_digests", "version", "torch", "devices")


def starts(events: Sequence[Row]) -> list[Row]:
    """Returns the event that began each attempt."""
    return [event for event in events if event["event"] in STARTS]


def ending(events: Sequence[Row]) -> tuple[Literal["ended", "stopped", "failed", "imported", ""], str]:
    """Returns how the last attempt ended, and why it stopped or failed, in one line. Empty: no end is recorded."""
    last = next((event for event in reversed(events) if event["event"] in (*STARTS, "import", *ENDS)), {"event": ""})
    if last["event"] == "end":
        reason = text(last.get("reason"))
        return ("ended", "") if reason == COMPLETE else ("stopped", reason)
    if last["event"] in ENDS:
        return "failed", text(last.get("error", last.get("message", ""))).partition("\n")[0]
    return ("imported" if last["event"] == "import" else ""), ""


def hosts(events: Sequence[Row]) -> list[str]:
    """Returns the hosts by rank of the last attempt that recorded them: ranks may move when a run resumes."""
    named = [event["hosts"] for event in starts(events) if isinstance(event.get("hosts"), list) and event["hosts"]]
    return [text(host) for host in named[-1]] if named else []


def clock(event: Row) -> str:
    """Returns an event's time, `2026-11-20 08:00:00`."""
    return text(event.get("time"))[:19].replace("T", " ")


def details(event: Row) -> str:
    """Returns an event's facts besides kind and time, in a line."""
    told = [_detail(name, value) for name, value in event.items() if name not in _NOT_SHOWN and value is not None]
    return text(", ".join(told))


def _detail(name: str, value: Any) -> str:
    """`cost_s` 411.5 -> 'cost 411.5 s': the name has the unit."""
    words, shown = name.replace("_", " "), _listed(value) if isinstance(value, list) else text(value)
    if name == "bytes" and number(value) >= 0:
        return units.size(value)
    for suffix in ("ms", "s"):
        if name.endswith(f"_{suffix}"):
            return f"{words.removesuffix(suffix)}{shown} {suffix}"
    return f"{shown} {words}" if name in ("ms", "seconds") else f"{words} {shown}"


def _listed(values: Sequence[Any]) -> str:
    """`a`, `a`, `b` -> 'a x 2, b', for many ranks on few hosts."""
    alike = [(shown, len(list(equal))) for shown, equal in itertools.groupby(map(text, values))]
    return ", ".join(f"{shown} x {count}" if count > 1 else shown for shown, count in alike)


def text(value: Any) -> str:
    """Returns any recorded value as a short text."""
    if isinstance(value, float):
        return f"{value:,.6g}"
    shown = value if isinstance(value, str) else "" if value is None else str(value)
    return shown if len(shown) <= 400 else shown[:399] + "…"
