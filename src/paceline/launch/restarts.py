"""When a run that failed is started again: at once, later, or no more."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAME_STEP_MOST = 3  # failures in a row at one step: chance does not do that
_LONGEST_DELAY_S = 60.0
_TAIL_BYTES = 1 << 18  # holds the last row also where 1,024 ranks have their times in it


@dataclass(frozen=True)
class Failure:
    """How one attempt ended."""

    what: str  # who ended, and how
    reached: int  # the last step in the run's records


def delay_s(failures: list[Failure], begun_at: int, most: int) -> float | None:
    """Returns the seconds until the next attempt, 0 after one that came further than all before it; None: no more.

    begun_at is the step of the first attempt's beginning, `most` how many restarts there may be.
    """
    if len(failures) > most or is_loop(failures):
        return None
    furthest, idle = begun_at, 0
    for failure in failures:
        idle = 1 if failure.reached > furthest else idle + 1
        furthest = max(furthest, failure.reached)
    return min(_LONGEST_DELAY_S, 2.0 ** (idle - 2)) if idle > 1 else 0.0


def is_loop(failures: list[Failure]) -> bool:
    """Whether the last attempts all ended at one step, and no further."""
    last = failures[-_SAME_STEP_MOST:]
    return len(last) == _SAME_STEP_MOST and len({failure.reached for failure in last}) == 1


class Records:
    """What the run folder says of a run's progress. It may not be there yet."""

    def __init__(self, run: Path):
        self._metrics, self._events = run / "metrics.jsonl", run / "events.jsonl"
        self._checkpoints = run / "checkpoints"
        self._num_read = self._events.stat().st_size if self._events.exists() else 0

    def last_step(self) -> int:
        """Returns the last step that has a row; 0 where none has."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(max(0, self._metrics.stat().st_size - _TAIL_BYTES))
                rows = _rows(file.read())
        except OSError:
            return 0
        return next((row["step"] for row in reversed(rows) if isinstance(row.get("step"), int)), 0)

    def began_at(self) -> int | None:
        """Returns the step at which the latest attempt since the last call began or went on; None: it did not."""
        try:
            with self._events.open("rb") as file:
                file.seek(self._num_read)
                found = file.read()
        except OSError:
            return None
        found = found[: found.rfind(b"\n") + 1]  # a line that is being written counts when it is whole
        self._num_read += len(found)
        steps = [int(row.get("step", 0)) for row in _rows(found) if row.get("event") in ("start", "resume")]
        return steps[-1] if steps else None

    def has_checkpoint(self) -> bool:
        """Whether something was saved that `resume` can go on from."""
        return (self._checkpoints / "latest").exists()


def _rows(data: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # cut short: by a crash, or by where the reading began
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
