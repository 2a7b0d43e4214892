"""A request to train. No torch here: the command line makes it before importing libraries."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import Config

if TYPE_CHECKING:
    from paceline.record.predicted import Predicted
    from paceline.train.resolve import Settings
    from paceline.world.runtime import World


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
    predict: "Callable[[Settings, World], Predicted | None]" = lambda settings, world: None  # collective
