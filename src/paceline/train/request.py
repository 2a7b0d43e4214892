"""What a command asks of training. No torch here: the command line makes it before anything heavy is imported."""

from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config


@dataclass(frozen=True)
class Request:
    """What the command asked for."""

    config: Config
    out: Path | None  # on this host; None: where rank 0 says, which goes by `name` and the time
    name: str = "run"
    resume: bool = False
    resume_step: int | None = None  # None: the newest whole checkpoint
    job: str | None = None  # noted in the run folder, so that a later life of this command knows it for its own
    goes_on: bool = False  # known on rank 0: a later life, whose folder holds a run, or what one left at its birth
