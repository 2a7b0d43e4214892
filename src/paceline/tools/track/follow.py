"""Follows a run: sends what it records to each tracker, until the run is over and everything is sent.

Each tracker has a thread, so that none waits for another. RUN/track/NAME.json says what it has, and holds the batch
that is being sent: after kill -9 the same batch is sent again, and the tracker recognises it.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import filelock

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER
from paceline.base.files import replace
from paceline.base.locks import file_lock
from paceline.record.config import TrackConfig
from paceline.record.folder import RunFolder
from paceline.record.state import is_running, may_train_elsewhere, read_state
from paceline.tools.track.points import Point, Position, Reader
from paceline.tools.track.prometheus import Prometheus
from paceline.tools.track.services import MLflow, Trackio, WandB
from paceline.tools.track.tensorboard import TensorBoard

_EVERY_S = 10.0  # between batches
_LIBRARY_EVERY_S = 30.0  # the same: a request costs milliseconds, whatever is in it
_LOOK_EVERY_S = 1.0
_LONGEST_DELAY_S = 60.0
_HANGS_S = 60.0  # before that it may be slow, or wait for a busy processor
_LOCKED_S = 10.0  # of the follower of an attempt before, which ends
_LIBRARIES = {"mlflow": "mlflow-skinny", "trackio": "'trackio<0.44'", "wandb": "wandb"}  # what pip installs
_CAN_FORGET = ("prometheus", "tensorboard")  # the others have no way to replace a row


class Tracker(Protocol):
    """Where points go. Any exception means that a batch may not have arrived: the tracker is made anew (but Prometheus,
    which has all in memory and serves it), and gets the same batch again."""

    def send(self, points: Sequence[Point]) -> None: ...
    def close(self, is_failed: bool) -> None: ...


# Each may remember what it must know after a restart in `known`, which is saved with the position.
_TRACKERS: dict[str, Callable[[RunFolder, TrackConfig, dict[str, Any]], Tracker]] = {
    "mlflow": MLflow,
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}


def follow(folder: RunFolder, settings: TrackConfig, give_up_after_s: float) -> int:
    """Sends the run to all trackers in `settings`; returns the exit status: 1 if a tracker does not have everything, 2
    if only because its library is missing. After the run's end gives up when trackers have failed and nothing could be
    sent for so many seconds."""
    followers = [_Follower(folder, name, settings) for name in settings.trackers]
    for follower in followers:
        threading.Thread(target=follower.run, daemon=True).start()
    ran_s = time.monotonic()
    while not all(follower.is_over for follower in followers):
        time.sleep(_LOOK_EVERY_S)
        if is_running(folder):
            ran_s = time.monotonic()
            for follower in followers:
                follower.hurry.clear()  # another attempt has begun
            continue
        for follower in followers:
            follower.hurry.set()
        idle_s = time.monotonic() - max(ran_s, *(follower.active_s for follower in followers))
        have_failed = all(follower.is_over or follower.why for follower in followers)
        if idle_s > (give_up_after_s if have_failed else max(give_up_after_s, _HANGS_S)):
            break
    late = [follower for follower in followers if not follower.has_everything]
    for follower in late:
        if not follower.lacks_library:  # else it is said
            _say(f"{follower.name} does not have all of {folder.shown}{follower.why}; {follower.way_out}")
    if late and all(follower.lacks_library for follower in late):
        return EXIT_USER
    return EXIT_FAILED if late else EXIT_DONE


class _Follower:
    """One tracker of a run."""

    def __init__(self, folder: RunFolder, name: str, settings: TrackConfig):
        self.name = name
        self.hurry = threading.Event()  # the run is over
        self.is_over = self.has_everything = False
        self.why = ""  # it has not
        self.lacks_library = False
        flags = [
            f"--{field.name.replace('_', '-')}={getattr(settings, field.name)}"
            for field in fields(TrackConfig)
            if field.name != "to" and getattr(settings, field.name) != field.default
        ]
        command = shlex.join(["paceline", "track", folder.shown, "--to", name, *flags])
        self.way_out = f"`{command}` sends the rest"
        self.active_s = time.monotonic()  # when it last sent something
        self._folder, self._settings = folder, settings
        self._own = folder.path / "track"
        self._tracker: Tracker | None = None
        self._known: dict[str, Any] = {}
        self._position = Position()
        self._batch: tuple[list[Point], Position] | None = None  # being sent, and the position after it
        self._num_failures = 0

    def run(self) -> None:
        """Sends until the run is over, or the tracker cannot be used."""
        if self.name in _LIBRARIES and importlib.util.find_spec(self.name) is None:
            _say(f"{self.name} is not installed; pip install {_LIBRARIES[self.name]}, then {self.way_out}")
            self.lacks_library = self.is_over = True
            return
        try:
            self._follow()
        except Exception as error:  # the run folder itself
            self.why = f": {_one_line(error)}"
        self.is_over = True

    def _follow(self) -> None:
        self._own.mkdir(exist_ok=True, mode=0o700)
        lock = file_lock(self._own / f"{self.name}.lock", mode=0o600)
        try:
            lock.acquire(timeout=_LOCKED_S)
        except filelock.Timeout:
            _say(f"another process sends {self._folder.shown} to {self.name}; waiting until it ends")
            lock.acquire()
        self._load()
        reader = Reader(self._folder, self._batch[1] if self._batch else self._position, self.name in _CAN_FORGET)
        while True:
            trains = is_running(self._folder)  # asked before reading, so that nothing is missed
            try:
                self._send_all(reader)
                is_away = not trains and not os.path.isdir(self._own)  # removed, or its disk cannot be reached
                if not trains and not is_away and self._tracker is not None:
                    self._tracker.close(read_state(self._folder).kind == "failed")
            except Exception as error:
                self._failed(error)
                continue
            if is_away:  # then nobody knows whether it trains, nor what its records have
                time.sleep(_LOOK_EVERY_S)
                continue
            if not trains and may_train_elsewhere(self._folder):
                silent_s = time.time() - read_state(self._folder).updated_s
                self.why = f": no end is recorded, and its host has written nothing for {silent_s:.0f} s"
                return
            if not trains:
                self.has_everything = True
                print(
                    f"{self.name} has all of {self._folder.shown}: {self._position.index} rows and events", flush=True
                )
                return
            self.hurry.wait(_LIBRARY_EVERY_S if self.name in _LIBRARIES else _EVERY_S)

    def _send_all(self, reader: Reader) -> None:
        if self._tracker is None:
            self._tracker = _TRACKERS[self.name](self._folder, self._settings, self._known)
            self._save()
        while True:
            if self._batch is None:
                points, after = reader.read(self._position)
                if not points:
                    break
                self._batch = points, after
            points, after = self._batch
            self._save()
            self._tracker.send(points)
            self._position, self._batch = after, None
            self._save()
            self.active_s = time.monotonic()
        if self._num_failures:
            _say(f"{self.name} works again")
            self._num_failures = 0
            self.why = ""

    def _failed(self, error: Exception) -> None:
        """Says so once, and waits before the next attempt."""
        self.why = f": {_one_line(error)}"
        if not self._num_failures:
            _say(f"{self.name} does not work now{self.why}. It is tried again, and the run is not disturbed")
        self._num_failures += 1
        if self.name != "prometheus":
            self._tracker = None
        self.hurry.wait(min(_LONGEST_DELAY_S, 2.0 ** min(self._num_failures, 6)))
        if self.hurry.is_set():
            time.sleep(0.5)

    def _load(self) -> None:
        path = self._state_file()
        if self.name == "prometheus" or not path.exists():
            return
        try:
            saved = json.loads(path.read_text())
            self._known, self._position = saved["known"], Position(**saved["position"])
            if batch := saved["batch"]:
                self._batch = [Point(**point) for point in batch["points"]], Position(**batch["after"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({_one_line(error)}); remove it to send the run as a new one"
            ) from None

    def _save(self) -> None:
        if self.name != "prometheus":
            batch = None
            if self._batch:
                points = [{**vars(point), "row": {}} for point in self._batch[0]]  # trackers get its values
                batch = {"points": points, "after": vars(self._batch[1])}
            saved = {"known": self._known, "position": vars(self._position), "batch": batch}
            replace(self._state_file(), json.dumps(saved).encode(), 0o600)

    def _state_file(self) -> Path:
        return self._own / f"{self.name}.json"


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(f"track: {text}", file=sys.stderr, flush=True)
