"""What makes a checkpoint whole: a manifest with the size and sha256 of every file, written last.

checkpoints/step-00000500/
  weights.safetensors      parameter name -> tensor, once, whatever the world size was
  optimizer.safetensors    parameter name/moment -> tensor
  manifest.json            files with sizes and sha256, step and loop state, versions, config
checkpoints/latest         the name of the newest complete one
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from paceline.base.files import sha256_of

FORMAT = 1
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


def folder_name(step: int) -> str:
    """Returns the name of a checkpoint's folder; zero-padded, so that names sort as steps do."""
    return f"step-{step:08d}"


def list_steps(checkpoints: Path) -> list[int]:
    """Returns the steps that have a folder of exactly our form, oldest first, whole or not."""
    if not checkpoints.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in matches if match and folder_name(int(match[1])) == match[0])


def describe(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns what the manifest says of these files, from the bytes as they can be read back now."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in names}


def seal(content: dict[str, Any]) -> bytes:
    """Returns the manifest's bytes, with a digest of the rest in it: a flipped bit in a number is found too."""
    return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


def _digest(content: dict[str, Any]) -> str:
    plain = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class Damaged(Exception):
    """A checkpoint that must not be used; the message says which file and why."""


def read(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose every byte is as it was written. Raises Damaged otherwise."""
    manifest = _read_manifest(folder)
    for name in (WEIGHTS, OPTIMIZER):
        _verify(folder, name, manifest["files"][name])
    return manifest


def is_whole(folder: Path) -> bool:
    """Returns whether manifest and sizes are right; for counting, not for use: it does not read the tensors."""
    try:
        files = _read_manifest(folder)["files"]
        return all((folder / name).stat().st_size == files[name]["bytes"] for name in (WEIGHTS, OPTIMIZER))
    except (Damaged, OSError):
        return False


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise Damaged(f"{folder.name}: format {manifest['format']}, this paceline reads {FORMAT}")
        if manifest["sha256"] != _digest(manifest):
            raise Damaged(f"{folder.name}: {MANIFEST} is not as it was written (sha256 differs)")
        if folder_name(manifest["step"]) != folder.name:
            raise Damaged(f"{folder.name}: its {MANIFEST} is of step {manifest['step']}")
        for name in (WEIGHTS, OPTIMIZER):
            manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
    except FileNotFoundError:
        raise Damaged(f"{folder.name}: no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise Damaged(f"{folder.name}: {MANIFEST} is unreadable ({error})") from None
    return manifest


def _verify(folder: Path, name: str, wanted: dict[str, Any]) -> None:
    path = folder / name
    try:
        num_bytes = path.stat().st_size
        if num_bytes != wanted["bytes"]:
            raise Damaged(f"{folder.name}: {name} has {num_bytes} bytes, its manifest says {wanted['bytes']}")
        if sha256_of(path) != wanted["sha256"]:
            raise Damaged(f"{folder.name}: the bytes of {name} are not those that were written (sha256 differs)")
    except OSError as error:
        raise Damaged(f"{folder.name}: {name}: {error.strerror}") from None
