"""paceline track"""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.base.errors import UserError, require_at_least
from paceline.base.process import EXIT_INTERRUPTED
from paceline.cli.flags import parse
from paceline.record import folder as run_folder
from paceline.record.config import TrackConfig
from paceline.record.state import is_running
from paceline.tools.track.follow import follow


@dataclass(frozen=True, kw_only=True)
class TrackArguments(TrackConfig):
    """Send a run's rows, events and config to trackers: of an old run, or of a running one until it ends. RUN/track
    notes what each tracker has, so that the same command continues where it was ended."""

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """The run folder."""
    give_up_after_s: float = 60.0
    """After the run's end: give up when a tracker fails and nothing could be sent for so many seconds."""


def _give_way() -> None:
    """Training comes first: this process and all that it starts, like W&B's own, get only processor time that nobody
    else wants. Nobody can undo that without privileges, so a run that has ended is sent at the usual priority."""
    with contextlib.suppress(OSError):
        os.nice(19)
        Path("/proc/self/autogroup").write_text("19")  # Linux weighs sessions first where its autogroups are on
    with contextlib.suppress(AttributeError, OSError):  # Linux only; a container may forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(arguments: list[str]) -> int:
    parsed = parse(TrackArguments, TrackArguments(run=""), arguments, "track")
    if not parsed.run:
        raise UserError("name the run folder: paceline track RUN --to tensorboard")
    parsed.check()
    require_at_least(parsed, "--", give_up_after_s=0)
    folder = run_folder.find(Path(parsed.run))
    if not parsed.trackers:
        raise UserError(f"name the trackers: paceline track {parsed.run} --to tensorboard")
    if is_running(folder):
        _give_way()
    try:
        status = follow(folder, parsed, parsed.give_up_after_s)
    except KeyboardInterrupt:
        print("interrupted; the same command continues from here", file=sys.stderr)
        status = EXIT_INTERRUPTED
    sys.stdout.flush()
    if status:
        os._exit(status)  # a tracker's library may wait for its server at Python's end
    return status
