"""When a failed run is started again: at once, later, or not."""

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.base.jsonl import Tail, last_rows, open_at_line_end

_SAME_STEP_MOST = 3  # failures in a row at one step: not by chance
_LONGEST_DELAY_S = 60.0
_ENDS = ("end", "hang")  # events that end an attempt


@dataclass(frozen=True)
class Failure:
    what: str  # who ended, and how
    reached: int  # the last step in the run's records


def delay_s(failures: list[Failure], begun_at: int, most: int) -> float | None:
    """Returns the seconds until the next attempt; None: no more. 0 after the first attempt, and after one that came
    further than all before. begun_at: the step at which the first attempt began. most: allowed restarts."""
    if len(failures) > most or is_loop(failures):
        return None
    furthest, idle = begun_at, 0
    for failure in failures:
        idle = 1 if failure.reached > furthest else idle + 1
        furthest = max(furthest, failure.reached)
    return min(_LONGEST_DELAY_S, 2.0 ** min(idle - 2, 9)) if idle > 1 else 0.0  # 2.0 ** 1024 overflows


def is_loop(failures: list[Failure]) -> bool:
    """Whether the last attempts all ended at the same step."""
    last = failures[-_SAME_STEP_MOST:]
    return len(last) == _SAME_STEP_MOST and len({failure.reached for failure in last}) == 1


class Records:
    """A run's progress, as its folder shows it. The folder may not exist yet."""

    def __init__(self, run: Path):
        self._metrics, self._events = run / "metrics.jsonl", run / "events.jsonl"
        self._checkpoints, self._logs = run / "checkpoints", run / "ranks"
        self._new_events = Tail(self._events)
        self.is_mine = True  # rank 0 was here: nobody else writes these records now
        self.began_at()  # reads the events of earlier attempts

    def last_step(self) -> int:
        """Returns the last step that has a row or a checkpoint; 0 if none has. With log.every rows may be rarer."""
        rows = reversed(last_rows(self._metrics))
        step = next((row["step"] for row in rows if isinstance(row.get("step"), int)), 0)
        return max(step, self.newest_checkpoint() or 0)

    def began_at(self) -> int | None:
        """Returns the step at which the latest attempt since the last call began or resumed; None: there was none."""
        began_at = None
        while rows := self._new_events.read()[1]:
            steps = [int(row.get("step", 0)) for row in rows if row.get("event") in ("start", "resume")]
            began_at = steps[-1] if steps else began_at
        return began_at

    def newest_checkpoint(self) -> int | None:
        """Returns the step of the newest complete checkpoint; None if there is none."""
        try:
            match = re.fullmatch(r"step-(\d+)", (self._checkpoints / "latest").read_text().strip())
        except (OSError, UnicodeDecodeError):
            return None
        return int(match[1]) if match else None

    def log_of(self, rank: int) -> Path | None:
        """Returns the path of a rank's log; None if it does not exist yet."""
        path = self._logs / f"rank-{rank:05d}.log"
        return path if path.exists() else None

    def host_of(self, _: int | None) -> str:
        """Returns the host of a rank, which is this one."""
        return socket.gethostname()

    def close(self, what: str, was_said: bool) -> None:
        """Records how an attempt failed, if no rank has: rank 0 died first, or knew only that it had lost another rank
        (not `was_said`). Call it when no rank lives, so that there is one writer at a time."""
        rows = last_rows(self._events)
        last = rows[-1].get("event") if rows else None
        if not self.is_mine or last is None or last in _ENDS or (last == "failed" and was_said):
            return  # nothing was begun, or the end is recorded
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        event = {"time": now, "event": "failed", "step": self.last_step(), "error": what, "by": "launcher"}
        with contextlib.suppress(OSError), os.fdopen(open_at_line_end(self._events), "ab") as file:
            file.write(json.dumps(event).encode() + b"\n")
