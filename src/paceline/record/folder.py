"""The run folder: one run, one folder, one writer.

RUN/
  config.toml             the resolved config
  tokenizer.json          what turns the model's ids into text, where the data has one
  metrics.jsonl           a row a step and a row an evaluation
  events.jsonl            start, resume, checkpoint, skipped step, signal, end
  ranks/rank-00003.log    all that rank said
  checkpoints/            step-00000500/ ..., `latest`
  lock                    held by rank 0 while it runs; says host and pid
"""

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import filelock

from paceline.base.errors import UserError
from paceline.base.files import replace


class RunFolder:
    """Paths of a run and the writing of its records. Only rank 0 writes; the logs of ranks are written by each."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.config = self.path / "config.toml"
        self.tokenizer = self.path / "tokenizer.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self._files: dict[Path, IO[str]] = {}
        self._lock: filelock.FileLock | None = None

    @property
    def shown(self) -> str:
        """The path as a person in this folder would type it."""
        here = Path.cwd()
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def rank_log(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank-{rank:05d}.log"

    def lock(self) -> None:
        """Makes this process the run's one writer until it ends, however it ends (the kernel drops the lock).

        Raises UserError, naming host and pid, where another process is.
        """
        lock = filelock.FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            holder = ""
            with contextlib.suppress(OSError):
                holder = (self.path / "lock.holder").read_text().strip()
            raise UserError(
                f"{self.path} is being written by another process ({holder or 'unknown'}); wait for it or stop it first"
            ) from None
        (self.path / "lock.holder").write_text(f"host {socket.gethostname()}, pid {os.getpid()}\n")
        self._lock = lock

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Appends one row to metrics.jsonl and flushes it."""
        self._append(self.metrics, row)

    def append_event(self, kind: str, **facts: Any) -> None:
        """Appends what happened, with the time, to events.jsonl and flushes it."""
        self._append(self.events, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts})

    def forget_after(self, step: int) -> None:
        """Drops the metrics of steps after this one: a resumed run writes them again, so each stands there once.

        A last line that a crash cut short is dropped too.
        """
        if not self.metrics.exists():
            return
        if self.metrics in self._files:
            self._files.pop(self.metrics).close()
        kept = []
        with self.metrics.open() as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):
                    if json.loads(line)["step"] <= step:
                        kept.append(line.rstrip("\n") + "\n")
        replace(self.metrics, "".join(kept).encode())

    def close(self) -> None:
        """Closes the files and lets go of the lock."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        if path not in self._files:
            self._files[path] = path.open("a")
            if _ends_mid_line(path):  # a crash cut the last row short: it must not take the next one with it
                self._files[path].write("\n")
        self._files[path].write(json.dumps(row) + "\n")
        self._files[path].flush()


def _ends_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def check_new(path: Path) -> None:
    """Raises UserError where a run could not be started in this folder: it holds another, or cannot be written.

    Leaves nothing behind, not the folder either.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--out is {path}, which is a file; name a folder that does not exist yet")
    if (path / "config.toml").exists() or (path / "checkpoints").exists():
        raise UserError(
            f"--out is {path}, which holds a run already; go on with it by `paceline resume {path}`, "
            "or choose another folder"
        )
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raises UserError where no file can be written in this folder or, while it is not there, beside it."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        # A real write: access() says yes to root and to read-only mounts.
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        raise UserError(
            f"cannot write to {existing} (for --out {path}): {error.strerror}; choose another folder"
        ) from None
    free = shutil.disk_usage(existing).free
    if free < 50 << 20:
        raise UserError(f"only {free >> 20} MiB are free in {existing}; a run needs room for its checkpoints")


def create(path: Path) -> RunFolder:
    """Returns a new run folder with its subfolders, for this user alone (0700: weights and logs are the user's)."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / "ranks").mkdir(exist_ok=True)
        (path / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the run folder {path}: {error.strerror}") from None
    return RunFolder(path)


def find(path: Path) -> RunFolder:
    """Returns an existing run's folder; raises UserError where there is none."""
    if not (path / "config.toml").exists():
        what = "does not exist" if not path.exists() else "holds no config.toml, so it is not a run folder"
        raise UserError(f"{path} {what}; name the folder that `paceline train` printed")
    return RunFolder(path)
