"""What the first writer does when all parts are there: one checkpoint of them, and what is not to stay goes.

A save happens in a hidden folder beside the checkpoints, named after the step and this attempt, so that neither files
nor records of a dead life can be taken for this one's. Each writer puts its files there and then, whole or not at all,
`writer-00001.json`: what its files hold, or what went wrong.
"""

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base import faults
from paceline.base.files import sync
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import shards
from paceline.checkpoint.config import CheckpointConfig

_POLL_S = 0.02
_PATIENCE_S = 600.0  # without a byte more in the folder: an fsync of a slow disk shows none for minutes
_DEBRIS = re.compile(r"\.step-\d+\..*(unfinished|pruned)")

Record = dict[str, Any]  # {"files": as in the manifest, "dtypes": {kind: {name: dtype}}} or {"problem": text}


class Abandoned(Exception):
    """The run ends; a checkpoint that waits for others is none."""


def aside(checkpoints: Path, step: int, attempt: str) -> Path:
    """Returns the folder in which this attempt's parts are gathered."""
    return checkpoints / f".{mf.folder_name(step)}.{attempt}.unfinished"


def sweep(checkpoints: Path, but: Path | None = None) -> None:
    """Removes what saves that did not end have left."""
    for entry in list(checkpoints.iterdir()):
        if entry != but and _DEBRIS.fullmatch(entry.name) and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)  # a writer that is late may still be at work in it


def put_record(folder: Path, writer: int, record: Record) -> None:
    """Makes a writer's record visible, whole: from here on its files count."""
    hidden = folder / f".writer-{writer:05d}.new"
    hidden.unlink(missing_ok=True)
    shards.write_synced(hidden, json.dumps(record).encode())
    os.rename(hidden, _record_path(folder, writer))
    sync(folder)


def gather(folder: Path, writers: Sequence[int], wait: Callable[[float], bool]) -> list[Record]:
    """Returns the records of these writers when all are there. `wait(seconds)` says whether the run has ended.

    Raises RuntimeError naming the first writer that failed, or shows no sign of life; Abandoned where the run ends. All
    are waited for also where one failed: one that still writes would leave its part in a folder that is removed.
    """
    records: dict[int, Record] = {}
    seen, since = -1, time.monotonic()
    while missing := [writer for writer in writers if writer not in records]:
        for writer in missing:
            with contextlib.suppress(FileNotFoundError):
                records[writer] = json.loads(_record_path(folder, writer).read_bytes())
        if (size := _size(folder)) != seen:
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
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, Any],
    config: CheckpointConfig,
) -> int:
    """Returns the bytes of the checkpoint of this step, which is complete now, on the disk, and named by `latest`.

    Raises ValueError where the parts do not make a whole, OSError where the disk fails; then there is none.
    """
    content = _content(step, records, shapes, facts)
    for path in folder.glob("*writer-*"):
        path.unlink()
    faults.strike("save.manifest", step)
    shards.write_synced(folder / mf.MANIFEST, mf.seal(content))
    sync(folder)
    final = checkpoints / mf.folder_name(step)
    _require_whole(folder, content)
    if final.exists():  # a damaged one of the same step
        _remove(final)
    faults.strike("save.rename", step)
    os.rename(folder, final)
    sync(checkpoints)
    point(checkpoints, "latest", final.name)
    prune(checkpoints, step, config)
    return mf.num_bytes(content)


def point(checkpoints: Path, name: str, target: str) -> None:
    """Makes the file `latest` or `best` name a checkpoint."""
    hidden = checkpoints / f".{name}.new"
    hidden.unlink(missing_ok=True)
    shards.write_synced(hidden, f"{target}\n".encode())
    os.replace(hidden, checkpoints / name)


