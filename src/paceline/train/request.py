"""A request to train. No torch here: the command line makes it before importing libraries."""

import time
from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config

RUNS = Path("runs")


@dataclass(frozen=True)
class Request:
    """A run to start or to resume."""

    config: Config
    out: Path | None  # the run folder on this host; None: rank 0 or its launcher makes `new_folder`
    name: str = "run"
    resume: bool = False
    resume_step: int | None = None  # None: the newest complete checkpoint
    job: str | None = None  # written into the run folder, so that a later attempt finds its own run
    is_restart: bool = False  # set on rank 0: the same command was started before, and its folder has the run
    asked: Config | None = None  # what the command says, where `config` is that of the run it continues

    def new_folder(self) -> Path:
        """Makes and returns runs/NAME-DATE-TIME, with a number if another command of the same second has made it.
        Raises OSError."""
        RUNS.mkdir(exist_ok=True)
        name, number = f"{self.name}-{time.strftime('%Y%m%d-%H%M%S')}", 1
        while True:
            path = RUNS / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(mode=0o700)
                return path
            except FileExistsError:
                number += 1
