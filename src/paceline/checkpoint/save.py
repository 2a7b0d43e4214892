"""Saving while training goes on: each writer copies what it owns behind the next forward and backward, and writes it
behind the steps after.

    saver.begin(step, weights, state, shapes, facts)      # returns at once
    ...                                                   # forward and backward read these tensors, as the copy does
    saver.wait_copied()                                   # before any of them changes; nearly always there is no wait
    ...
    if outcome := saver.take_outcome(): ...               # once, some steps later

No collective and no process group: writers meet in the folder. The first of them waits for the records of the others,
and makes one checkpoint of all parts, or none (`publish.py`).
"""

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.base import faults
from paceline.base.files import sync
from paceline.base.ownership import Slice
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import publish, shards
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.publish import Record
from paceline.checkpoint.relay import Relay, receive_part, send_part, send_problem
from paceline.checkpoint.shards import Layout

_NICENESS = 10  # a tenth of training's share of a core that both want


@dataclass(frozen=True)
class Outcome:
    """How a save ended, for this rank. On the first writer's word hangs the checkpoint."""

    step: int
    seconds: float  # from begin to the end
    num_bytes: int  # of the checkpoint on the first writer, of their own part on the others
    problem: str | None  # None: it is there, whole


@dataclass
class _Job:
    step: int
    tensors: dict[Kind, Mapping[Slice, torch.Tensor]]
    shapes: Mapping[str, tuple[int, ...]]
    facts: Mapping[str, Any]
    attempt: str
    made: "_Made | None"  # on a device
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
        relay: Relay | None = None,
        relayed: Sequence[int] = (),
        before_publishing: Callable[[], object] = lambda: None,
    ):
        """`writer`: this rank's number among the `num_writers` that see the folder; None: it does not write.

        `token` is random, common to all ranks, of this life of theirs: files of an earlier one are never taken for
        this one's. `relayed`, alike on all ranks, are those that own something and send it to rank 0, which is writer
        0, by `relay`. `before_publishing` is called in the first writer's thread when all parts are there, before the
        checkpoint is; where it raises there will be none.
        """
        self._checkpoints, self._config = checkpoints, config
        self._writer, self._num_writers, self._relayed = writer, num_writers, list(relayed)
        self._relay, self._token, self._before_publishing = relay, token, before_publishing
        self.begun_at: int | None = None  # the step of the last save that was begun
        self._num_begun = 0
        self._images = _Images()
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._abandoned = threading.Event()
        self._outcome: Outcome | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank. A disk that hangs keeps it so, and stops nothing else."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self,
        step: int,
        weights: Mapping[Slice, torch.Tensor],
        state: Mapping[Slice, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        facts: Mapping[str, Any],
    ) -> None:
        """Begins the save of this rank's slices as they are now, and returns. They may change after `wait_copied`.

        `weights` and `state` have as many elements as their slices say; state is named `parameter/moment`. `shapes`
        are those of all parameters, whole; `facts` go into the manifest as they are. Over all writers every element is
        given once, else there will be no checkpoint.
        """
        if self.is_busy:
            raise RuntimeError(f"the save of step {step} began while another was under way")
        self._num_begun += 1
        self.begun_at = step
        self._outcome = None
        if self._writer is None and self._relay is None:
            return
        tensors: dict[Kind, Mapping[Slice, torch.Tensor]] = {"weights": dict(weights), "optimizer": dict(state)}
        made = _made([*weights.values(), *state.values()])
        job = _Job(step, tensors, dict(shapes), dict(facts), f"{self._token}-{self._num_begun}", made)
        self._copied = threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(job,), name="saver", daemon=True)
        self._thread.start()

    def wait_copied(self) -> float:
        """Returns when the tensors of the last `begin` may change; the seconds that this took."""
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
        """Ends the waiting for other writers, on the way out: what is not complete now stays absent."""
        self._abandoned.set()

    def _run(self, job: _Job) -> None:
        _lower_priority()
        num_bytes, problem = 0, None
        try:
            num_bytes = self._send(job) if self._writer is None else self._save(job)
        except Exception as error:  # whatever it was: a save that fails ends no training
            problem = _told(error)
        finally:
            self._copied.set()
        self._outcome = Outcome(job.step, time.perf_counter() - job.began, num_bytes, problem)

    def _save(self, job: _Job) -> int:
        folder = publish.aside(self._checkpoints, job.step, job.attempt)
        record: Record | None = None
        try:
            parts = self._copy(job)
            num_bytes = _bytes_if_whole(self._checkpoints / mf.folder_name(job.step))
            if num_bytes is None:
                record = self._write(job, folder, parts)
        except Exception as error:
            self._give_up(job, folder, error)
            raise
        if record is None:
            # `set_aside` has moved what another course of this run left, so this is the checkpoint that was resumed
            # from, and its state is the one to be saved.
            self._receive(job, None)
            return num_bytes or 0
        if self._writer:
            publish.put_record(folder, self._writer, record)
            return sum(facts["bytes"] for facts in record["files"].values())
        return self._publish(job, folder, record)

    def _publish(self, job: _Job, folder: Path, record: Record) -> int:
        try:
            try:
                relayed = self._receive(job, folder)
            finally:  # the others still write into a folder that is removed where this failed
                others = publish.gather(folder, range(1, self._num_writers), self._abandoned.wait)
            records = [record, *others, *relayed]
            self._before_publishing()
            return publish.publish(self._checkpoints, folder, job.step, records, job.shapes, job.facts, self._config)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _give_up(self, job: _Job, folder: Path, error: Exception) -> None:
        """Leaves nothing of this part but the word that there will be none."""
        self._copied.set()
        if self._writer == 0:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(RuntimeError, ValueError):
                self._receive(job, None)
            return
        assert self._writer is not None
        for kind in mf.KINDS:  # first: it is a full disk that fails most often, and the record needs room
            with contextlib.suppress(OSError):
                (folder / mf.file_name(kind, self._writer, self._num_files)).unlink()
        with contextlib.suppress(OSError):  # then the first writer learns of it from the silence
            self._make(folder)
            publish.put_record(folder, self._writer, {"problem": _told(error)})

    @property
    def _num_files(self) -> int:
        """Of each kind, at most."""
        return self._num_writers + len(self._relayed)

    def _copy(self, job: _Job) -> dict[Kind, tuple[Layout, torch.Tensor]]:
        """This rank's part in the host's memory: a file's layout, and the bytes behind its header."""
        faults.strike("save.copy", job.step)
        parts = {}
        for kind, tensors in job.tensors.items():
            for item, tensor in tensors.items():
                if tensor.numel() != item.num_elements:
                    raise ValueError(f"{item} came with {tensor.numel()} elements")
            shapes = {item.name: mf.tensor_shape(kind, item.name, job.shapes) for item in tensors}
            layout = shards.lay_out({item: tensor.dtype for item, tensor in tensors.items()}, shapes)
            parts[kind] = layout, self._images.copy(kind, layout, tensors, job.made)
        job.tensors.clear()  # what training frees is not to live on here
        self._copied.set()
        return {kind: part for kind, part in parts.items() if part[0].pieces}

    def _write(self, job: _Job, folder: Path, parts: Mapping[Kind, tuple[Layout, torch.Tensor]]) -> Record:
        """This rank's files, on the disk and compared."""
        assert self._writer is not None
        self._make(folder)
        if self._writer == 0:
            publish.sweep(self._checkpoints, but=folder)
        record: Record = {"files": {}, "dtypes": {}}
        at_half = _AtHalf(sum(len(image) for _, image in parts.values()), lambda: faults.strike("save.write", job.step))
        for kind, (layout, image) in parts.items():
            path = folder / mf.file_name(kind, self._writer, self._num_files)
            written = shards.write_file(
                path, shards.chunks(layout, image), at_half.passed, lambda: faults.strike("save.sync", job.step)
            )
            faults.strike("save.verify", job.step)
            shards.require_same(path, shards.chunks(layout, image))
            record["files"][path.name] = shards.file_facts(written, layout)
            record["dtypes"][kind] = shards.dtype_names(layout)
        return record

    def _make(self, folder: Path) -> None:
        """Makes the folder of this attempt. Raises OSError where the run's is gone: what is saved there would be found
        by nobody who resumes it."""
        if not self._checkpoints.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the run folder is gone", str(self._checkpoints.parent))
        self._checkpoints.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)

    def _receive(self, job: _Job, folder: Path | None) -> list[Record]:
        """The records of the ranks that send their part, which is thrown away where there is no folder."""
        records: list[Record] = []
        failure: Exception | None = None
        for number, rank in enumerate(self._relayed if self._writer == 0 else []):
            assert self._relay is not None
            writer, target = self._num_writers + number, None if failure else folder
            try:
                records.append(receive_part(self._relay, rank, job.shapes, target, writer, self._num_files))
            except (RuntimeError, OSError) as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return records

    def _send(self, job: _Job) -> int:
        assert self._relay is not None
        try:
            parts = self._copy(job)
        except Exception as error:
            self._copied.set()
            send_problem(self._relay, _told(error))
            raise
        layouts = {kind: layout for kind, (layout, _) in parts.items()}
        return send_part(self._relay, layouts, {kind: image for kind, (_, image) in parts.items()})


