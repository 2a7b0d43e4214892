"""Which checkpoints a folder has, by folder names. Needs no torch: the command line reads it first."""

import json
import os
import re
from pathlib import Path

from paceline.base.errors import UserError

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    """Returns the name of a checkpoint's folder; zero-padded, so names sort by step."""
    return f"step-{step:08d}"


def list_steps(checkpoints: Path) -> list[int]:
    """Returns the steps with a checkpoint folder, complete or not, oldest first."""
    if not checkpoints.is_dir():
        return []
    with os.scandir(checkpoints) as entries:
        matches = [match for entry in entries if (match := STEP.fullmatch(entry.name)) and entry.is_dir()]
    return sorted(int(match[1]) for match in matches if folder_name(int(match[1])) == match[0])


def require_step(checkpoints: Path, step: int | None) -> list[int]:
    """Returns the steps with a checkpoint folder, oldest first; only `step` if given. Raises UserError without it."""
    steps = list_steps(checkpoints)
    if step is None:
        return steps
    if step not in steps:
        raise UserError(f"{checkpoints} has no checkpoint of step {step}; it has {steps or 'none'}")
    return [step]


def newest_whole(checkpoints: Path, step: int | None) -> int:
    """Returns the newest step (only `step` if given) whose checkpoint has a manifest and all files in full size; their
    bytes are not read. 0 if there is none. Raises UserError if `step` has no folder."""
    numbers = reversed(require_step(checkpoints, step))
    return next((number for number in numbers if is_whole(checkpoints / folder_name(number))), 0)


def is_whole(folder: Path) -> bool:
    """Returns whether a checkpoint has a manifest, and all its files in full size; their bytes are not read."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        return all((folder / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
