"""A request to train. No torch here: the command line makes it before importing libraries."""

from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config


@dataclass(frozen=True)
class Request:
    """A run to start or to resume."""

    config: Config
    out: Path | None  # the run folder on this host; None: rank 0 makes it from `name` and the time
    name: str = "run"
    resume: bool = False
    resume_step: int | None = None  # None: the newest complete checkpoint
    job: str | None = None  # written into the run folder, so that a later attempt finds its own run
    is_restart: bool = False  # set on rank 0: the same command was started before, and its folder has the run