def save_whole(
    checkpoints: Path,
    step: int,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
) -> Path:
    """Returns the folder of a new checkpoint of whole tensors, complete and on the disk, beside those there are.

    One process, which waits. Raises OSError where it could not be written.
    """
    everything = CheckpointConfig(keep=sys.maxsize)
    saver = Saver(checkpoints, everything, 0, 1, token="whole")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    saver.begin(step, _whole_slices(weights), _whole_slices(optimizer), shapes, facts)
    saver.finish()
    outcome = saver.take_outcome()
    assert outcome is not None
    if outcome.problem:
        raise OSError(outcome.problem)
    return checkpoints / mf.folder_name(step)


def set_aside(checkpoints: Path, step: int) -> list[str]:
    """Renames the checkpoints of later steps to `superseded-NAME` and returns their names; `latest` names this step,
    and `best`, if there is one, the best of those left.

    For a run that goes on from an older checkpoint: what came after it belongs to another course of the run. It counts
    no longer and is not deleted.
    """
    later = [mf.folder_name(number) for number in mf.list_steps(checkpoints) if number > step]
    for name in reversed(later):  # a crash in between leaves a course without its end, never with a gap
        target, number = checkpoints / f"superseded-{name}", 1
        while target.exists():  # of an earlier course that was set aside at this step, too
            number += 1
            target = checkpoints / f"superseded-{name}-{number}"
        os.rename(checkpoints / name, target)
    if later:
        publish.point(checkpoints, "latest", mf.folder_name(step))
        if (checkpoints / "best").exists():
            publish.point_to_best(checkpoints)
        sync(checkpoints)
    return later