def point_to_best(checkpoints: Path) -> int | None:
    """Makes `best` name the whole checkpoint with the lowest validation loss and returns its step; None: there is
    none, and no `best`."""
    losses = {step: manifest.get("val_loss") for step, manifest in _whole(checkpoints).items()}
    known = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    best = min(known, key=lambda step: (known[step], step), default=None)
    if best is None:
        (checkpoints / "best").unlink(missing_ok=True)
    elif _target(checkpoints / "best") != mf.folder_name(best):
        point(checkpoints, "best", mf.folder_name(best))
    return best


def prune(checkpoints: Path, step: int, config: CheckpointConfig) -> None:
    """Removes the whole checkpoints that the config does not keep. Damaged ones are let be, and push none out.

    One that stands for others, which were due while the disk was busy, is kept where one of those would have been.
    """
    best = point_to_best(checkpoints) if config.keep_best else None
    doomed = [
        number
        for number, manifest in list(_whole(checkpoints).items())[: -config.keep]
        if number != best and not _is_milestone([number, *manifest.get("due_steps", [])], config.keep_every)
    ]
    hidden = [_hide(checkpoints / mf.folder_name(number)) for number in doomed]
    faults.strike("save.prune", step)
    for folder in hidden:
        shutil.rmtree(folder)


def _is_milestone(steps: Sequence[int], keep_every: int) -> bool:
    return keep_every > 0 and any(step % keep_every == 0 for step in steps)


def _whole(checkpoints: Path) -> dict[int, Record]:
    """The manifests of whole checkpoints by step, oldest first."""
    found = {}
    for step in mf.list_steps(checkpoints):
        folder = checkpoints / mf.folder_name(step)
        with contextlib.suppress(mf.Damaged):
            manifest = mf.read_manifest(folder)
            mf.check_sizes(folder, manifest)
            found[step] = manifest
    return found


def _content(
    step: int, records: Sequence[Record], shapes: Mapping[str, tuple[int, ...]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of all writers' parts, which hold every element of every tensor once. Raises ValueError."""
    files = {name: file for record in records for name, file in sorted(record["files"].items())}
    tensors: dict[str, dict[str, Any]] = {kind: {} for kind in mf.KINDS}
    for kind in mf.KINDS:
        for record in records:
            for name, dtype in record["dtypes"].get(kind, {}).items():
                spec = {"shape": list(mf.tensor_shape(kind, name, shapes)), "dtype": dtype}
                if tensors[kind].setdefault(name, spec) != spec:
                    raise ValueError(f"{name} is of {tensors[kind][name]['dtype']} and of {dtype}")
    content = {"format": mf.FORMAT, "step": step, **facts, "tensors": tensors, "files": dict(sorted(files.items()))}
    if missing := shapes.keys() - tensors["weights"].keys():
        raise ValueError(f"{min(missing)}: no writer has an element of it")
    for kind in mf.KINDS:
        for name, places in mf.stored(content, kind).items():
            mf.check_cover(name, tensors[kind][name]["shape"], (piece.item for _, piece in places))
    return content


def _require_whole(folder: Path, content: Mapping[str, Any]) -> None:
    """What the disk gives back is this manifest, and files of these sizes; writers have compared their own files."""
    with shards.open_regular(folder / mf.MANIFEST) as file:
        if file.readall() != mf.seal(content):
            raise OSError(f"{folder / mf.MANIFEST}: the disk gives back other bytes than were written to it")
    try:
        mf.check_sizes(folder, content)
    except mf.Damaged as damage:
        raise OSError(str(damage)) from None


def _target(pointer: Path) -> str | None:
    return pointer.read_text().strip() if pointer.exists() else None


def _remove(folder: Path) -> None:
    shutil.rmtree(_hide(folder))


def _hide(folder: Path) -> Path:
    """Takes a checkpoint away in one act: a crash while its files go leaves debris, not half a checkpoint."""
    hidden = folder.with_name(f".{folder.name}.pruned")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    return hidden


def _size(folder: Path) -> int:
    """Bytes in the folder; a file that is renamed meanwhile may be missed."""
    total = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


def _record_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:05d}.json"
