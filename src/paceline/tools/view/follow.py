"""Follows the runs at a path while they train."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

from paceline.tools.view.read import Run
from paceline.tools.view.view import RunView, view_of

_MOST_RUNS = 32  # of a folder, the newest: as many as have a colour and a dash of their own
_STATE_EVERY_S = 5.0  # without a new record: a process may have died


class _Followed:
    """A run at a path, and what to show of it."""

    def __init__(self, index: int, run: Run):
        self.index, self.run = index, run
        self.view = RunView(name=run.name)
        self._looked_s = -math.inf

    def update(self) -> bool:
        """Reads what is new; returns whether `view` is another one."""
        now_s = time.monotonic()
        is_new = self.run.read() or self._looked_s == -math.inf
        if not is_new and now_s - self._looked_s < _STATE_EVERY_S:
            return False
        before, self.view, self._looked_s = self.view, view_of(self.run), now_s
        return is_new or before.said != self.view.said


class Views:
    """The views of the run at a path, or of the newest in a folder, in the order in which they appeared. Each has an
    index, and so a colour, which it keeps until it is no longer among the newest and a new run takes its place."""

    def __init__(self, path: Path, num_parameters: Callable[[Path], int] = lambda path: 0):
        self.path = path.absolute()
        self._num_parameters = num_parameters
        self._followed: dict[Path, _Followed] = {}

    @property
    def is_one(self) -> bool:
        """Whether the path is a run, not a folder of runs."""
        return self.path in self._followed

    @property
    def all(self) -> list[RunView]:
        return [each.view for each in self._followed.values()]

    def update(self) -> list[tuple[int, RunView]]:
        """Reads what is new; returns index and view of the runs that changed."""
        paths = self._paths_of_runs()
        for path in paths:
            if path not in self._followed:
                index = len(self._followed)
                if index == _MOST_RUNS:
                    gone = next(known for known in self._followed if known not in paths)
                    index = self._followed.pop(gone).index
                self._followed[path] = _Followed(index, Run(path, num_parameters=self._num_parameters))
        return [(each.index, each.view) for each in self._followed.values() if each.update()]

    def _paths_of_runs(self) -> list[Path]:
        if self.is_one or _begun_s(self.path):
            return [self.path]
        try:
            begun = {path: seconds for path in self.path.iterdir() if (seconds := _begun_s(path))}
        except OSError:  # it is not there yet
            return []
        return sorted(begun, key=lambda path: begun[path])[-_MOST_RUNS:]


def _begun_s(path: Path) -> float:
    """Returns when the run in this folder began; 0 if it is no run."""
    times = []
    for mark in ("config.toml", "metrics.jsonl", "events.jsonl"):
        with contextlib.suppress(OSError):  # not there, or not to be read
            times.append((path / mark).stat().st_mtime)
    return min(times, default=0.0)
