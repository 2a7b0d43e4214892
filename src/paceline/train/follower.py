"""Starts the process that sends a run to trackers. It reads the run's files, so training never waits for it."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import IO

from paceline.base.process import LAUNCHER, OVER_SSH, environment_of_one
from paceline.config import Config
from paceline.record.config import TrackConfig
from paceline.record.console import Console
from paceline.record.folder import RunFolder

_LAST_S = 5.0  # for what the last steps recorded
_LOOK_EVERY_S = 0.05
_GIVE_UP_AFTER_S = 3.0  # of these, without success


class Follower:
    """Not started until `start`, which rank 0 calls when it has the run folder."""

    def __init__(self, settings: TrackConfig, console: Console):
        self._settings, self._console = settings, console
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []

    def start(self, folder: RunFolder) -> None:
        """Starts it if trackers are configured. If that fails, training continues."""
        if not self._settings.trackers:
            return
        settings = [(item.name, getattr(self._settings, item.name)) for item in fields(TrackConfig)]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings if value != ""]
        self._command = ["track", str(folder.path), *flags]
        try:
            with _output(folder) as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "paceline", *self._command, f"--give-up-after-s={_GIVE_UP_AFTER_S}"],
                    env=environment_of_one(os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the ranks, whose last rows it has to send
                )
        except OSError as error:
            self._console.say(f"the records are not sent to trackers: {error}; {self._later()}", style="yellow")

    def wait(self, grace_s: float, is_stopped: Callable[[], bool]) -> None:
        """Waits some seconds, so that it can send the last rows. It continues by itself if that takes longer; where it
        would be killed at the end of the job, waits up to grace_s, unless the run is stopped."""
        if self._process is None:
            return
        begun_s, dies = time.monotonic(), _dies_with_job()
        while self._process.poll() is None:
            waited_s = time.monotonic() - begun_s
            if waited_s >= _LAST_S and (not dies or waited_s >= grace_s or is_stopped()):
                if dies:
                    print(f"not all records have been sent to trackers; {self._later()}")
                else:
                    print(
                        f"process {self._process.pid} still sends records to trackers. If you stop it, {self._later()}"
                    )
                return
            time.sleep(_LOOK_EVERY_S)

    def _later(self) -> str:
        return f"`paceline {shlex.join(self._command)}` sends them later"


def _dies_with_job() -> bool:
    """Returns whether a process that outlives its rank is killed: Slurm ends all of a job's; a container or a host of
    `paceline lab` ends with its process 1, which is this one, its parent or its launcher."""
    return "SLURM_JOB_ID" in os.environ or 1 in (os.getpid(), os.getppid()) or os.environ.get(LAUNCHER) == "1"


@contextmanager
def _output(folder: RunFolder) -> Iterator[IO[bytes] | None]:
    """Yields where the process says what fails: this one's standard error (None), but under `launch` a file, since
    that connection has to close when the ranks end, and the process may take longer."""
    if OVER_SSH not in os.environ:
        yield None
        return
    (folder.path / "track").mkdir(exist_ok=True, mode=0o700)
    with (folder.path / "track" / "follower.log").open("ab") as file:
        yield file


@contextmanager
def following(config: Config, console: Console, is_stopped: Callable[[], bool]) -> Iterator[Follower]:
    """While open a follower may be started. Waits for it at the end; not if training failed, which others wait for."""
    follower = Follower(config.track, console)
    yield follower
    follower.wait(config.checkpoint.grace_s, is_stopped)