class _Images:
    """Host memory that is kept between saves: a file's bytes behind its header, one image a kind."""

    def __init__(self) -> None:
        self._rooms: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(
        self, kind: str, layout: Layout, tensors: Mapping[Slice, torch.Tensor], made: "_Made | None"
    ) -> torch.Tensor:
        """Returns the tensors' bytes, copied."""
        image = self._room(kind, layout.num_data_bytes, pinned=made is not None)
        with self._beside(made):
            begin = 0
            for piece in layout.pieces:
                target, source = image[begin : begin + piece.num_bytes], tensors[piece.item].detach()
                if source.device.type == "cpu":
                    np.copyto(target.numpy(), shards.bytes_of(source))  # one thread, without the interpreter's lock
                else:
                    target.view(piece.dtype).copy_(source.reshape(-1), non_blocking=made is not None)
                begin += piece.num_bytes
        return image

    def _room(self, kind: str, num_bytes: int, pinned: bool) -> torch.Tensor:
        room = self._rooms.get(kind)
        if room is None or len(room) != num_bytes:
            self._rooms.pop(kind, None)
            room = self._rooms[kind] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return room

    @contextlib.contextmanager
    def _beside(self, made: "_Made | None") -> Iterator[None]:
        """What is copied inside waits for nothing but its making, and has arrived afterwards."""
        if made is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(made.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made.event)
            yield
            self._stream.synchronize()


@dataclass(frozen=True)
class _Made:
    """The moment at which a GPU has made what is to be copied."""

    device: torch.device
    event: torch.cuda.Event


class _AtHalf:
    """Calls something once, when half of the bytes have passed."""

    def __init__(self, num_bytes: int, call: Callable[[], object]):
        self._left, self._call = num_bytes / 2, call

    def passed(self, num_bytes: int) -> None:
        before, self._left = self._left, self._left - num_bytes
        if before > 0 >= self._left:
            self._call()


def _made(tensors: Sequence[torch.Tensor]) -> _Made | None:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return _Made(device, event)


def _whole_slices(tensors: Mapping[str, torch.Tensor]) -> dict[Slice, torch.Tensor]:
    return {Slice(name, 0, tensor.numel()): tensor for name, tensor in tensors.items()}


def _bytes_if_whole(folder: Path) -> int | None:
    """The bytes of a checkpoint every one of which is as it was written; None where there is none."""
    if not folder.exists():
        return None
    try:
        return mf.num_bytes(mf.read(folder))
    except mf.Damaged:
        return None


def _lower_priority() -> None:
    """Training keeps its cores: this thread takes what is left, where the system tells threads apart (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error) or type(error).__name__
