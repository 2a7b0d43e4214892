"""Copies of the leader's checkpoints and records on every other host, made while ranks train.

The records come first: a copy that is cut short leaves rows of later steps, which a resume drops, and never a
checkpoint without the rows before it.
"""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.base.files import replace
from paceline.base.say import say
from paceline.launch.peers import RECORDS, Peers, State

Take = Callable[[int, Callable[[str], Any]], object]  # (step, open a file of the other host): copies a checkpoint

_LOOK_EVERY_S = 0.25
_LAST_TRIES = 5  # at the end of a run, when the leader waits for this host


class Copies:
    """A thread that copies each new checkpoint, if another host leads. One that is superseded meanwhile is skipped."""

    def __init__(
        self,
        peers: Peers,
        run: Path,
        take: Take,
        newest: Callable[[], int | None],
        source: Callable[[], tuple[int, State] | None],
    ):
        """newest: the step of this host's newest checkpoint. source: the leading host and its state; None: this one."""
        self._peers, self._run, self._take, self._newest, self._source = peers, run, take, newest, source
        self._stopped = threading.Event()
        self._problem = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run_thread, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Returns when nothing is being copied."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Copies what the leader has at the end of a run."""
        self.stop()
        self._stopped.clear()
        for _ in range(_LAST_TRIES):
            if self._copy(is_last=True):
                return
            time.sleep(_LOOK_EVERY_S)
        say(f"{self._run} may lack the run's last checkpoint and records; the host that had rank 0 has them")

    def _run_thread(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            self._copy()

    def _copy(self, is_last: bool = False) -> bool:
        """Returns whether this host has what the leader has."""
        source = self._source()
        if source is None:
            return True
        node, state = source
        own = self._newest()
        is_new = state.step > (-1 if own is None else own)
        try:
            if is_new or is_last:
                self._copy_records(node)
            if is_new:
                self._take(state.step, lambda name: _Stoppable(self._peers.open(node, name), self._stopped))
            self._problem = ""
            return True
        except (FileNotFoundError, InterruptedError):
            pass  # superseded; or this host will lead
        except Exception as error:  # the disk is full, the host is gone, bytes were damaged: the next try may succeed
            if str(error) != self._problem:
                self._problem = str(error)
                say(f"the checkpoint of step {state.step} cannot be copied to {self._run}: {error}; trying again")
        return False

    def _copy_records(self, node: int) -> None:
        self._run.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in RECORDS:
            with contextlib.suppress(FileNotFoundError), self._peers.open(node, name) as source:
                replace(self._run / name, source.read(), 0o600)


class _Stoppable:
    """A file of another host, until copying is stopped."""

    def __init__(self, source: http.client.HTTPResponse, stopped: threading.Event):
        self._source, self._stopped = source, stopped

    def read(self, amount: int) -> bytes:
        """Raises InterruptedError when copying is stopped."""
        if self._stopped.is_set():
            raise InterruptedError
        return self._source.read(amount)

    def close(self) -> None:
        self._source.close()
