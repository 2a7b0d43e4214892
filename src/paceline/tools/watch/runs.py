"""Finds and follows the runs at a path: a run folder, or a folder of them. Both may appear only later."""

from pathlib import Path

from paceline.tools.watch.run import Run
from paceline.tools.watch.view import RunView

_MOST_RUNS = 32  # of a folder, the newest: as many as have a colour and a dash of their own
_MARKS = ("config.toml", "metrics.jsonl", "events.jsonl")  # a folder with one of these is a run


class Runs:
    """The runs at a path, in the order in which they appeared: each keeps its colour."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self._runs: dict[Path, Run] = {}

    def update(self) -> list[tuple[int, RunView]]:
        """Reads what is new; returns index and view of the runs that changed."""
        for path in self._found():
            if path not in self._runs and len(self._runs) < _MOST_RUNS:
                self._runs[path] = Run(path)
        return [(index, run.view) for index, run in enumerate(self._runs.values()) if run.update()]

    @property
    def views(self) -> list[RunView]:
        return [run.view for run in self._runs.values()]

    @property
    def is_one(self) -> bool:
        """Whether the path is a run, not a folder of runs."""
        return self.path in self._runs

    def _found(self) -> list[Path]:
        if self.is_one or _begun_s(self.path):
            return [self.path]
        try:
            begun = {path: seconds for path in self.path.iterdir() if (seconds := _begun_s(path))}
        except OSError:  # it is not there yet
            return []
        return sorted(begun, key=lambda path: begun[path])[-_MOST_RUNS:]


def _begun_s(path: Path) -> float:
    """Returns when a run's oldest file was last written, in seconds since 1970; 0 if the folder is no run."""
    times = []
    for mark in _MARKS:
        try:
            times.append((path / mark).stat().st_mtime)
        except OSError:  # not there, or not to be read
            continue
    return min(times, default=0.0)
