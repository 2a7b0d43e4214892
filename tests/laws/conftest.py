"""Runs that several laws look at, each made once a session."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from program import TINY, Ended, run


class Runs:
    """Makes and keeps runs of the preset `tiny`, by their flags and world size."""

    def __init__(self, base: Path):
        self._base = base
        self._made: dict[tuple[str, ...], tuple[Path, Ended]] = {}

    def get(self, nproc: int, *flags: str, status: int = 0) -> Path:
        """Returns the folder of the run with these flags, which others look at too: change nothing in it."""
        return self.ended(nproc, *flags, status=status)[0]

    def ended(self, nproc: int, *flags: str, status: int = 0) -> tuple[Path, Ended]:
        """Returns the run's folder and what it said."""
        key = (str(nproc), *flags)
        if key not in self._made:
            folder = self._base / f"run-{len(self._made)}"
            ended = run("train", *TINY, "--nproc", str(nproc), "--out", str(folder), *flags).require(status)
            self._made[key] = (folder, ended)
        return self._made[key]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Returns a function that copies a shared run into a folder that the test may change."""

    def copy(folder: Path) -> Path:
        number = len(list(tmp_path.iterdir()))
        return Path(shutil.copytree(folder, tmp_path / f"copy-{number}"))

    return copy
