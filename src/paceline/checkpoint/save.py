"""Saves while training continues: each rank copies its slices during the next forward and backward, and writes them to
the disk during the steps after that.

    saver.begin(step, tensors, shapes, facts)             # returns at once
    ...                                                   # forward and backward only read these tensors
    saver.wait_copied()                                   # before any of them changes; rarely waits
    ...
    if outcome := saver.take_outcome(): ...               # once, some steps later

No collective and no process group: writers meet in the folder. The first of them waits for the records of the others,
and makes one checkpoint of all files, or none (publish.py).
"""

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.base import faults
from paceline.base.ownership import Slice
from paceline.base.units import dtype_name
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import publish
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.publish import Record
from paceline.checkpoint.shards import CODES, HostCopies, ready_event, write
from paceline.checkpoint.storage import Storage
from paceline.world.group import SideChannel

_NICENESS = 10  # a tenth of training's share of a core that both want


@dataclass(frozen=True)
class Outcome:
    """How a save ended on this rank. The first writer's outcome is that of the checkpoint."""

    step: int
    seconds: float  # from begin to end
    num_bytes: int  # of the checkpoint on the first writer, of their own files on others
    problem: str | None  # None: the checkpoint is complete
    remark: str | None = None  # what else the user should know


@dataclass
class _Job:
    step: int
    tensors: dict[Kind, dict[Slice, torch.Tensor]]
    shapes: Mapping[str, tuple[int, ...]]
    facts: Mapping[str, Any]
    folder: Path  # of this attempt
    ready: torch.cuda.Event | None
    began: float = field(default_factory=time.perf_counter)


