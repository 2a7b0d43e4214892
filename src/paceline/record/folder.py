"""The run folder: one run, one folder, one writer.

RUN/
  config.toml             the resolved config
  tokenizer.json          turns the model's ids into text, if the data has one
  metrics.jsonl           a row per step and per evaluation
  ranks.jsonl             each rank's times every 100 steps, in a world of more than 8 ranks
  metrics.superseded-20.jsonl    rows after step 20 that `resume --step 20` set aside
  events.jsonl            start, resume, checkpoint, skipped step, signal, end
  ranks/rank-00003.log    the output of that rank
  ranks/rank-00003.end    how it ended, if a launcher started it (base/process.py)
  checkpoints/            step-00000500/ ..., `latest`
  saved-elsewhere         only on a host without the checkpoints: there are some, on rank 0's
  lock, lock.holder       held by rank 0 while it runs; its host, pid, boot and start. An empty `lock` stays
  job                     which job writes it: a later attempt of the same job resumes it
  storage.json            the address of its copy (checkpoint/bucket.py), if it has one
  track/, tensorboard/    what trackers have, and TensorBoard's files; written by `paceline track`
"""

import contextlib
import json
import os
import shlex
import shutil
import socket
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from paceline.base import units
from paceline.base.errors import UserError
from paceline.base.files import exists, replace, set_mode, sync
from paceline.base.jsonl import Row, end_of_step, open_at_line_end, rows
from paceline.base.locks import file_lock
from paceline.base.process import namespace, start_ticks

COMPLETE = "horizon reached"  # reason in the `end` event of a run that reached its last step
_OWN = 0o600  # only the run's user may read its files
_LEAST_FREE_BYTES = 50 << 20
# What a run that ended before its first step leaves in its folder.
MADE_HERE = (
    *("config.toml", "tokenizer.json", "metrics.jsonl", "ranks.jsonl", "events.jsonl", "ranks", "checkpoints"),
    *("lock", "lock.holder", "job", "track", "tensorboard", ".seen", "storage.json"),
)
_MOST_UNWRITTEN_BYTES = 64 << 20  # rows that wait for a full disk: at 1 kB a row, a day of steps of 1.4 s


