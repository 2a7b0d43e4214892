"""The run folder: one run, one folder, one writer.

RUN/
  config.toml             the resolved config
  tokenizer.json          what turns the model's ids into text, where the data has one
  metrics.jsonl           a row a step and a row an evaluation
  events.jsonl            start, resume, checkpoint, skipped step, signal, end
  ranks/rank-00003.log    all that rank said
  checkpoints/            step-00000500/ ..., `latest`
  lock, lock.holder       held by rank 0 while it runs; its host and pid
  job                     which job writes it: a later life of the same job goes on with it
"""

import contextlib
import json
import os
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from paceline.base.errors import UserError
from paceline.base.files import replace, sync

COMPLETE = "horizon reached"  # the reason of an `end` that nobody asked for
_TAIL_BYTES = 1 << 16  # holds the last event also where a rank's stack is in it
_OWN = 0o600  # the mode of a run's files: they are its user's alone
_MOST_UNWRITTEN_BYTES = 64 << 20  # rows that wait for a full disk: at 1 kB a row, a day of steps of 1.4 s


class RunFolder:
    """Paths of a run and the writing of its records. Only rank 0 writes; the logs of ranks are written by each.

    A disk that takes no row ends nothing: the rows wait, in order, until it takes them. `on_trouble` is called with one
    sentence when that begins and when it is over.
    """

    def __init__(self, path: Path, on_trouble: Callable[[str], None] = lambda sentence: None):
        self.path = path.absolute()
        self.config = self.path / "config.toml"
        self.tokenizer = self.path / "tokenizer.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.on_trouble = on_trouble
        self._appenders: dict[Path, _Appender] = {}
        self._lock: filelock.FileLock | None = None

    @property
    def shown(self) -> str:
        """The path as a person in this folder would type it."""
        here = Path.cwd()
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def rank_log(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank-{rank:05d}.log"

    def lock(self, job: str | None = None) -> None:
        """Makes this process the run's one writer until it ends, however it ends (the kernel drops the lock), and notes
        the job that it belongs to.

        The lock is flock(2). It holds between hosts, too, where the file system passes it on: NFS does (v4, or v3 with
        its lock daemon; not when mounted with nolock or local_lock), Lustre and CephFS do when mounted for it. Where it
        stays on the host, two hosts can write one folder, and only their job system can keep them apart.

        Raises UserError, naming host and pid, where another process is, or where the folder cannot be locked.
        """
        lock = filelock.FileLock(self.path / "lock", mode=0o600)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            holder = ""
            with contextlib.suppress(OSError):
                holder = (self.path / "lock.holder").read_text().strip()
            raise UserError(
                f"{self.path} is being written by another process ({holder or 'unknown'}); wait for it or stop it first"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise UserError(f"{self.path} cannot be locked ({error}); choose a folder on another disk") from None
        self._lock = lock
        replace(self.path / "lock.holder", f"host {socket.gethostname()}, pid {os.getpid()}\n".encode(), _OWN)
        if job is None:
            _job_file(self.path).unlink(missing_ok=True)
        else:
            replace(_job_file(self.path), f"{job}\n".encode(), _OWN)

    def write_setup(self, config_toml: str, tokenizer_json: str | None) -> None:
        """Writes what the run is made with: its config and, where the data has one, its tokenizer. Raises OSError."""
        replace(self.config, config_toml.encode(), _OWN)
        if tokenizer_json is not None:
            replace(self.tokenizer, tokenizer_json.encode(), _OWN)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Appends one row to metrics.jsonl, at once. Raises nothing when the disk fails: it is written later."""
        self._append(self.metrics, row)

    def append_event(self, kind: str, **facts: Any) -> None:
        """Appends what happened, with the time, to events.jsonl, as append_metrics does."""
        self._append(self.events, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts})

    def sync(self) -> None:
        """Returns when the rows and events so far are on the disk, or wait for a disk that takes none. From any thread.

        For whoever makes a checkpoint: after a power cut, which takes what was not synced, no row that led to it lacks.
        """
        for path in (self.metrics, self.events):
            with contextlib.suppress(OSError):
                sync(path)

    def forget_after(self, step: int) -> int:
        """Drops the metrics of steps after this one: a resumed run writes them again, so each stands there once.

        Returns the last step that had a row; 0 where none had. A line that a crash cut short is
        dropped too. A crash meanwhile leaves the file as it was, or as it is to be.
        """
        appender = self._appenders.pop(self.metrics, None)
        if appender is not None:
            appender.close()
        if not self.metrics.exists():
            return 0
        kept, reached = [], 0
        with self.metrics.open(errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # what a power cut may leave is no row
                    reached = int(json.loads(line)["step"])
                    if reached <= step:
                        kept.append(line.rstrip("\n") + "\n")
        replace(self.metrics, "".join(kept).encode(), _OWN)
        return reached

    def has_saved(self) -> bool:
        """Returns whether the records tell of a checkpoint, or something else stands where they were."""
        if self.checkpoints.is_symlink() or (self.checkpoints.exists() and not self.checkpoints.is_dir()):
            return True
        with contextlib.suppress(OSError), self.events.open(errors="replace") as lines:
            return any('"event": "checkpoint",' in line for line in lines)
        return False

    def close(self) -> None:
        """Closes the files, with a last attempt at rows that wait, and lets go of the lock."""
        for appender in self._appenders.values():
            appender.close()
        self._appenders.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        if path not in self._appenders:
            self._appenders[path] = _Appender(path)
        if sentence := self._appenders[path].append(json.dumps(row)):
            self.on_trouble(sentence)


class _Appender:
    """Appends whole lines to a file. What the disk does not take waits here, in order, for the next attempt."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None
        self._unwritten = b""
        self._is_failing = False

    def append(self, line: str) -> str | None:
        """Writes the line. Returns a sentence when the disk begins to fail, and when it works again."""
        if len(self._unwritten) < _MOST_UNWRITTEN_BYTES:
            self._unwritten += line.encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            sentence = f"{self._path} cannot be written ({error.strerror or error}); training goes on, its rows wait"
            was_failing, self._is_failing = self._is_failing, True
            return None if was_failing else sentence
        was_failing, self._is_failing = self._is_failing, False
        return f"{self._path} can be written again, and has all rows" if was_failing else None

    def close(self) -> None:
        """Tries once more, and closes the file."""
        with contextlib.suppress(OSError):
            self._write()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _write(self) -> None:
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:  # the file was removed
            os.close(self._descriptor)
            self._descriptor = None
        if self._descriptor is None:
            self._descriptor = _open_at_line_end(self._path)
        while self._unwritten:
            # A full disk may take a part of a line: the next attempt goes on right there.
            num_written = os.write(self._descriptor, self._unwritten)
            self._unwritten = self._unwritten[num_written:]


def _open_at_line_end(path: Path) -> int:
    """Opens a file of lines to append to. A last line that a crash cut short is taken off: it is no row."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
    return descriptor


def _job_file(path: Path) -> Path:
    return path / "job"


def is_own(path: Path, job: str | None) -> bool:
    """Whether this job, in this or an earlier life, was the last to write the run in this folder."""
    try:
        return job is not None and _job_file(path).read_text().strip() == job
    except OSError:
        return False


def find_own(runs: Path, job: str | None) -> Path | None:
    """Returns the newest run folder of this job among those in `runs`; None where there is none."""
    own = [path for path in (runs.iterdir() if runs.is_dir() else ()) if is_own(path, job)]
    return max(own, key=lambda path: _job_file(path).stat().st_mtime_ns, default=None)


def last_event(path: Path) -> dict[str, Any]:
    """Returns the last event of the run in this folder; an empty one where there is none."""
    try:
        with (path / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(line)
            return found
    return {}


def check_new(path: Path) -> None:
    """Raises UserError where a run could not be started in this folder: it holds another, or cannot be written.

    Leaves nothing behind, not the folder either.
    """
    with _as_user_error(path):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out is {path}, which is a file; name a folder that does not exist yet")
        if (path / "config.toml").exists() or any(path.glob("checkpoints/*")):  # without either it died at its birth
            raise UserError(
                f"--out is {path}, which holds a run already; go on with it by "
                f"`paceline resume {shlex.quote(str(path))}`, or choose another folder"
            )
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raises UserError where no file can be written in this folder or, while it is not there, beside it; and where
    something else is in the place of its folder for the logs of ranks."""
    existing = path.absolute()
    with _as_user_error(path):
        while not existing.exists():
            existing = existing.parent
        if (path / "ranks").exists() and not (path / "ranks").is_dir():
            raise UserError(f"{path / 'ranks'} is a file, and the logs of ranks go into a folder there; move it away")
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
    """Returns a new run folder with its subfolders, for this user alone (0700: weights and logs are the user's).

    A folder that is there already and empty becomes so, too; one with something in it keeps its mode.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not any(path.iterdir()):
            path.chmod(0o700)
        (path / "ranks").mkdir(exist_ok=True, mode=0o700)
        (path / "checkpoints").mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot make the run folder {path}: {error.strerror}") from None
    return RunFolder(path)


def find(path: Path) -> RunFolder:
    """Returns an existing run's folder; raises UserError where there is none."""
    with _as_user_error(path):
        if not (path / "config.toml").exists():
            what = "does not exist" if not path.exists() else "holds no config.toml, so it is not a run folder"
            advice = "name the folder that `paceline train` printed"
            if (path / "checkpoints").is_dir():
                advice = "a script saved there, which reads it by replica.restore"
            raise UserError(f"{path} {what}; {advice}")
    return RunFolder(path)


def was_imported(path: Path) -> bool:
    """Whether the run in this folder was made by `paceline import`, and never trained."""
    return last_event(path).get("event") == "import"


@contextlib.contextmanager
def _as_user_error(path: Path) -> Iterator[None]:
    """A path that the system will not even look at (a name of 300 characters) is the user's to change."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot use {path} as a run folder: {error.strerror or error}; choose another") from None
