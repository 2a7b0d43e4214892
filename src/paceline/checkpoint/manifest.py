"""The manifest makes a checkpoint complete: it has size, sha256 and elements of every file, and is written last.

checkpoints/step-00000500/
  weights-00000-of-00002.safetensors      what the first of two writers owned: `name`, or `name[start:stop]`
  weights-00001-of-00002.safetensors
  optimizer-00000-of-00002.safetensors    `name/moment`; no file if a writer owned none
  optimizer-00001-of-00002.safetensors
  extra-00000-of-00002.safetensors        other tensors that a script saves, such as averaged weights
  manifest.json                           files, tensors with shape and dtype, step and loop state, versions, config
checkpoints/latest, best                  each holds the name of a complete checkpoint
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.base.files import sha256_of
from paceline.base.ownership import Slice
from paceline.checkpoint import shards
from paceline.checkpoint.shards import Entry
from paceline.checkpoint.steps import folder_name as folder_name
from paceline.checkpoint.steps import list_steps as list_steps

Kind = Literal["weights", "optimizer", "extra"]

FORMAT = 3
READABLE = (2, 3)  # of format 2 only the weights: replica/checkpoints.py does not resume a run from it
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "extra")
MANIFEST = "manifest.json"
_FILE = re.compile(r"(weights|optimizer|extra)-\d{5}-of-\d{5}\.safetensors")
MOST_BYTES = 256 << 20  # 100 bytes for each slice: 1,000 tensors, each cut by 2,000 writers


class Damaged(Exception):
    """A checkpoint that must not be used; the message names the file and the reason."""


def file_name(kind: Kind, writer: int, num_writers: int) -> str:
    return f"{kind}-{writer:05d}-of-{num_writers:05d}.safetensors"


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the manifest's bytes. They include a digest of the content, which shows a flipped bit."""
    unsealed = {name: value for name, value in content.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(unsealed).encode()).hexdigest()
    return json.dumps({**unsealed, "sha256": digest}).encode() + b"\n"


def read(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest after verifying every file. Raises Damaged."""
    manifest = read_manifest(folder)
    for name in manifest["files"]:
        verify(folder, name, manifest)
    return manifest


def verify(folder: Path, name: str, manifest: Mapping[str, Any], progress: Callable[[], object] = lambda: None) -> None:
    """Raises Damaged unless every byte of this file is as written. Calls `progress` every 8 MiB."""
    with _as_damage(folder.name, name):
        if sha256_of(folder / name, progress) != manifest["files"][name]["sha256"]:
            raise Damaged(f"{folder.name}: the bytes of {name} are not those that were written (sha256 differs)")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest. Reads none of the files. Raises Damaged unless it is as written, lists every
    element of every tensor once, and all files have its sizes."""
    if folder.is_symlink():
        raise Damaged(f"{folder.name} is a symbolic link, which is not followed: move the checkpoint itself here")
    with _as_damage(folder.name, MANIFEST), shards.open_regular(folder / MANIFEST) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise Damaged(f"{folder.name}: {MANIFEST} has more than {MOST_BYTES} bytes")
        raw = file.readall()
    manifest = parse(raw, folder.name)
    check_sizes(folder, manifest)
    return manifest


def parse(raw: bytes, name: str) -> dict[str, Any]:
    """Returns the manifest of the checkpoint with this folder name. Raises Damaged unless it is as written, and lists
    every element of every tensor once."""
    with _as_damage(name, MANIFEST):
        manifest: dict[str, Any] = json.loads(raw)
        if manifest["format"] not in READABLE:
            raise Damaged(
                f"{name}: format {manifest['format']}, this paceline reads {' and '.join(map(str, READABLE))}"
            )
        if seal(manifest) != raw:
            raise Damaged(f"{name}: {MANIFEST} is not as it was written (sha256 differs)")
        if folder_name(manifest["step"]) != name:
            raise Damaged(f"{name}: its {MANIFEST} is of step {manifest['step']}")
        check(manifest)
    return manifest


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises Damaged unless all files are regular files of the sizes in the manifest."""
    for name, facts in manifest["files"].items():
        with _as_damage(folder.name, name), shards.open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != facts["bytes"]:
                raise Damaged(f"{folder.name}: {name} has {size} bytes, its manifest says {facts['bytes']}")


def check(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError if the manifest is malformed or lacks elements of a tensor."""
    for name, facts in manifest["files"].items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a checkpoint's file")
        numbers = [facts["bytes"], *(number for piece in facts["pieces"] for number in piece[2:])]
        if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(facts["sha256"], str):
            raise ValueError(f"{name}: its size, digest or slices are invalid")
    for kind in KINDS:
        specs = tensors(manifest, kind)
        for name, places in stored(manifest, kind).items():
            check_cover(name, specs[name][0], (entry.item for _, entry in places))


def check_cover(name: str, shape: Iterable[int], items: Iterable[Slice]) -> None:
    """Raises ValueError unless the slices hold every element of the tensor exactly once."""
    reached = 0
    for item in sorted(items):
        if item.start != reached:
            fault = "twice" if item.start < reached else "nowhere"
            raise ValueError(f"{name}: element {min(item.start, reached)} is stored {fault}")
        reached = item.stop
    if reached != math.prod(shape):
        raise ValueError(f"{name}: {reached} of its {math.prod(shape)} elements are stored")


def num_bytes(manifest: Mapping[str, Any]) -> int:
    return sum(int(facts["bytes"]) for facts in manifest["files"].values())


def tensors(manifest: Mapping[str, Any], kind: Kind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns name -> (shape, dtype)."""
    found = manifest["tensors"].get(kind, {})
    return {name: (tuple(spec["shape"]), shards.dtype_of(spec["dtype"])) for name, spec in found.items()}


def stored(manifest: Mapping[str, Any], kind: Kind) -> dict[str, list[tuple[str, Entry]]]:
    """Returns tensor name -> (file, the slice of the tensor in it), in the order of elements."""
    specs = tensors(manifest, kind)
    found: dict[str, list[tuple[str, Entry]]] = {name: [] for name in specs}
    for file, facts in manifest["files"].items():
        if file.startswith(f"{kind}-"):
            for key, name, start, stop in facts["pieces"]:
                shape, dtype = specs[name]
                entry = Entry(key, Slice(name, start, stop), dtype, shape if key == name else (stop - start,))
                found[name].append((file, entry))
    return {name: sorted(places, key=lambda place: place[1].item) for name, places in found.items()}


@contextmanager
def _as_damage(folder: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{folder}: no {name}") from None
    except OSError as error:
        raise Damaged(f"{folder}: {name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder}: {name} is unreadable ({error})") from None
