"""How a rank reports its end to the launcher: in a small file of the run folder, because an exit status says too
little. If the file cannot be written, or is removed, the exit status alone counts."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER
from paceline.base.files import replace

STATUS_FOLDER = "PACELINE_STATUS_FOLDER"
LAUNCHER = "PACELINE_LAUNCHER"  # the launcher's pid
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_OUR_LAUNCHER = (LAUNCHER, STATUS_FOLDER, "PACELINE_JOB", "PACELINE_ATTEMPT")
_OF_OTHER_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_")  # prefixes


@dataclass(frozen=True)
class Status:
    """How one rank ended."""

    code: int  # exit status
    consequence: str | None = None  # its message, if it ended because another rank did

    @property
    def is_good(self) -> bool:
        """True if the rank finished, or stopped with its state saved."""
        return self.code in (EXIT_DONE, EXIT_RESUMABLE)

    @property
    def is_failure(self) -> bool:
        """True if the rank itself failed, and has printed why."""
        return self.code in (EXIT_FAILED, EXIT_USER) and self.consequence is None


def has_launcher() -> bool:
    """True in a rank that `--nproc` started."""
    return STATUS_FOLDER in os.environ and os.environ.get(LAUNCHER) == str(os.getppid())


def launcher_pid() -> int | None:
    """Returns the pid that the variable names; None if there is no launcher, or no number."""
    text = os.environ.get(LAUNCHER, "")
    return int(text) if text.isdecimal() else None


def record_status(code: int, consequence: str | None = None) -> int:
    """Reports the exit status to the launcher, if there is one, and returns it. Call it before each exit. The agent
    sees 75 as success, and lets other ranks finish; after a failure the launcher may kill this process at once."""
    if not has_launcher():
        return code
    with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
        sys.stdout.flush()
    path = end_path(Path(os.environ[STATUS_FOLDER]), int(os.environ["RANK"]))
    with contextlib.suppress(OSError):  # a full disk, or the run folder is gone
        path.parent.mkdir(exist_ok=True, mode=0o700)
        replace(path, json.dumps(asdict(Status(code, consequence))).encode(), 0o600)  # the launcher may read meanwhile
        return EXIT_DONE if code == EXIT_RESUMABLE else code
    return code


def end_path(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank reports its end."""
    return folder / f"rank-{rank:05d}.end"


def read_statuses(folder: Path, ranks: Iterable[int], ends: Mapping[int, int]) -> dict[int, Status]:
    """Returns the statuses that these ranks have reported. ends: exit statuses of their processes by rank; 2 and 75 are
    ours, and count if the file is missing."""
    found = {rank: Status(code) for rank, code in ends.items() if code in (EXIT_USER, EXIT_RESUMABLE)}
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError):
            found[rank] = Status(**json.loads(end_path(folder, rank).read_bytes()))
    return found


def environment_of_one(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that is no rank: without a launcher's variables."""
    own = environment_of_rank(environ)
    return {name: own[name] for name in own if name not in RANK_VARIABLES and not name.startswith(_OF_OTHER_LAUNCHERS)}


def environment_of_rank(environ: Mapping[str, str], **changes: str) -> dict[str, str]:
    """Returns the environment of a process that takes this rank's place, with changes. Variables of our launcher are
    left out: a rank under another parent would end itself."""
    return {name: value for name, value in environ.items() if name not in _OF_OUR_LAUNCHER} | changes
