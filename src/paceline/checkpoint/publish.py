"""Combines the files of all writers into one checkpoint.

A save uses a hidden folder beside the checkpoints, named after the step and this attempt, so that files of an earlier
attempt are never used. Each writer puts its files there, then a record, `writer-00001.json`: what its files hold, or
what went wrong. The first writer waits for all records, adds the manifest and renames the folder.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.base import faults
from paceline.base.files import replace, sha256_of, sync
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import retention, shards
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.shards import Bytes
from paceline.world.group import SideChannel

_POLL_S = 0.02
_PATIENCE_S = 600.0  # without one more byte in the folder: an fsync on a slow disk may take minutes
_DEBRIS = re.compile(r"\.step-\d+\..*(unfinished|pruned|replaced)")

Record = dict[str, Any]  # {"files": as in the manifest, "tensors": as in the manifest} or {"problem": text}


class Abandoned(Exception):
    """The run ends while a checkpoint waits for other writers; the checkpoint will not exist."""


def unfinished_folder(checkpoints: Path, step: int, attempt: str) -> Path:
    return checkpoints / f".{mf.folder_name(step)}.{attempt}.unfinished"


def sweep(checkpoints: Path, but: Path) -> None:
    """Removes what unfinished saves have left, except the folder `but`."""
    retention.take_back(checkpoints)
    for entry in list(checkpoints.iterdir()):
        if entry != but and _DEBRIS.fullmatch(entry.name) and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)  # a late writer may still write into it


def put_record(folder: Path, writer: int, record: Record) -> None:
    replace(_record_path(folder, writer), json.dumps(record).encode(), 0o600)
    sync(folder)


def gather(folder: Path, writers: Sequence[int], wait: Callable[[float], bool]) -> list[Record]:
    """Returns these writers' records when all are there. `wait(seconds)` returns whether the run has ended.

    Raises RuntimeError naming the first writer that failed or makes no progress, Abandoned if the run ends. After a
    failure it still waits for the other writers, which would write into a removed folder.
    """
    records: dict[int, Record] = {}
    seen, since = -1, time.monotonic()
    while missing := [writer for writer in writers if writer not in records]:
        for writer in missing:
            with contextlib.suppress(FileNotFoundError):
                records[writer] = json.loads(_record_path(folder, writer).read_bytes())
        if (size := num_bytes_in(folder)) != seen:
            seen, since = size, time.monotonic()
        elif time.monotonic() - since > _PATIENCE_S:
            raise RuntimeError(f"nothing more has come from writer {missing[0]} for {_PATIENCE_S:.0f} s")
        if len(records) < len(writers) and wait(_POLL_S):
            raise Abandoned("the run ended before all of it was written")
    for writer, record in sorted(records.items()):
        if "problem" in record:
            raise RuntimeError(f"writer {writer}: {record['problem']}")
    return [records[writer] for writer in writers]


def publish(
    checkpoints: Path,
    folder: Path,
    step: int,
    records: Sequence[Record],
    names: Iterable[str],
    facts: Mapping[str, Any],
    config: CheckpointConfig,
) -> int:
    """Makes the checkpoint of this step, prunes older ones, and returns its size in bytes when it is on the disk.
    `names`: tensors that must be stored. Raises ValueError if the files lack elements, OSError if the disk fails."""
    manifest = _manifest(step, records, names, facts)
    for path in folder.glob("*writer-*"):
        path.unlink()
    faults.strike("save.manifest", step)
    sealed = mf.seal(manifest)
    if len(sealed) > mf.MOST_BYTES:
        raise ValueError(
            f"{mf.MANIFEST} would have {len(sealed)} bytes, and at most {mf.MOST_BYTES} can be read: too many slices; "
            "save from fewer ranks"
        )
    shards.write_checked(folder / mf.MANIFEST, np.frombuffer(sealed, dtype=np.uint8))
    sync(folder)
    try:
        mf.check_sizes(folder, manifest)  # the writers have compared the bytes
    except mf.Damaged as damage:
        raise OSError(str(damage)) from None
    put_in_place(checkpoints, folder, step)
    retention.prune(checkpoints, step, config)
    return mf.num_bytes(manifest)


def put_in_place(checkpoints: Path, folder: Path, step: int) -> None:
    """Gives the folder of a complete checkpoint its name, and makes it the latest."""
    final = checkpoints / mf.folder_name(step)
    faults.strike("save.rename", step)
    # It is there if it is damaged or outdated, or if a crash came before `latest` named it.
    replaced = retention.hide(final, "replaced") if final.exists() else None
    os.rename(folder, final)
    sync(checkpoints)
    retention.point(checkpoints, "latest", final.name)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)  # the next save's `sweep` tries again


def _manifest(step: int, records: Sequence[Record], names: Iterable[str], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest of all files. Raises ValueError unless they hold every element of every tensor once."""
    files = {name: file for record in records for name, file in record["files"].items()}
    tensors: dict[str, dict[str, Any]] = {kind: {} for kind in mf.KINDS}
    for record in records:
        for kind, specs in record["tensors"].items():
            for name, spec in specs.items():
                if tensors[kind].setdefault(name, spec) != spec:
                    raise ValueError(f"{name} is of {tensors[kind][name]['dtype']} and of {spec['dtype']}")
    manifest = {"format": mf.FORMAT, "step": step, **facts, "tensors": tensors, "files": dict(sorted(files.items()))}
    if missing := set(names) - {name for specs in tensors.values() for name in specs}:
        raise ValueError(f"{min(missing)}: no writer has an element of it")
    mf.check(manifest)
    return manifest


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
# They are sent to the first writer, which writes them. A message is JSON after its length in 8 bytes: the record of a
# rank's files, or {"problem": text}. After a record come the bytes of its files. The receiver reads them even if it
# cannot use them, because the next save's bytes follow.


