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
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import publish, retention, shards
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.publish import Record
from paceline.checkpoint.shards import Bytes, HostImages, ready_event
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
    replaces: bool
    began: float = field(default_factory=time.perf_counter)

    def strike(self, phase: str) -> None:
        faults.strike(phase, self.step)


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
    ):
        """`writer`: this rank's number among the `num_writers`; None: it saves nothing. `token`: random,
        and equal on all ranks of this attempt, so that files of earlier ones are not used. `senders`: ranks that do not
        see the folder and send their files through `channel` to rank 0, which is writer 0; they are the last writers.
        `before_publishing`: called in the first writer's thread when all files are there; if it raises, there will be
        no checkpoint.
        """
        self._checkpoints, self._config = checkpoints, config
        self._writer, self._num_writers, self._senders = writer, num_writers, list(senders)
        self._file_writers = range(1, num_writers - len(senders))  # those that write into the folder, without the first
        self._channel, self._token, self._before_publishing = channel, token, before_publishing
        self.begun_at: int | None = None  # the step of the last save
        self._num_begun = 0
        self._folder: Path | None = None  # of the last save
        self._images = HostImages()
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
        replaces: bool = False,
    ) -> None:
        """Begins to save this rank's slices as they are now, and returns. They may change after `wait_copied`.

        Tensors have as many elements as their slices; optimizer state is named `parameter/moment`. `shapes`: those of
        all complete tensors, except state with its parameter's shape. `facts` go into the manifest. Unless all writers
        together give every element once, there will be no checkpoint. If there is a good one of this step, it stays
        instead; with `replaces`, the same on all ranks, it stays until the new one is complete.
        """
        if self.is_busy:
            raise RuntimeError(f"the save of step {step} began while another was under way")
        self._num_begun += 1
        self.begun_at = step
        self._outcome = None
        if self._writer is None:
            return
        folder = publish.unfinished_folder(self._checkpoints, step, f"{self._token}-{self._num_begun}")
        self._folder = folder
        parts = {kind: dict(part) for kind, part in tensors.items()}
        ready = ready_event(tensor for part in parts.values() for tensor in part.values())
        job = _Job(step, parts, dict(shapes), dict(facts), folder, ready, replaces)
        self._copied = threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=True)
        self._thread.start()

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
            if self._writer == 0:
                num_bytes = self._save_first(job)
            elif self._writer in self._file_writers:
                num_bytes = self._save_other(job)
            else:
                num_bytes = self._send(job)
        except Exception as error:  # a failed save never ends training
            problem = _text(error)
        finally:
            self._copied.set()  # also if it failed before it copied
        self._outcome = Outcome(job.step, time.perf_counter() - job.began, num_bytes, problem, self._remark)
        self._remark = None

    def _save_first(self, job: _Job) -> int:
        """The first writer: writes its files and those it receives, then publishes the checkpoint."""
        try:
            record, images = self._copy(job)
            num_bytes = self._num_bytes_of_good(job)
            if num_bytes is None:
                self._write(job, images)
        except Exception:
            shutil.rmtree(job.folder, ignore_errors=True)
            with contextlib.suppress(RuntimeError, ValueError):
                self._receive(None)
            raise
        if num_bytes is not None:
            # The run resumed from this one, or a script saves a step again with the same state.
            self._receive(None)
            retention.point(self._checkpoints, "latest", mf.folder_name(job.step))  # a crash may have come before
            return num_bytes
        try:
            try:
                received = self._receive(job.folder)
            finally:  # if this failed, the others may still write into the folder
                others = publish.gather(job.folder, self._file_writers, self._abandoned.wait)
            self._before_publishing()
            records = [record, *others, *received]
            num_bytes = publish.publish(
                self._checkpoints, job.folder, job.step, records, job.shapes, job.facts, self._config
            )
        except Exception:
            shutil.rmtree(job.folder, ignore_errors=True)
            raise
        self._has_saved = True
        return num_bytes

    def _save_other(self, job: _Job) -> int:
        """Any other writer: writes its files, then a record of them or of the problem."""
        assert self._writer is not None
        try:
            record, images = self._copy(job)
            num_bytes = self._num_bytes_of_good(job)
            if num_bytes is not None:
                return num_bytes
            self._write(job, images)
            publish.put_record(job.folder, self._writer, record)
        except Exception as error:
            for kind in mf.KINDS:  # a full disk is the usual problem, and the record needs space
                with contextlib.suppress(OSError):
                    (job.folder / mf.file_name(kind, self._writer, self._num_writers)).unlink()
            with contextlib.suppress(OSError):  # then the first writer gives up when no more bytes come
                self._make(job.folder)
                publish.put_record(job.folder, self._writer, {"problem": _text(error)})
            raise
        return sum(map(len, images.values()))

    def _send(self, job: _Job) -> int:
        """A rank that does not see the folder: sends its files."""
        assert self._channel is not None
        try:
            record, images = self._copy(job)
        except Exception as error:
            publish.send(self._channel, {"problem": _text(error)}, {})
            raise
        publish.send(self._channel, record, images)
        return sum(map(len, images.values()))

    def _receive(self, folder: Path | None) -> list[Record]:
        """Returns the senders' records. Their files are in the folder, or discarded if there is none."""
        records: list[Record] = []
        failure: Exception | None = None
        for rank in self._senders:
            assert self._channel is not None
            try:
                records.append(publish.receive(self._channel, rank, None if failure else folder))
            except (RuntimeError, OSError) as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return records

    def _copy(self, job: _Job) -> tuple[Record, dict[str, Bytes]]:
        """Returns the record of this rank's files, and their bytes in host memory by name. Then, also if it fails,
        tensors may change."""
        assert self._writer is not None
        files = {}
        try:
            job.strike("save.copy")
            for kind, tensors in job.tensors.items():
                for item, tensor in tensors.items():
                    if tensor.numel() != item.num_elements:
                        raise ValueError(f"{item} came with {tensor.numel()} elements")
                shapes = {item.name: _shape(kind, item.name, job.shapes) for item in tensors}
                layout = shards.lay_out({item: tensor.dtype for item, tensor in tensors.items()}, shapes)
                if layout.entries:
                    files[kind] = layout, self._images.copy(kind, layout, tensors, job.ready)
        finally:
            job.tensors.clear()  # frees memory that training no longer uses
            self._copied.set()
        record: Record = {"files": {}, "tensors": {}}
        images = {}
        for kind, (layout, image) in files.items():
            name = mf.file_name(kind, self._writer, self._num_writers)
            record["files"][name] = shards.file_facts(layout, image)
            record["tensors"][kind] = layout.tensors
            images[name] = image
        return record, images

    def _write(self, job: _Job, images: Mapping[str, Bytes]) -> None:
        """Writes this rank's files and compares what is on the disk with them."""
        self._make(job.folder)
        if self._writer == 0:
            publish.sweep(self._checkpoints, but=job.folder)
        for name, image in images.items():
            shards.write_checked(job.folder / name, image, job.strike)

    def _num_bytes_of_good(self, job: _Job) -> int | None:
        """Returns the size of this step's checkpoint, which may stay, after verifying every byte; None: write it."""
        with contextlib.suppress(mf.Damaged):
            return None if job.replaces else mf.num_bytes(mf.read(self._checkpoints / mf.folder_name(job.step)))
        return None

    def _make(self, folder: Path) -> None:
        """Makes the folder of this attempt. Raises OSError if the run folder is gone: no resume would find the save."""
        if not self._checkpoints.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the run folder is gone", str(self._checkpoints.parent))
        if self._has_saved and self._writer == 0 and not (self._checkpoints / "latest").exists():
            # Not the folder itself: another writer may have made it again.
            self._remark = f"{self._checkpoints} was removed while training: the checkpoints in it are gone"
        self._checkpoints.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)


def _shape(kind: Kind, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    parameter = name.rpartition("/")[0] if kind == "optimizer" and name not in shapes else name
    if parameter not in shapes:
        raise ValueError(f"{name} belongs to no parameter of this model")
    return tuple(shapes[parameter])


def _lower_priority() -> None:
    with contextlib.suppress(AttributeError, OSError):
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error) or type(error).__name__
