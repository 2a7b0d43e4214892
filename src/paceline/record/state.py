"""The state of a run, from the ends of its records: whether it is running, how it ended, which step it has reached."""

import math
import os
import re
import socket
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from paceline.base.jsonl import Row, last_rows
from paceline.base.process import namespace, start_ticks
from paceline.record.events import ending
from paceline.record.folder import RunFolder
from paceline.record.rate import Rate, rate_of
from paceline.record.read import number, step_of

# running: its process lives. ended: it reached its horizon. stopped: on request, saved. failed: an error was recorded.
# stale: no end is recorded, and its process is gone or, on another host, silent. imported: it never trained.
Kind = Literal["running", "ended", "stopped", "failed", "stale", "imported"]
# A run on another host without a new record for so long, for 20 steps and for three rows' steps, is stale.
_SILENT_S, _SILENT_STEPS, _SILENT_ROWS = 120.0, 20, 3
_VALUES_BYTES = 1 << 20  # of metrics.jsonl: holds the last evaluation, too, if that is not long ago


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run as its folder shows it now."""

    kind: Kind
    why: str  # of a stop, a failure or a stale run, in one line; else empty
    step: int  # the last recorded; 0 before the first
    num_steps: int | None  # None: the horizon is not a number of steps
    last: Row  # the newest training row; empty if there is none
    evaluation: Row  # the newest with a loss: a script's may have other numbers only; empty if none, or long ago
    rate: Rate | None  # over the newest steps; None before the first
    updated_s: float  # when the newest record was written, in seconds since 1970

    @property
    def is_running(self) -> bool:
        return self.kind == "running"


def read_state(folder: RunFolder) -> RunState:
    """Returns the state of a run. Raises nothing for damaged records: what cannot be read counts as missing."""
    rows, events = last_rows(folder.metrics, _VALUES_BYTES), last_rows(folder.events)
    events = [event for event in events if isinstance(event.get("event"), str)]
    last = next((row for row in reversed(rows) if "loss" in row and step_of(row)), {})
    times = [_written_s(path) for path in (folder.config, folder.metrics, folder.events)]
    kind, why = _how(folder, events)
    return RunState(
        kind=kind,
        why=why,
        step=max([step_of(last), *(step_of(event) for event in events[-1:])]),
        num_steps=_num_steps(folder, [*events, last]),
        last=last,
        evaluation=next((row for row in reversed(rows) if math.isfinite(number(row.get("val_loss")))), {}),
        rate=rate_of(rows, events),
        updated_s=max(times),
    )


def is_running(folder: RunFolder) -> bool:
    """Returns whether a process writes this run: on this host whether it lives; on another one, of which nothing else
    is known, whether it has written a record lately."""
    holder = _holder(folder)
    if holder is None:
        return False
    if holder.is_elsewhere:
        newest_s = max(holder.taken_s, _written_s(folder.metrics), _written_s(folder.events))
        return time.time() - newest_s < _fresh_s(folder)
    try:
        process = psutil.Process(holder.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # A later process may have the same pid.
        if holder.ticks not in ("", "0"):
            return holder.ticks == str(start_ticks(process.pid))
        return process.create_time() < holder.taken_s + 60  # a file server's clock may differ by some seconds
    except psutil.Error:
        return False


def may_train_elsewhere(folder: RunFolder) -> bool:
    """Returns whether another host wrote this run and no end is recorded, so that it may only be silent."""
    holder = _holder(folder)
    return holder is not None and holder.is_elsewhere and read_state(folder).kind in ("running", "stale")


class _Holder(NamedTuple):
    """The process that has, or had, the run folder's lock."""

    pid: int
    ticks: str  # when it started; empty: of an earlier version
    is_elsewhere: bool  # on another host
    taken_s: float  # when it took the lock


def _holder(folder: RunFolder) -> _Holder | None:
    """Returns what lock.holder says; None if it is not there or damaged."""
    path = folder.path / "lock.holder"
    try:
        name, place, ticks = [*path.read_text(errors="replace").strip().split("\n"), "", ""][:3]
        taken_s = path.stat().st_mtime
    except OSError:
        return None
    if (match := re.fullmatch(r"host (.*), pid (\d+)", name)) is None:
        return None
    # Two machines may have one name; of a run of an earlier version the name is all that is known.
    is_elsewhere = match[1] != socket.gethostname() or place not in ("", namespace("pid"))
    return _Holder(int(match[2]), ticks, is_elsewhere, taken_s)


def _fresh_s(folder: RunFolder) -> float:
    """Returns how many seconds after its newest record a run on another host may still be running."""
    rows = [row for row in last_rows(folder.metrics) if "loss" in row and step_of(row)]
    if not rows:
        return _SILENT_S
    every = number(read_config(folder.config).get("log.every"))
    if len(rows) > 1:
        every = float(step_of(rows[-1]) - step_of(rows[-2]))
    steps = max(_SILENT_STEPS, _SILENT_ROWS * every)
    return max(_SILENT_S, steps * number(rows[-1].get("step_ms")) / 1e3)


def read_config(path: Path) -> dict[str, Any]:
    """Returns a run's config as `section.field-name` -> value, named like the flags; empty if it cannot be read."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):  # also a number of thousands of digits
        return {}
    return {
        f"{section}.{name}".replace("_", "-"): value
        for section, values in document.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }


def _how(folder: RunFolder, events: list[Row]) -> tuple[Kind, str]:
    kind, why = ending(events)
    # A resumed run takes the lock some seconds before it records that.
    begins_again = _written_s(folder.path / "lock.holder") > _written_s(folder.events)
    if (kind in ("", "imported") or begins_again) and is_running(folder):
        return "running", ""
    return (kind, why) if kind else ("stale", "no end is recorded, and its process is gone or silent")


def _num_steps(folder: RunFolder, records: list[Row]) -> int | None:
    """Returns the horizon as the last attempt resolved it, or a script's loop, else as the config has it."""
    steps = next((record["num_steps"] for record in reversed(records) if "num_steps" in record), None)
    steps = steps or read_config(folder.config).get("train.steps")
    return steps if isinstance(steps, int) and steps > 0 else None


def _written_s(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