class Saver:
    """One rank's part in saving. Every rank begins every save, in the same order; never two at once."""

    def __init__(
        self,
        checkpoints: Path,
        config: CheckpointConfig,
        writer: int | None,
        num_writers: int,
        *,
        token: str,
        channel: SideChannel | None = None,
        senders: Sequence[int] = (),
        before_publishing: Callable[[], object] = lambda: None,
        storage: Storage | None = None,
    ):
        """`writer`: this rank's number among the `num_writers`; None: it saves nothing. `token`: random,
        and equal on all ranks of this attempt, so that files of earlier ones are not used. `senders`: ranks that do not
        see the folder and send their files through `channel` to rank 0, which is writer 0; they are the last writers.
        `before_publishing`: called in the first writer's thread when all files are there; if it raises, there will be
        no checkpoint. `storage`: on the first writer, who gets each complete checkpoint.
        """
        self._checkpoints, self._config = checkpoints, config
        self._writer, self._num_writers, self._senders = writer, num_writers, list(senders)
        self._is_sender = writer is not None and writer >= num_writers - len(self._senders)
        self._channel, self._token, self._before_publishing = channel, token, before_publishing
        self._storage = storage
        self.begun_at: int | None = None  # the step of the last save
        self._num_begun = 0
        self._folder: Path | None = None  # of the last save
        self._host = HostCopies()
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._abandoned = threading.Event()
        self._outcome: Outcome | None = None
        self._has_saved = (checkpoints / "latest").exists()
        self._remark: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank. A disk that hangs keeps it busy, but blocks nothing else."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_written_bytes(self) -> int:
        """The bytes that writers have put into the folder of the last save so far; 0 once it is complete."""
        with contextlib.suppress(OSError):
            return publish.num_bytes_in(self._folder) if self._folder is not None else 0
        return 0

    def begin(
        self,
        step: int,
        tensors: Mapping[Kind, Mapping[Slice, torch.Tensor]],
        shapes: Mapping[str, tuple[int, ...]],
        facts: Mapping[str, Any],
    ) -> None:
        """Begins to save this rank's slices as they are now, and returns. They may change after `wait_copied`.

        Tensors have as many elements as their slices; optimizer state is named `parameter/moment`. `shapes`: those of
        all complete tensors, except state with its parameter's shape. `facts` go into the manifest. Unless all writers
        together give every element once, there will be no checkpoint. One of this step stays until the new one is
        complete.
        """
        if self.is_busy:
            raise RuntimeError(f"the save of step {step} began while another was under way")
        self._num_begun += 1
        self.begun_at = step
        self._outcome = None
        if self._writer is None:
            return
        folder = publish.unfinished_folder(self._checkpoints, step, f"{self._token}-{self._num_begun}")
        if self._is_sender:  # on its own host; of another name, should it be rank 0's folder all the same
            folder = self._checkpoints / f".sent-by-{self._writer:05d}"
            shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        parts = {kind: dict(part) for kind, part in tensors.items()}
        ready = ready_event(tensor for part in parts.values() for tensor in part.values())
        job = _Job(step, parts, dict(shapes), dict(facts), folder, ready)
        self._copied = threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # Python 3.12 starts no thread during exit
            self._thread = None
            self._run(job)

    def wait_copied(self) -> float:
        """Waits until the tensors of the last `begin` may change; returns the seconds that this took."""
        if self._copied.is_set():
            return 0.0
        began = time.perf_counter()
        self._copied.wait()
        return time.perf_counter() - began

    def take_outcome(self) -> Outcome | None:
        """Returns how the last save ended, once; None while it is under way."""
        if self.is_busy:
            return None
        outcome, self._outcome = self._outcome, None
        return outcome

    def finish(self, within_s: float | None = None) -> None:
        """Returns when no save is under way, or after so many seconds."""
        if self._thread is not None:
            self._thread.join(within_s)

    def abandon(self) -> None:
        """Stops waiting for other writers, at the end of a run: an incomplete checkpoint stays absent."""
        self._abandoned.set()

    # ---- in the thread ----

    def _run(self, job: _Job) -> None:
        _lower_priority()
        num_bytes, problem = 0, None
        try:
            num_bytes = self._save_other(job) if self._writer else self._save_first(job)
        except Exception as error:  # a failed save never ends training
            problem = _text(error)
        finally:
            self._copied.set()  # also if it failed before it copied
        self._outcome = Outcome(job.step, time.perf_counter() - job.began, num_bytes, problem, self._remark)
        self._remark = None

    def _save_first(self, job: _Job) -> int:
        """The first writer: writes its files and those it receives, then publishes the checkpoint."""
        try:
            try:
                record = self._write_part(job)
            except Exception:
                self._receive(None)
                raise
            self._receive(job.folder)
            records = [record, *publish.gather(job.folder, range(1, self._num_writers), self._abandoned.wait)]
            self._before_publishing()
            num_bytes = publish.publish(
                self._checkpoints, job.folder, job.step, records, job.shapes, job.facts, self._config, self._sending
            )
        except Exception:
            shutil.rmtree(job.folder, ignore_errors=True)
            raise
        self._has_saved = True
        if self._storage:
            self._storage.saved(job.step)
        return num_bytes

    def _sending(self) -> int | None:
        """Returns the step that is being sent to the run's address now; None: none is."""
        return self._storage.sending if self._storage else None

    def _save_other(self, job: _Job) -> int:
        """Any other writer: writes its files, then a record of them or of the problem, for the first one."""
        assert self._writer is not None
        try:
            record, failure = self._write_part(job), None
        except Exception as error:
            record, failure = {"problem": _text(error)}, error
            for kind in mf.KINDS:  # a full disk is the usual problem, and the record needs space
                with contextlib.suppress(OSError):
                    (job.folder / mf.file_name(kind, self._writer, self._num_writers)).unlink()
        if self._is_sender:
            assert self._channel is not None
            try:
                publish.send(self._channel, job.folder, record)
            finally:
                shutil.rmtree(job.folder, ignore_errors=True)
        else:
            # If this fails, the first writer gives up when no more bytes come.
            with contextlib.suppress(*([OSError] if failure else [])):
                self._make(job.folder)
                publish.put_record(job.folder, self._writer, record)
        if failure is not None:
            raise failure
        return sum(facts["bytes"] for facts in record["files"].values())

    def _receive(self, folder: Path | None) -> None:
        """Puts the senders' files and records into the folder, or discards them if there is none."""
        failure: OSError | None = None
        for writer, rank in enumerate(self._senders, self._num_writers - len(self._senders)):
            assert self._channel is not None
            try:
                publish.receive(self._channel, rank, writer, None if failure else folder)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def _write_part(self, job: _Job) -> Record:
        """Copies this rank's tensors, which may change after that, also if it fails. Then writes its files, and returns
        their record."""
        assert self._writer is not None
        try:
            faults.strike("save.copy", job.step)
            for tensors in job.tensors.values():
                for item, tensor in tensors.items():
                    if tensor.numel() != item.num_elements:
                        raise ValueError(f"{item} came with {tensor.numel()} elements")
                    if tensor.dtype not in CODES:
                        raise ValueError(f"{item.name}: tensors of {tensor.dtype} cannot be stored in a checkpoint")
            parts = self._host.copy(job.tensors, job.ready)
        finally:
            job.tensors.clear()  # frees memory that training no longer uses
            self._copied.set()
        self._make(job.folder)
        if self._writer == 0:
            publish.sweep(self._checkpoints, but=job.folder)
        record: Record = {"files": {}, "slices": {}}
        for kind, copies in parts.items():
            if not copies:
                continue
            name = mf.file_name(kind, self._writer, self._num_writers)
            shapes = {item.name: publish.shape_in(kind, item.name, job.shapes) for item in copies}
            record["files"][name] = write(job.folder / name, copies, shapes, job.step)
            record["slices"][kind] = [
                [item.name, item.start, item.stop, dtype_name(copy.dtype)] for item, copy in copies.items()
            ]
        return record

    def _make(self, folder: Path) -> None:
        """Makes the folder of this attempt. Raises OSError if the run folder is gone: no resume would find the save."""
        if not self._checkpoints.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the run folder is gone", str(self._checkpoints.parent))
        if self._has_saved and self._writer == 0 and not (self._checkpoints / "latest").exists():
            # Not the folder itself: another writer may have made it again.
            self._remark = f"{self._checkpoints} was removed while training: the checkpoints in it are gone"
        self._checkpoints.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)


def _lower_priority() -> None:
    with contextlib.suppress(AttributeError, OSError):
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error) or type(error).__name__
