"""How a rank tells the launcher that started it how it ended: a small file, since an exit status says too little."""

import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER

STATUS_FOLDER = "PACELINE_STATUS_FOLDER"
LAUNCHER = "PACELINE_LAUNCHER"  # the launcher's pid


@dataclass(frozen=True)
class Status:
    """How one rank ended."""

    code: int  # exit status
    consequence: str | None = None  # what it has to say, where it only suffered another rank's end

    @property
    def is_good(self) -> bool:
        """Done, or stopped with its state saved."""
        return self.code in (EXIT_DONE, EXIT_RESUMABLE)

    @property
    def is_failure(self) -> bool:
        """Failed by itself, and has said why."""
        return self.code in (EXIT_FAILED, EXIT_USER) and self.consequence is None


def has_launcher() -> bool:
    """True in a rank that `--nproc` started."""
    return STATUS_FOLDER in os.environ and os.environ.get(LAUNCHER) == str(os.getppid())


def note_status(code: int, consequence: str | None = None) -> int:
    """Called by every process on its way out: tells the launcher, if there is one; returns what to exit with.

    75 is no failure of the rank, so the agent sees success and leaves the other ranks to finish. After a failure the
    launcher may kill this process as soon as it knows.
    """
    if not has_launcher():
        return code
    with contextlib.suppress(OSError, ValueError):  # a reader that went away, a stream that is closed
        sys.stdout.flush()
    path = Path(os.environ[STATUS_FOLDER]) / os.environ["RANK"]
    aside = path.with_name(f".{path.name}")  # renamed in: the launcher may read while a second thread ends the rank
    aside.write_text(json.dumps(asdict(Status(code, consequence))))
    os.replace(aside, path)
    return EXIT_DONE if code == EXIT_RESUMABLE else code


def read_statuses(folder: Path) -> dict[int, Status]:
    """Returns rank -> how it ended, for the ranks that could say."""
    return {int(path.name): Status(**json.loads(path.read_text())) for path in folder.iterdir() if path.name.isdigit()}
