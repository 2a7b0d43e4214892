"""Starts the process that sends a run to trackers. It reads the run's files, so training never waits for it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import IO

from paceline.base.process import OVER_SSH, environment_of_one
from paceline.record.config import TrackConfig
from paceline.record.console import Console
from paceline.record.folder import RunFolder

_LAST_S = 5.0  # for what the last steps recorded
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

    def wait(self) -> None:
        """Waits some seconds, so that it can send the last rows. It continues by itself if that takes longer."""
        if self._process is None:
            return
        try:
            self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            print(f"process {self._process.pid} still sends records to trackers. If you stop it, {self._later()}")

    def _later(self) -> str:
        return f"`paceline {shlex.join(self._command)}` sends them later"


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
def following(settings: TrackConfig, console: Console) -> Iterator[Follower]:
    """While open a follower may be started. Waits for it at the end; not if training failed, which others wait for."""
    follower = Follower(settings, console)
    yield follower
    follower.wait()
