"""Combines the files of all writers into one checkpoint.

A save uses a hidden folder beside the checkpoints, named after the step and this attempt, so that files of an earlier
attempt are never used. Each writer puts its files there, then a record, `writer-00001.json`: what its files hold, or
what went wrong. The first writer waits for all records, adds the manifest and renames the folder.

A rank that does not see the folder writes into one on its own host, and sends its files to the first.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.base import faults
from paceline.base.files import replace, sync
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import retention, shards
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.shards import Shapes
from paceline.checkpoint.steps import MANIFEST, folder_name
from paceline.world.group import SideChannel

_POLL_S = 0.02, 1.0  # at first, and of a long save: a poll lists the files of all writers
_PATIENCE_S = 600.0  # without one more byte in the folder: an fsync on a slow disk may take minutes
_DEBRIS = re.compile(r"\.step-\d+\..*(unfinished|pruned|replaced)")

# {"files": as in the manifest, "slices": kind -> [name, start, stop, dtype] of each} or {"problem": text}
Record = dict[str, Any]


def unfinished_folder(checkpoints: Path, step: int, attempt: str) -> Path:
    return checkpoints / f".{folder_name(step)}.{attempt}.unfinished"


def sweep(checkpoints: Path, but: Path) -> None:
    """Removes what unfinished saves have left, except the folder `but`."""
    retention.take_back(checkpoints)
    for entry in list(checkpoints.iterdir()):
        if entry != but and _DEBRIS.fullmatch(entry.name) and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)  # a late writer may still write into it


def put_record(folder: Path, writer: int, record: Record) -> None:
    """Says that this writer's files are there. The first writer may rename the folder from now on."""
    sync(folder)
    replace(_record_path(folder, writer), json.dumps(record).encode(), 0o600)


def gather(folder: Path, writers: Sequence[int], wait: Callable[[float], bool]) -> list[Record]:
    """Returns these writers' records when all are there. `wait(seconds)` returns whether the run has ended.

    Raises RuntimeError naming the first writer that failed or makes no progress, or if the run ends. After a failure it
    still waits for the other writers, which would write into a removed folder.
    """
    records: dict[int, Record] = {}
    seen, began = -1, time.monotonic()
    since = began
    while missing := [writer for writer in writers if writer not in records]:
        present = set(os.listdir(folder))
        for writer in missing:
            if _record_path(folder, writer).name in present:
                records[writer] = json.loads(_record_path(folder, writer).read_bytes())
        now = time.monotonic()
        if (size := num_bytes_in(folder)) != seen:
            seen, since = size, now
        elif now - since > _PATIENCE_S:
            raise RuntimeError(f"nothing more has come from writer {missing[0]} for {_PATIENCE_S:.0f} s")
        if len(records) < len(writers) and wait(min(_POLL_S[1], max(_POLL_S[0], (now - began) / 20))):
            raise RuntimeError("the run ended before all of it was written")
    for writer, record in sorted(records.items()):
        if "problem" in record:
            raise RuntimeError(f"writer {writer}: {record['problem']}")
    return [records[writer] for writer in writers]


def publish(
    checkpoints: Path,
    folder: Path,
    step: int,
    records: Sequence[Record],
    shapes: Shapes,
    facts: Mapping[str, Any],
    config: CheckpointConfig,
    sending: Callable[[], int | None] = lambda: None,
) -> int:
    """Makes the checkpoint of this step, prunes older ones, and returns its size in bytes when it is on the disk.
    records: by writer. shapes: of tensors that must be stored. Raises ValueError if the files lack elements, OSError if
    the disk fails."""
    files = {name: file for record in records for name, file in record["files"].items()}
    tensors = {kind: _specs(kind, records, shapes) for kind in mf.KINDS}
    if missing := set(shapes) - {name for specs in tensors.values() for name in specs}:
        raise ValueError(f"{min(missing)}: no writer has an element of it")
    manifest = {"format": mf.FORMAT, "step": step, **facts, "tensors": tensors, "files": dict(sorted(files.items()))}
    for path in folder.glob("*writer-*"):
        path.unlink()
    faults.strike("save.manifest", step)
    sealed = mf.seal(manifest)
    if len(sealed) > mf.MOST_BYTES:
        raise ValueError(
            f"{MANIFEST} would have {len(sealed)} bytes, and at most {mf.MOST_BYTES} can be read: too many slices; "
            "save from fewer ranks"
        )
    shards.write_checked(folder / MANIFEST, [sealed])
    sync(folder)
    try:
        mf.check_sizes(folder, manifest)  # the writers have compared the bytes
    except mf.Damaged as damage:
        raise OSError(str(damage)) from None
    put_in_place(checkpoints, folder, step)
    retention.add(checkpoints, manifest, config, sending)
    return mf.num_bytes(manifest)


