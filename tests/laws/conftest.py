"""Runs that several laws look at, each made once a session."""

from pathlib import Path

import pytest
from program import TINY, run


class Runs:
    """Makes and keeps runs of the preset `tiny`, by their flags and world size."""

    flags = (*TINY, "--train.device-batch-size", "6", "--train.eval-sequences", "8")  # of each

    def __init__(self, base: Path):
        self._base = base
        self._made: dict[tuple[str, ...], Path] = {}

    def get(self, nproc: int, *flags: str) -> Path:
        """Returns the folder of the run with these flags, which others look at too: change nothing in it."""
        key = (str(nproc), *flags)
        if key not in self._made:
            folder = self._base / f"run-{len(self._made)}"
            run("train", *self.flags, "--nproc", str(nproc), "--out", str(folder), *flags).require()
            self._made[key] = folder
        return self._made[key]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))
