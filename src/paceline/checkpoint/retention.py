"""Which checkpoints are kept, and which `latest` and `best` name.

`index.jsonl` has a line for each checkpoint: step, bytes of its files, validation loss, steps that it stands for. So a
save reads one file however many are kept, and only the manifests of the newest ones and of one that was copied here.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.base import faults
from paceline.base.files import replace, sync
from paceline.base.jsonl import Row, rows
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.steps import folder_name, is_whole, list_steps

_INDEX = "index.jsonl"
_FORMER_LOSS = "val_loss.json"  # in a checkpoint that an earlier version evaluated after its save


def point(checkpoints: Path, name: str, target: str) -> None:
    """Makes the file `latest` or `best` name a checkpoint."""
    replace(checkpoints / name, f"{target}\n".encode(), 0o600)


def mark(checkpoints: Path, losses: Mapping[int, float]) -> float | None:
    """Records validation losses (by step) of checkpoints that were evaluated after their save; updates `best`. Returns
    its loss; None: there is no best."""
    index = _index(checkpoints)
    for step in index.keys() & losses.keys():
        index[step]["val_loss"] = losses[step]
    _write(checkpoints, index)
    best = _point_to_best(checkpoints, index)
    return None if best is None else index[best]["val_loss"]


def recorded_losses(checkpoints: Path) -> dict[int, float]:
    """Returns step -> finite validation loss, from the metrics of the run that has these checkpoints."""
    metrics = rows(checkpoints.parent / "metrics.jsonl", with_text='"val_loss"')
    losses = ((row.get("step"), row.get("val_loss")) for row in metrics if row)
    return {
        step: loss for step, loss in losses if isinstance(step, int) and isinstance(loss, float) and math.isfinite(loss)
    }


def add(
    checkpoints: Path,
    manifest: Mapping[str, Any],
    config: CheckpointConfig,
    sending: Callable[[], int | None] = lambda: None,
) -> None:
    """Adds a new checkpoint to the index, and removes those that the config does not keep. Of the newest, damaged ones
    stay, and do not count. A checkpoint also stands for steps that were due while the disk was busy (`due_steps`).
    sending: returns a step that is being read now, and stays."""
    step = manifest["step"]
    index = _index(checkpoints, but=step) | {step: _line(manifest)}
    _write(checkpoints, index)
    best = _point_to_best(checkpoints, index) if config.keep_best else None
    if best is None:  # it may name one that is removed now
        (checkpoints / "best").unlink(missing_ok=True)
    hidden, num_whole = [], 0
    for number in sorted(index, reverse=True):
        if num_whole < config.keep:
            num_whole += is_whole(checkpoints / folder_name(number))
            continue
        steps = [number, *index[number]["due_steps"]]
        is_milestone = config.keep_every > 0 and any(due % config.keep_every == 0 for due in steps)
        if number not in (best, step, sending()) and not is_milestone:
            hidden.append(hide(checkpoints / folder_name(number)))
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
    later = [folder_name(number) for number in list_steps(checkpoints) if number > step]
    point(checkpoints, "latest", folder_name(step))  # first: a crash never leaves it on a folder that was renamed
    for name in reversed(later):  # the newest first: a crash in between leaves no gap
        target, number = checkpoints / f"superseded-{name}", 1
        while target.exists():  # from an earlier resume at this step
            number += 1
            target = checkpoints / f"superseded-{name}-{number}"
        os.rename(checkpoints / name, target)
    index = _index(checkpoints)
    _write(checkpoints, index)
    if (checkpoints / "best").exists():
        _point_to_best(checkpoints, index)
    sync(checkpoints)
    return later


def _point_to_best(checkpoints: Path, index: Mapping[int, Row]) -> int | None:
    """Makes `best` name the complete checkpoint with the lowest finite loss, and returns its step or None."""
    losses = {step: math.inf if line["val_loss"] is None else line["val_loss"] for step, line in index.items()}
    ranked = sorted(filter(lambda step: math.isfinite(losses[step]), losses), key=lambda step: (losses[step], step))
    best = next((step for step in ranked if is_whole(checkpoints / folder_name(step))), None)
    if best is None:
        (checkpoints / "best").unlink(missing_ok=True)
    else:
        point(checkpoints, "best", folder_name(best))
    return best


def _index(checkpoints: Path, but: int | None = None) -> dict[int, Row]:
    """Returns step -> line of the checkpoints that are there. Reads the manifest of one that has no line: it was copied
    here, or an earlier version saved it. Damaged ones have none. but: a step to leave out."""
    lines = {line["step"]: line for line in rows(checkpoints / _INDEX) if line is not None and _is_line(line)}
    index = {}
    for step in list_steps(checkpoints):
        if step == but:
            continue
        if step in lines:
            index[step] = lines[step]
            continue
        with contextlib.suppress(mf.Damaged):
            index[step] = _line(mf.read_manifest(checkpoints / folder_name(step)))
            with contextlib.suppress(OSError, ValueError, TypeError):
                index[step]["val_loss"] = float((checkpoints / folder_name(step) / _FORMER_LOSS).read_text())
    return index


def _line(manifest: Mapping[str, Any]) -> Row:
    facts = {"val_loss": manifest.get("val_loss"), "due_steps": manifest.get("due_steps", [])}
    return {"step": manifest["step"], "bytes": mf.num_bytes(manifest), **facts}


def _is_line(line: Row) -> bool:
    """Whether a line is as `_line` makes it; a person may have edited the file."""
    loss, due_steps = line.get("val_loss", ""), line.get("due_steps")
    if not isinstance(due_steps, list) or not (loss is None or isinstance(loss, int | float)):
        return False
    return all(isinstance(number, int) for number in (line.get("step"), line.get("bytes"), *due_steps))


def _write(checkpoints: Path, index: Mapping[int, Row]) -> None:
    lines = [json.dumps(index[step]) for step in sorted(index)]
    replace(checkpoints / _INDEX, "".join(f"{line}\n" for line in lines).encode(), 0o600)
