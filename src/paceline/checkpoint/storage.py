"""A run on object storage (bucket.py): a thread of rank 0 sends each complete checkpoint, and what comes with it.

Training never waits for it, except at the end. What fails is tried again after the next save. Retention removes what it
removes here. The run folder stays the one that training reads.
"""

import contextlib
import json
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from paceline.base.errors import PacelineError, UserError
from paceline.base.files import replace
from paceline.base.process import namespace
from paceline.checkpoint.bring import bring
from paceline.checkpoint.bucket import BEST, IDENTITY, OWNER, RECORDS, Bucket, identity, mark, text_of
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.steps import MANIFEST, folder_name, is_whole, list_steps

_BEAT_S = 10.0
_SILENT_BEATS = 3  # an owner that is silent for so long is gone
_RETRY_S = 5.0  # at the end of a run


class OwnedByOther(UserError):
    """Another run, or another process of this one, writes to this address."""


class Storage:
    """Sends the checkpoints and records of a run folder to an address, in a thread; on rank 0 only."""

    def __init__(self, url: str, folder: Path, config: CheckpointConfig):
        self._folder, self._checkpoints, self._config = folder, folder / "checkpoints", config
        self._bucket = Bucket(url)
        self.url = self._bucket.url
        self._identity: dict[str, Any] = {}
        self._later: dict[int, str | None] = {}  # steps there that this run supersedes, and the mark of each manifest
        self._owner: dict[str, Any] = {"token": secrets.token_hex(8)}
        self._sent: set[int] = set()  # steps that are complete there, with the bytes that they have here
        self.sending: int | None = None  # the step that is being sent; retention keeps it
        self._news: deque[tuple[str, dict[str, Any]]] = deque()
        self._problem = ""  # of the last try
        self._is_owner = self._is_given_up = self._is_complete = self._goes_on = False
        self._wake, self._ended = threading.Event(), threading.Event()
        self._end_by_s: float | None = None
        self._threads = [
            threading.Thread(target=work, name="storage", daemon=True) for work in (self._send_always, self._beat)
        ]

    def begin(self, brings: bool, progress: Callable[[], object], resume_step: int | None = None) -> None:
        """Becomes the owner of the address, and starts to send what it lacks. brings: a folder without checkpoints gets
        those that are there. resume_step: the one that the user has named. Raises UserError if another run or process
        is there, or if it cannot be written; a run that has sent before starts also without its server."""
        self._identity = identity(self._folder)
        try:
            if brings and not list_steps(self._checkpoints):
                bring(self.url, self._folder, progress=progress, must_exist=False)
                self._identity = identity(self._folder)
            self._owner |= {"host": socket.gethostname(), "place": namespace("pid"), "pid": os.getpid(), "beat": 0}
            self._owner["id"] = self._identity.get("id", secrets.token_hex(8))
            self._later = _later(self._identity, resume_step)
            self._claim()
        except PacelineError:
            raise
        except Exception as error:
            if not self._is_known:
                raise UserError(f"checkpoint.to {self.url} cannot be used: {text_of(error)}") from None
        self._record_identity(self._identity.get("is_restored", False))
        self._wake.set()
        for thread in self._threads:
            thread.start()

    def saved(self, step: int) -> None:
        """Sends a checkpoint that is complete here, soon."""
        self._sent.discard(step)  # it may replace one of the same step
        self.supersede()

    def supersede(self) -> None:
        """The run continues from what was brought: sets later checkpoints aside at the address, soon. Not before: a
        resume that is refused changes nothing."""
        if self._later and not self._goes_on:
            with contextlib.suppress(OSError):  # only a restart that comes before they are set aside needs it
                self._record_identity(is_restored=True)
        self._goes_on = True
        self._wake.set()

    def take_news(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns what happened since the last call, each once: a sentence that a user should see (or none), and the
        facts of an event."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def is_ending_within(self, seconds: float) -> bool:
        """At the end of a run: waits at most so long, and returns whether the last checkpoints are still being sent.
        A server that takes no byte for `_progress`'s seconds is given up."""
        if self._end_by_s is None:
            self._end_by_s = 0.0
            self._progress()
            self._wake.set()
        is_over = self._ended.wait(seconds) or time.monotonic() > self._end_by_s
        if is_over and not (self._is_complete or self._is_given_up):
            self._is_given_up = True
            self._tell(f"{self.url} lacks the end of this run, which {self._folder} has", "checkpoints not sent")
        return not is_over

    def release(self) -> None:
        """Sends the last records and says that the run is over, so that it may go on elsewhere; waits some seconds."""

        def send() -> None:
            with contextlib.suppress(Exception):
                self._send_records()
                self._bucket.write(OWNER, json.dumps({**self._owner, "is_over": True}).encode())

        if self._is_complete:
            self._is_complete = False
            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            thread.join(_BEAT_S)

    # ---- the owner ----

    @property
    def _is_known(self) -> bool:
        """Whether the run folder says that it was sent here, or came from here."""
        return str(self._identity.get("to", "")).rstrip("/") == self.url  # former versions kept a trailing slash

    def _claim(self) -> None:
        """Raises UserError if another run or a living process is the owner."""
        owner = self._bucket.owner()
        is_own = self._is_known and owner.get("id") in (None, self._owner["id"])
        here, there = list_steps(self._checkpoints), self._bucket.steps()
        newest = max((step for step in there if self._bucket.manifest(step) and not self._is_later(step)), default=None)
        if newest is not None and not is_own:
            raise OwnedByOther(
                f"{self.url} holds another run, up to step {newest}: continue that by `paceline resume {self.url}`, or "
                "give another checkpoint.to"
            )
        if newest is not None and newest > max(here, default=0) and not self._is_set_aside(newest):
            raise OwnedByOther(
                f"{self.url} has a checkpoint of step {newest}, and {self._checkpoints} none after step "
                f"{max(here, default=0)}: continue by `paceline resume {self.url}`, or give another checkpoint.to"
            )
        if owner and not owner.get("is_over") and not _is_gone(owner):
            time.sleep(_BEAT_S * _SILENT_BEATS)
            if self._bucket.owner() != owner:
                raise OwnedByOther(
                    f"{self.url} is being written by another process (host {owner.get('host')}, pid "
                    f"{owner.get('pid')}): wait for it or stop it first"
                )
        # Of two that come at once the later one has it, and the other finds that before it completes a checkpoint.
        self._bucket.write(OWNER, json.dumps(self._owner).encode())
        self._is_owner = True

    def _record_identity(self, is_restored: bool) -> None:
        kept = {"later": self._later, "is_asked": self._identity.get("is_asked", True), "is_restored": is_restored}
        content = {"to": self.url, "id": self._owner["id"], **(kept if self._later else {})}
        replace(self._folder / IDENTITY, json.dumps(content).encode(), 0o600)

    def _is_later(self, step: int) -> bool:
        """Whether this run supersedes the very checkpoint that is there, or what is left of it: another machine may
        have saved one of the same step since."""
        if step not in self._later:
            return False
        there = self._bucket.manifest(step)
        return there is None or self._later[step] in (None, mark(there))

    def _is_set_aside(self, step: int) -> bool:
        """Whether a resume at an earlier step has superseded the very checkpoint that is there: there may be a later
        one of the same step, also one that was sent in part, without a manifest."""
        there = self._bucket.manifest(step)
        aside = self._checkpoints.glob(f"superseded-{folder_name(step)}*/{MANIFEST}")
        return any(path.read_bytes() == there for path in aside)

    def _set_aside(self, step: int) -> None:
        """Renames a checkpoint there as `retention.set_aside` does here: one that was set aside before stays."""
        self._sent.discard(step)
        name = f"checkpoints/superseded-{folder_name(step)}"
        target, number = name, 1
        while self._bucket.read(f"{target}/{MANIFEST}") is not None:
            number += 1
            target = f"{name}-{number}"
        self._bucket.rename(f"checkpoints/{folder_name(step)}", target)

    def _require_owner(self) -> None:
        """Raises OwnedByOther once another process has taken the address: it held this one for gone."""
        owner = self._bucket.owner()
        if owner and owner.get("token") != self._owner["token"]:
            where = f"host {owner.get('host')}, pid {owner.get('pid')}"
            raise OwnedByOther(f"another process ({where}) writes there now; nothing more is sent")

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            if self._is_owner:
                with contextlib.suppress(Exception):  # the sending thread finds the same, and reports it
                    self._require_owner()
                    self._owner["beat"] += 1
                    self._bucket.write(OWNER, json.dumps(self._owner).encode())

    # ---- sending ----

    def _send_always(self) -> None:
        failing_s = math.inf  # when a try at the end failed first: what fails each time is given up, whatever it sends
        while not (self._is_given_up or self._is_complete or time.monotonic() > failing_s + self._config.retry_s):
            self._wake.wait(None if self._end_by_s is None else _RETRY_S)
            self._wake.clear()
            is_last, problem = self._end_by_s is not None, ""
            try:
                if self._is_owner:
                    self._require_owner()
                else:
                    self._claim()
                self._send_all()
            except Exception as error:  # each library has its own
                problem = text_of(error)
                self._is_given_up |= self._is_owner and isinstance(error, OwnedByOther)
                failing_s = min(failing_s, time.monotonic()) if is_last else failing_s
            self._is_complete, self.sending = is_last and not (problem or self._wake.is_set()), None
            self._report(problem)
        self._ended.set()

    def _report(self, problem: str) -> None:
        """Says once that sending fails, and once that it works again."""
        if problem and not self._problem:
            again = "" if self._is_given_up else "; it is tried again after each save. Training continues"
            sentence = f"checkpoints are not sent to {self.url}: {problem}{again}"
            self._tell(sentence, "checkpoints not sent", error=problem)
        elif self._problem and not problem:
            self._tell(f"{self.url} takes checkpoints again", "checkpoints sent again")
        self._problem = problem

    def _progress(self) -> None:
        """At the end a server has so many seconds for the next byte: a launcher that stops ranks waits grace_s."""
        if self._end_by_s is not None:
            self._end_by_s = time.monotonic() + min(self._config.retry_s, self._config.grace_s / 2)

    def _tell(self, sentence: str, event: str, **facts: Any) -> None:
        self._news.append((sentence, {"kind": event, "to": self.url, **facts}))

    def _send_all(self) -> None:
        """Makes the address have what the run folder has: the newest first, and nothing that retention removed."""
        if self._goes_on and self._later:
            for step in filter(self._is_later, sorted(self._later, reverse=True)):  # as in the run folder
                self._require_owner()
                self._set_aside(step)
            self._later = {}
            self._record_identity(is_restored=False)
        there, here = self._bucket.steps(), list_steps(self._checkpoints)
        for step in there:
            if step not in here and self._is_set_aside(step):  # first, so that none of them is ever the newest
                self._require_owner()
                self._set_aside(step)
        for step in reversed(here):
            if step not in self._sent:
                self._send(step)
            if self._wake.is_set():
                return  # there is a newer one
        self.sending = None
        self._send_records()
        for step in there:
            if step not in list_steps(self._checkpoints) and not self._is_kept(step):
                self._remove(step)

    def _send(self, step: int) -> None:
        """Sends a checkpoint, unless it is there; does nothing for a damaged one."""
        folder, name = self._checkpoints / folder_name(step), f"checkpoints/{folder_name(step)}"
        began_s, self.sending = time.monotonic(), step  # retention keeps it from now on
        if not is_whole(folder):
            return
        manifest = (folder / MANIFEST).read_bytes()
        files = json.loads(manifest)["files"]
        if (before := self._bucket.manifest(step)) == manifest:
            self._sent.add(step)
            return
        if before is not None:
            self._bucket.remove(f"{name}/{MANIFEST}")
        for file in files:
            self._require_owner()  # another process may have a checkpoint of this name by now
            self._bucket.send(folder / file, f"{name}/{file}", self._progress)
        self._send_records()  # before the manifest: no checkpoint without the rows before it
        try:
            self._sent.add(step)  # now: `saved` takes it out if another one of this step comes from here on
            self._require_owner()
            if (folder / MANIFEST).read_bytes() != manifest:
                raise FileNotFoundError(f"{folder} was replaced while it was sent")
            self._bucket.write(f"{name}/{MANIFEST}", manifest)
        except Exception:
            self._sent.discard(step)
            raise
        num_bytes, seconds = sum(facts["bytes"] for facts in files.values()), round(time.monotonic() - began_s, 3)
        self._tell("", "checkpoint sent", step=step, seconds=seconds, bytes=num_bytes)

    def _send_records(self) -> None:
        for name in (*RECORDS, BEST):
            if (self._folder / name).exists():
                self._bucket.send(self._folder / name, name, self._progress)

    def _is_kept(self, step: int) -> bool:
        """Whether retention keeps a checkpoint that is only there: after `bring` the run folder has one or two."""
        if sum(other > step for other in self._sent) < self._config.keep:
            return True
        best, manifest = self._bucket.read(BEST) or b"", self._bucket.manifest(step)
        if manifest is None:
            return False
        steps, every = [step, *json.loads(manifest).get("due_steps", ())], self._config.keep_every
        return best.decode().strip() == folder_name(step) or (every > 0 and any(due % every == 0 for due in steps))

    def _remove(self, step: int) -> None:
        self._bucket.remove(f"checkpoints/{folder_name(step)}/{MANIFEST}")  # first: complete or absent
        self._bucket.remove(f"checkpoints/{folder_name(step)}")
        self._sent.discard(step)


def _later(known: dict[str, Any], resume_step: int | None) -> dict[int, str | None]:
    """Returns the steps that `bring` found after the one that it brought, with the mark of each manifest (None where a
    former storage.json has only the step). None if a step was named then, was never restored, and none is named now."""
    if resume_step is None and known.get("is_asked", True) and not known.get("is_restored"):
        return {}
    later = known.get("later", {})
    marks = later if isinstance(later, dict) else dict.fromkeys(later)
    return {int(step): marks[step] for step in marks}


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the process was of this host, and has ended. Two machines may have one name."""
    is_here = owner.get("host") == socket.gethostname() and owner.get("place") == namespace("pid")
    return is_here and not psutil.pid_exists(int(owner.get("pid", 0)))