def _specs(kind: Kind, records: Sequence[Record], shapes: Shapes) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entries of tensors. Raises ValueError unless all their elements are stored once."""
    dtypes: dict[str, str] = {}
    slices: dict[str, list[tuple[int, int, int]]] = {}
    for writer, record in enumerate(records):
        for name, start, stop, dtype in record["slices"].get(kind, ()):
            if dtypes.setdefault(name, dtype) != dtype:
                raise ValueError(f"{name} is of {dtypes[name]} and of {dtype}")
            slices.setdefault(name, []).append((start, stop, writer))
    shape_of = {name: shape_in(kind, name, shapes) for name in slices}
    return {
        name: {"shape": list(shape), "dtype": dtypes[name], "parts": mf.parts_of(name, shape, slices[name])}
        for name, shape in shape_of.items()
    }


def shape_in(kind: Kind, name: str, shapes: Shapes) -> tuple[int, ...]:
    """Returns the shape of a complete tensor: its own, or its parameter's. Raises ValueError if it has neither."""
    parameter = name.rpartition("/")[0] if kind == "optimizer" and name not in shapes else name
    if parameter not in shapes:
        raise ValueError(f"{name} belongs to no parameter of this model")
    return tuple(shapes[parameter])


def put_in_place(checkpoints: Path, folder: Path, step: int) -> None:
    """Gives the folder of a complete checkpoint its name, and makes it the latest."""
    final = checkpoints / folder_name(step)
    faults.strike("save.rename", step)
    # It is there if it is damaged or outdated, or if a crash came before `latest` named it.
    replaced = retention.hide(final, "replaced") if final.exists() else None
    os.rename(folder, final)
    sync(checkpoints)
    retention.point(checkpoints, "latest", final.name)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)  # the next save's `sweep` tries again


def num_bytes_in(folder: Path) -> int:
    """Returns the bytes in the folder; a file that is being renamed may be missed."""
    total = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


def _record_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:05d}.json"


# ---- files of ranks that do not see the folder ----
#
# A message is JSON after its length in 8 bytes: the record of a rank's files, or {"problem": text}. After a record come
# the bytes of its files. The receiver reads them even if it cannot use them, because the next save's bytes follow.


def send(channel: SideChannel, folder: Path, record: Record) -> None:
    """Sends a record and the files that it names, which are in this rank's folder, to rank 0."""
    message = json.dumps(record).encode()
    for data in (len(message).to_bytes(8, "little"), message):
        channel.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
    for name, facts in record.get("files", {}).items():
        for begin in range(0, facts["bytes"], shards.CHUNK_BYTES):
            chunk = bytearray(min(shards.CHUNK_BYTES, facts["bytes"] - begin))
            # What cannot be read is sent as zeros: the receiver waits for all of it, and finds that it is not the file.
            with contextlib.suppress(OSError), (folder / name).open("rb") as file:
                file.seek(begin)
                file.readinto(chunk)
            channel.send(torch.frombuffer(chunk, dtype=torch.uint8), 0)


def receive(channel: SideChannel, rank: int, writer: int, folder: Path | None) -> None:
    """Receives a rank's files, and puts them and their record, or what went wrong, into `folder`; without a folder
    discards them. Raises OSError if not even the record can be written."""
    try:
        length = int.from_bytes(b"".join(_arriving(channel, rank, 8)), "little")
        record: Record = json.loads(b"".join(_arriving(channel, rank, length)))
        for name, facts in dict(record.get("files", {})).items():
            arriving = _arriving(channel, rank, facts["bytes"])
            try:
                is_wanted = folder is not None and "problem" not in record
                if is_wanted and shards.write_checked(folder / name, arriving) != facts:
                    raise OSError(errno.EIO, "other bytes have arrived than were sent", name)
            except OSError as error:
                record = {"problem": f"{error.filename}: {error.strerror}"}
            for _ in arriving:  # what was not written
                pass
    except RuntimeError as error:  # the rank is gone
        record = {"problem": str(error)}
    if folder is not None:
        put_record(folder, writer, record)


def _arriving(channel: SideChannel, rank: int, num_bytes: int) -> Iterator[bytes]:
    """Yields what the rank sends, in the chunks in which it does."""
    for begin in range(0, num_bytes, shards.CHUNK_BYTES):
        chunk = torch.empty(min(shards.CHUNK_BYTES, num_bytes - begin), dtype=torch.uint8)
        channel.receive(chunk, rank)
        yield chunk.numpy().tobytes()