def send(channel: SideChannel, record: Record, images: Mapping[str, Bytes]) -> None:
    """Sends a record and the files that it names to rank 0."""
    message = json.dumps(record).encode()
    content = [len(message).to_bytes(8, "little"), message]
    for data in [*(np.frombuffer(bytearray(part), dtype=np.uint8) for part in content), *images.values()]:
        for chunk in shards.chunks(data):
            channel.send(torch.from_numpy(chunk), 0)


def receive(channel: SideChannel, rank: int, folder: Path | None) -> Record:
    """Receives a rank's files, writes them into `folder` and returns their record; without a folder discards them.
    Raises RuntimeError with the rank's problem or if the rank is gone, OSError if the disk fails."""
    length = int.from_bytes(_bytes(channel, rank, 8), "little")
    record: Record = json.loads(_bytes(channel, rank, length))
    if "problem" in record:
        raise RuntimeError(f"rank {rank}: {record['problem']}")
    failure: OSError | None = None
    for name, facts in record["files"].items():
        arriving = _arriving(channel, rank, facts["bytes"])
        try:
            if folder is not None and failure is None:
                shards.write_file(folder / name, arriving)
                if sha256_of(folder / name) != facts["sha256"]:
                    raise shards.not_as_written(folder / name)
        except OSError as error:
            failure = error
        for _ in arriving:  # what was not written
            pass
    if failure is not None:
        raise failure
    return record


def _bytes(channel: SideChannel, rank: int, num_bytes: int) -> bytes:
    return b"".join(chunk.tobytes() for chunk in _arriving(channel, rank, num_bytes))


def _arriving(channel: SideChannel, rank: int, num_bytes: int) -> Iterator[Bytes]:
    """Yields what the rank sends, in chunks; each is valid until the next."""
    buffer = torch.empty(min(num_bytes, shards.CHUNK_BYTES), dtype=torch.uint8)
    for begin in range(0, num_bytes, shards.CHUNK_BYTES):
        chunk = buffer[: num_bytes - begin]
        channel.receive(chunk, rank)
        yield chunk.numpy()
