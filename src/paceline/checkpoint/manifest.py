"""What makes a checkpoint whole: a manifest with every file's size, sha256 and elements, written last.

checkpoints/step-00000500/
  weights-00000-of-00002.safetensors      what the first of two writers owned: `name`, or `name[start:stop]`
  weights-00001-of-00002.safetensors
  optimizer-00000-of-00002.safetensors    `name/moment`; left out where a writer owned none
  optimizer-00001-of-00002.safetensors
  manifest.json                           files, tensors with shape and dtype, step and loop state, versions, config
checkpoints/latest, best                  names of complete ones
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.base.ownership import Slice
from paceline.checkpoint import shards
from paceline.checkpoint.shards import Piece
from paceline.checkpoint.steps import folder_name as folder_name
from paceline.checkpoint.steps import list_steps as list_steps

Kind = Literal["weights", "optimizer"]

FORMAT = 2
KINDS: tuple[Kind, ...] = ("weights", "optimizer")
MANIFEST = "manifest.json"
_FILE = re.compile(r"(weights|optimizer)-\d{5}-of-\d{5}\.safetensors")
_MOST_BYTES = 256 << 20  # a hundred bytes a piece: a thousand tensors cut by two thousand writers


class Damaged(Exception):
    """A checkpoint that must not be used; the message says which file and why."""


def file_name(kind: Kind, writer: int, num_writers: int) -> str:
    """Returns the name of the file of one writer."""
    return f"{kind}-{writer:05d}-of-{num_writers:05d}.safetensors"


def tensor_shape(kind: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of a tensor from those of the parameters: state has its parameter's. Raises ValueError."""
    parameter = name if kind == "weights" else name.rpartition("/")[0]
    if parameter not in shapes:
        raise ValueError(f"{name} belongs to no parameter of this model")
    return tuple(shapes[parameter])


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


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the manifest's bytes, with a digest of the rest in it: a flipped bit in a number is found too."""
    plain = {name: value for name, value in content.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(plain).encode()).hexdigest()
    return json.dumps({**plain, "sha256": digest}).encode() + b"\n"


def read(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose every byte is as it was written. Raises Damaged otherwise."""
    manifest = read_manifest(folder)
    for name in manifest["files"]:
        verify(folder, name, manifest)
    return manifest


def verify(folder: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Returns if every byte of this file is as it was written. Raises Damaged otherwise."""
    wanted = manifest["files"][name]
    with _as_damage(folder, name):
        size = (folder / name).lstat().st_size
        if size != wanted["bytes"]:
            raise Damaged(f"{folder.name}: {name} has {size} bytes, its manifest says {wanted['bytes']}")
        if shards.digest(folder / name) != wanted["sha256"]:
            raise Damaged(f"{folder.name}: the bytes of {name} are not those that were written (sha256 differs)")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest, which is as it was written and accounts for every element of every tensor.

    Raises Damaged otherwise. The files that it names have not been looked at.
    """
    if folder.is_symlink():
        raise Damaged(f"{folder.name} is a symbolic link, which is not followed: move the checkpoint itself here")
    with _as_damage(folder, MANIFEST), shards.open_regular(folder / MANIFEST) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise Damaged(f"{folder.name}: {MANIFEST} has more than {_MOST_BYTES} bytes")
        raw = file.readall()
        manifest: dict[str, Any] = json.loads(raw)
        if manifest["format"] != FORMAT:
            raise Damaged(f"{folder.name}: format {manifest['format']}, this paceline reads {FORMAT}")
        if seal(manifest) != raw:
            raise Damaged(f"{folder.name}: {MANIFEST} is not as it was written (sha256 differs)")
        if folder_name(manifest["step"]) != folder.name:
            raise Damaged(f"{folder.name}: its {MANIFEST} is of step {manifest['step']}")
        _check_form(manifest)
    return manifest


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises Damaged where a file is missing or has another size than the manifest says. Reads no tensor."""
    for name, wanted in manifest["files"].items():
        with _as_damage(folder, name):
            if (folder / name).lstat().st_size != wanted["bytes"]:
                raise Damaged(f"{folder.name}: {name} has not the {wanted['bytes']} bytes that its manifest says")


def num_bytes(manifest: Mapping[str, Any]) -> int:
    """Returns the bytes of all files, as the manifest has them."""
    return sum(int(facts["bytes"]) for facts in manifest["files"].values())


def tensors(manifest: Mapping[str, Any], kind: Kind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns name -> (shape, dtype)."""
    found = manifest["tensors"][kind]
    return {name: (tuple(spec["shape"]), shards.dtype_of(spec["dtype"])) for name, spec in found.items()}


def stored(manifest: Mapping[str, Any], kind: Kind) -> dict[str, list[tuple[str, Piece]]]:
    """Returns tensor name -> (file, what of the tensor it has), in the order of elements."""
    specs = tensors(manifest, kind)
    found: dict[str, list[tuple[str, Piece]]] = {name: [] for name in specs}
    for file, facts in manifest["files"].items():
        if file.startswith(f"{kind}-"):
            for key, name, start, stop in facts["pieces"]:
                shape, dtype = specs[name]
                piece = Piece(key, Slice(name, start, stop), dtype, shape if key == name else (stop - start,))
                found[name].append((file, piece))
    return {name: sorted(places, key=lambda place: place[1].item) for name, places in found.items()}


def _check_form(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError where the manifest is not of our form or elements are missing."""
    for name, facts in manifest["files"].items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a checkpoint's file")
        numbers = [facts["bytes"], *(number for piece in facts["pieces"] for number in piece[2:])]
        if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(facts["sha256"], str):
            raise ValueError(f"{name}: its sizes are no sizes")
    for kind in KINDS:
        specs = tensors(manifest, kind)
        for name, places in stored(manifest, kind).items():
            check_cover(name, specs[name][0], (piece.item for _, piece in places))


@contextmanager
def _as_damage(folder: Path, name: str) -> Iterator[None]:
    """What goes wrong inside is damage of this file."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{folder.name}: no {name}") from None
    except OSError as error:
        raise Damaged(f"{folder.name}: {name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder.name}: {name} is unreadable ({error})") from None