class RunFolder:
    """The paths of a run, and its records, which only rank 0 writes; each rank writes its own log. On a full disk rows
    wait, in order; `on_trouble` is called with one sentence when that begins and ends."""

    def __init__(self, path: Path, on_trouble: Callable[[str], None] = lambda sentence: None):
        self.path = path.absolute()
        self.config = self.path / "config.toml"
        self.tokenizer = self.path / "tokenizer.json"
        self.metrics = self.path / "metrics.jsonl"
        self.ranks = self.path / "ranks.jsonl"
        self.events = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.saved_elsewhere = self.path / "saved-elsewhere"
        self.on_trouble = on_trouble
        self._appenders: dict[Path, _Appender] = {}
        self._lock: filelock.FileLock | None = None

    @property
    def shown(self) -> str:
        """The path as the user would type it from the current folder."""
        here = Path.cwd()
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    def rank_log(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank-{rank:05d}.log"

    def lock(self, job: str | None = None) -> None:
        """Makes this process the run's only writer until it ends (the kernel drops the lock), and records its job.

        The lock is flock(2). Between hosts the file system must support it: NFS (v4, or v3 with its lock daemon; not
        with nolock or local_lock), Lustre and CephFS if mounted for it. Otherwise only the job system can keep two
        hosts from writing one folder. Raises UserError if another process, named by host and pid, has the lock, or the
        folder cannot be locked.
        """
        lock = file_lock(self.path / "lock", mode=0o600)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            holder = ""
            with contextlib.suppress(OSError):
                holder = (self.path / "lock.holder").read_text().partition("\n")[0]
            raise UserError(
                f"{self.path} is being written by another process ({holder or 'unknown'}); wait for it or stop it first"
            ) from None
        except OSError as error:
            raise UserError(f"{self.path} cannot be locked ({error}); choose a folder on another disk") from None
        self._lock = lock
        holder = f"host {socket.gethostname()}, pid {os.getpid()}\n{namespace('pid')}\n{start_ticks(os.getpid())}\n"
        replace(self.path / "lock.holder", holder.encode(), _OWN)
        self.record_job(job)

    def record_job(self, job: str | None) -> None:
        """Records the job that writes this run; a later attempt of it resumes the run. Raises OSError."""
        if job is None:
            (self.path / "job").unlink(missing_ok=True)
        else:
            replace(self.path / "job", f"{job}\n".encode(), _OWN)

    def write_setup(self, config_toml: str, tokenizer_json: str | None) -> None:
        """Writes the config and, if the data has one, the tokenizer. Raises OSError."""
        replace(self.config, config_toml.encode(), _OWN)
        if tokenizer_json is not None:
            replace(self.tokenizer, tokenizer_json.encode(), _OWN)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Appends one row to metrics.jsonl, at once, or later if the disk fails now; that raises nothing."""
        self._append(self.metrics, row)

    def append_ranks(self, row: Mapping[str, Any]) -> None:
        """Appends one row to ranks.jsonl, as append_metrics does."""
        self._append(self.ranks, row)

    def append_event(self, kind: str, **facts: Any) -> None:
        """Appends an event with the time to events.jsonl, as append_metrics does."""
        self._append(self.events, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts})

    def sync(self) -> None:
        """Forces all rows and events to the disk, so that no checkpoint outlives them. Callable from any thread."""
        for path in (self.metrics, self.ranks, self.events):
            with contextlib.suppress(OSError):
                sync(path)

    def forget_after(self, step: int, keep: bool = False) -> int:
        """Drops the rows of later steps, which a resumed run writes again, and a line that a crash cut short.
        Returns the last step that had a row, 0 if none had. `keep`: copies them to *.superseded-STEP.jsonl first.

        Rows are in the order of steps: only the end is read, however long the run. Raises OSError.
        """
        self._forget_after(self.ranks, step, keep)
        return self._forget_after(self.metrics, step, keep)

    def _forget_after(self, path: Path, step: int, keep: bool) -> int:
        if (appender := self._appenders.pop(path, None)) is not None:
            appender.close()
        if not path.exists():
            return 0
        end, reached = end_of_step(path, step)
        with path.open("r+b") as file:
            if keep and reached > step:
                file.seek(end)
                _copy_rest(file, self.path / f"{path.stem}.superseded-{step}.jsonl")
            file.truncate(end)
            os.fsync(file.fileno())
        return reached

    def has_saved(self) -> bool:
        """Returns whether the run recorded a checkpoint, or `checkpoints` is no longer a folder."""
        if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
            return True
        return any(event.get("event") == "checkpoint" for event in _events(self.path))

    def close(self) -> None:
        """Tries once more to write waiting rows, closes the files and releases the lock."""
        for appender in self._appenders.values():
            appender.close()
        self._appenders.clear()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.path / "lock.holder").unlink()
            # `lock` is not deleted: a process that has the deleted file open, and a later one with a new file, could
            # both lock, and write.
            self._lock.release()
            self._lock = None

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        if path not in self._appenders:
            self._appenders[path] = _Appender(path)
        if sentence := self._appenders[path].append(json.dumps(row)):
            self.on_trouble(sentence)


def _copy_rest(file: BinaryIO, path: Path) -> None:
    """Copies the rest of an open file to a new one, which is then on the disk. Does not replace one of an earlier
    resume at the same step."""
    aside, number = path, 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}-{number}.jsonl")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN), "wb") as target:
        shutil.copyfileobj(file, target)
        target.flush()
        os.fsync(target.fileno())


class _Appender:
    """Appends lines to a file. Lines that the disk does not accept wait, in order, for the next attempt."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None
        self._unwritten = b""
        self._is_failing = False
        self._num_lost = 0  # rows for which there was no memory

    def append(self, line: str) -> str | None:
        """Writes the line. Returns a sentence when the disk begins to fail, and when it works again."""
        if len(self._unwritten) < _MOST_UNWRITTEN_BYTES:
            self._unwritten += line.encode() + b"\n"
        else:
            self._num_lost += 1
        try:
            self._write()
        except OSError as error:
            if self._is_failing:
                return None
            self._is_failing = True
            return f"{self._path} cannot be written ({error.strerror or error}); training continues, its rows wait"
        if not self._is_failing:
            return None
        what = f"lacks {units.plural(self._num_lost, 'row')}" if self._num_lost else "has all rows"
        self._is_failing, self._num_lost = False, 0
        return f"{self._path} can be written again, and {what}"

    def close(self) -> None:
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
            self._descriptor = open_at_line_end(self._path)
        while self._unwritten:
            # A full disk may accept a part of a line: the next attempt continues there.
            num_written = os.write(self._descriptor, self._unwritten)
            self._unwritten = self._unwritten[num_written:]


def is_own(path: Path, job: str | None) -> bool:
    """Returns whether an attempt of this job was the last to write the run in this folder."""
    try:
        return job is not None and (path / "job").read_text(encoding="utf-8", errors="replace").strip() == job
    except OSError:
        return False


def find_own(runs: Path, job: str | None) -> Path | None:
    """Returns this job's newest run folder in `runs`; None if there is none."""
    runs_of_job = [path for path in (runs.iterdir() if runs.is_dir() else ()) if is_own(path, job)]
    return max(runs_of_job, key=lambda path: (path / "job").stat().st_mtime_ns, default=None)


def last_event(path: Path) -> Row:
    """Returns the last event of the run in this folder; an empty one if there is none."""
    events = _events(path)
    return events[-1] if events else {}


def was_written_since_lock(path: Path) -> bool:
    """Returns whether the last attempt that locked the run, and so recorded its job, has recorded an event, too."""
    with contextlib.suppress(OSError):
        return (path / "events.jsonl").stat().st_mtime_ns >= (path / "job").stat().st_mtime_ns
    return False


def has_resumed(path: Path, job: str | None) -> bool:
    """Returns whether an attempt of this job has restored a checkpoint of the run in this folder."""
    return any(event.get("event") == "resume" and event.get("job") == job for event in _events(path))


def script_of(path: Path) -> dict[str, Any] | None:
    """Returns what a run's config says of its script (`command`, `directory`); None if it is not the run of a
    script."""
    with contextlib.suppress(OSError, ValueError, RecursionError):  # the last of 1,000 brackets
        script = tomllib.loads((path / "config.toml").read_text(encoding="utf-8")).get("run")
        return script if isinstance(script, dict) else None
    return None


def was_imported(path: Path) -> bool:
    """Returns whether `paceline import` made this run, which never trained."""
    return last_event(path).get("event") == "import"


def _events(path: Path) -> list[Row]:
    """Returns the readable events of a run; none if the file cannot be read."""
    with contextlib.suppress(OSError):
        return [row for row in rows(path / "events.jsonl") if row is not None]
    return []


def check_new(path: Path) -> None:
    """Raises UserError if a run cannot start in this folder, which has another or is not writable. Makes no folder."""
    with _as_user_error(path):
        if exists(path) and not path.is_dir():
            raise UserError(f"--out is {path}, which is a file; name a folder that does not exist yet")
        if has_begun(path):
            raise UserError(
                f"--out is {path}, which holds a run already; resume it by "
                f"`paceline resume {shlex.quote(str(path))}`, or choose another folder"
            )
        names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    made_here = {*MADE_HERE, *(f".{name}.new" for name in MADE_HERE)}  # .new: if base.files.replace was killed
    if _has_rows(path):
        made_here.remove("metrics.jsonl")
    if foreign := [name for name in names if name not in made_here]:
        raise UserError(
            f"--out is {path}, which holds files of something else ({units.listed(foreign)}); "
            "name a folder that is empty or does not exist yet"
        )
    check_writable(path)


def has_begun(path: Path) -> bool:
    """Returns whether a run in this folder has made a step, or saved. One that was killed before may start again.
    Raises UserError if the path cannot be used."""
    with _as_user_error(path):
        was_killed_before = exists(path / "lock.holder") and not _has_rows(path)
        return any(path.glob("checkpoints/*")) or ((path / "config.toml").exists() and not was_killed_before)


def _has_rows(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def check_writable(path: Path, is_begun: bool = False) -> None:
    """Raises UserError if files cannot be written in this folder, or at its future place, or `ranks` is a file.
    is_begun: it is the folder of a run that is to continue."""
    existing = path.absolute()
    with _as_user_error(path):
        while not existing.exists():
            if existing.is_symlink():
                raise UserError(
                    f"--out is {path}, and {existing} is a link to {os.readlink(existing)}, which does not exist; "
                    "make that folder, or name another"
                )
            existing = existing.parent
        if (path / "ranks").exists() and not (path / "ranks").is_dir():
            raise UserError(f"{path / 'ranks'} is a file, and the logs of ranks go into a folder there; move it away")
    try:
        # A real write: for root os.access() is always true, even on read-only mounts.
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        instead = "make it writable, or resume a copy of the folder" if is_begun else "choose another folder"
        name = existing if is_begun else f"{existing} (for --out {path})"
        raise UserError(f"cannot write to {name}: {error.strerror}; {instead}") from None
    free = shutil.disk_usage(existing).free
    if free < _LEAST_FREE_BYTES:
        raise UserError(
            f"only {free >> 20} MiB are free in {existing}, and a run needs at least {_LEAST_FREE_BYTES >> 20} MiB, a "
            "large model more (a checkpoint takes 12 bytes a parameter); free some space, or choose another folder"
        )


def create(path: Path) -> RunFolder:
    """Returns a new run folder with its subfolders. Mode 0700, unless a folder with files in it exists already."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not any(path.iterdir()):
            set_mode(path, 0o700)
        (path / "ranks").mkdir(exist_ok=True, mode=0o700)
        (path / "checkpoints").mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"cannot make the run folder {path}: {error.strerror}") from None
    return RunFolder(path)


def find(path: Path) -> RunFolder:
    """Returns the run folder at this path. Raises UserError if there is none."""
    with _as_user_error(path):
        if not exists(path / "config.toml"):
            what = "does not exist" if not path.exists() else "holds no config.toml, so it is not a run folder"
            advice = "name the folder that `paceline train` printed"
            if (path / "checkpoints").is_dir():
                advice = "a script saved there, which resumes it by Checkpoints.restore"
            raise UserError(f"{path} {what}; {advice}")
    return RunFolder(path)


@contextlib.contextmanager
def _as_user_error(path: Path) -> Iterator[None]:
    """Turns the system's refusal of a path (such as a name of 300 characters) into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot use {path} as a run folder: {error.strerror or error}; choose another") from None
