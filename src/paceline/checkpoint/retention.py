"""Which checkpoints are kept, and which `latest` and `best` name."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base import faults
from paceline.base.files import replace, sync
from paceline.base.jsonl import rows
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.config import CheckpointConfig

_FACTS = ("val_loss", "due_steps")  # what retention needs of a manifest
_State = list[tuple[int, int, int, int]]  # of a checkpoint's folder and manifest: inode, size, mtime, ctime
_READ: dict[Path, tuple[_State, dict[str, Any]]] = {}  # by folder: its state when it was read, and _FACTS
_LOSS = "val_loss.json"  # in a checkpoint that was saved before it was evaluated


def point(checkpoints: Path, name: str, target: str) -> None:
    """Makes the file `latest` or `best` name a checkpoint."""
    replace(checkpoints / name, f"{target}\n".encode(), 0o600)


def mark(checkpoints: Path, step: int, val_loss: float) -> None:
    """Records the loss of a checkpoint evaluated after its save; updates `best`. Raises OSError if there is none."""
    replace(checkpoints / mf.folder_name(step) / _LOSS, json.dumps(val_loss).encode())
    _point_to_best(checkpoints)


def recorded_losses(checkpoints: Path) -> dict[int, float]:
    """Returns step -> finite validation loss, from the metrics of the run that has these checkpoints."""
    metrics = rows(checkpoints.parent / "metrics.jsonl", with_text='"val_loss"')
    found = ((row.get("step"), row.get("val_loss")) for row in metrics if row)
    return {
        step: loss for step, loss in found if isinstance(step, int) and isinstance(loss, float) and math.isfinite(loss)
    }


def take_losses(checkpoints: Path, losses: Mapping[int, float]) -> None:
    """Records these losses (by step) of checkpoints evaluated after their save, where `mark` wrote no file: in a copy,
    after a crash, or if the best was not kept so far. Updates `best`."""
    for step, manifest in _complete(checkpoints).items():
        if step in losses and _val_loss(checkpoints, step, manifest) is None:
            replace(checkpoints / mf.folder_name(step) / _LOSS, json.dumps(losses[step]).encode())
    _point_to_best(checkpoints)


def prune(checkpoints: Path, step: int, config: CheckpointConfig) -> None:
    """Removes the complete checkpoints that the config does not keep. Damaged ones stay, and do not count. A checkpoint
    also stands for steps that were due while the disk was busy (`due_steps`)."""
    best = _point_to_best(checkpoints) if config.keep_best else None
    if best is None:  # it may name one that is removed now
        (checkpoints / "best").unlink(missing_ok=True)
    hidden = []
    for number, manifest in list(_complete(checkpoints).items())[: -config.keep]:
        steps = [number, *manifest.get("due_steps", [])]
        is_milestone = config.keep_every > 0 and any(due % config.keep_every == 0 for due in steps)
        if number not in (best, step) and not is_milestone:
            hidden.append(hide(checkpoints / mf.folder_name(number)))
    faults.strike("save.prune", step)
    for folder in hidden:
        shutil.rmtree(folder, ignore_errors=True)  # the next save's `sweep` tries again


def hide(folder: Path, why: str = "pruned") -> Path:
    """Renames a checkpoint before its removal and returns its new path: a crash leaves no half checkpoint."""
    hidden = folder.with_name(f".{folder.name}.{why}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(folder, hidden)
    return hidden


def take_back(checkpoints: Path) -> None:
    """Gives a checkpoint its name again if a crash came after it was hidden, before the one that replaces it had its
    name. Only for the process that writes here. Raises OSError."""
    for hidden in checkpoints.glob(".step-*.replaced"):
        folder = hidden.with_name(hidden.name.removeprefix(".").removesuffix(".replaced"))
        if not folder.exists():
            os.rename(hidden, folder)


def set_aside(checkpoints: Path, step: int) -> list[str]:
    """For a run that resumes at `step`: renames later checkpoints to `superseded-NAME` and returns their names.
    `latest` then names this step, and `best`, if it exists, the best of those left."""
    later = [mf.folder_name(number) for number in mf.list_steps(checkpoints) if number > step]
    point(checkpoints, "latest", mf.folder_name(step))  # first: a crash never leaves it on a folder that was renamed
    for name in reversed(later):  # the newest first: a crash in between leaves no gap
        target, number = checkpoints / f"superseded-{name}", 1
        while target.exists():  # from an earlier resume at this step
            number += 1
            target = checkpoints / f"superseded-{name}-{number}"
        os.rename(checkpoints / name, target)
    if (checkpoints / "best").exists():
        _point_to_best(checkpoints)
    sync(checkpoints)
    return later


def _point_to_best(checkpoints: Path) -> int | None:
    """Makes `best` name the complete checkpoint with the lowest finite loss, and returns its step or None."""
    losses = {step: _val_loss(checkpoints, step, manifest) for step, manifest in _complete(checkpoints).items()}
    known = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
    best = min(known, key=lambda step: (known[step], step), default=None)
    if best is None:
        (checkpoints / "best").unlink(missing_ok=True)
    else:
        point(checkpoints, "best", mf.folder_name(best))
    return best


def _val_loss(checkpoints: Path, step: int, manifest: dict[str, Any]) -> float | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return float(json.loads((checkpoints / mf.folder_name(step) / _LOSS).read_text()))
    return manifest.get("val_loss")


def _complete(checkpoints: Path) -> dict[int, dict[str, Any]]:
    """Returns step -> `val_loss` and `due_steps`, where the manifest has them, of the checkpoints that have all files
    in full size, oldest first. A manifest that this process has read is not read again until a file of its folder has
    come, gone, or changed its name."""
    facts_by_step = {}
    for step in mf.list_steps(checkpoints):
        folder = checkpoints / mf.folder_name(step)
        with contextlib.suppress(mf.Damaged, OSError):
            state = [(seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns) for seen in _stats(folder)]
            if folder not in _READ or _READ[folder][0] != state:
                manifest = mf.read_manifest(folder)
                _READ[folder] = state, {name: manifest[name] for name in _FACTS if name in manifest}
            facts_by_step[step] = _READ[folder][1]
    for folder in list(_READ):  # another thread may add to it, for another folder
        if folder.parent == checkpoints and not folder.exists():
            _READ.pop(folder, None)
    return facts_by_step


def _stats(folder: Path) -> list[os.stat_result]:
    return [folder.lstat(), (folder / mf.MANIFEST).lstat()]
