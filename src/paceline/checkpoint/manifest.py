"""The manifest makes a checkpoint complete: it has size and sha256 of every file, and which writer has which elements
of every tensor. It is written last.

checkpoints/step-00000500/
  weights-00000-of-00002.safetensors      what the first of two writers owned: `name`, or `name[start:stop]`
  weights-00001-of-00002.safetensors
  optimizer-00000-of-00002.safetensors    `name/moment`; no file if a writer owned none
  optimizer-00001-of-00002.safetensors
  extra-00000-of-00002.safetensors        other tensors that a script saves, such as averaged weights
  manifest.json                           files, tensors, step and loop state, versions, config
checkpoints/latest, best                  each holds the name of a complete checkpoint
checkpoints/index.jsonl                   size and validation loss of each (retention.py)

A tensor's entry: {"shape": [128, 64], "dtype": "float32", "parts": [[0, 4, 2048]]}. Each part is [first writer, number
of writers, elements that each of them has], in the order of elements: four writers from number 0 on have 2,048 each.
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
from paceline.checkpoint.steps import MANIFEST, folder_name

Kind = Literal["weights", "optimizer", "extra"]

FORMAT = 4
# 2 and 3 list every slice; of format 2 only the weights are read: replica/folder.py does not resume from it.
READABLE = (2, 3, 4)
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "extra")
_FILE = re.compile(r"(weights|optimizer|extra)-(\d{5})-of-\d{5}\.safetensors")
MOST_BYTES = 256 << 20


class Damaged(Exception):
    """A checkpoint that must not be used; the message names the file and the reason."""


def file_name(kind: Kind, writer: int, num_writers: int) -> str:
    return f"{kind}-{writer:05d}-of-{num_writers:05d}.safetensors"


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the manifest's bytes. They include a digest of the content, which shows a flipped bit."""
    unsealed = {name: value for name, value in content.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(unsealed).encode()).hexdigest()
    return json.dumps({**unsealed, "sha256": digest}).encode() + b"\n"


def verify(
    folder: Path,
    name: str,
    manifest: Mapping[str, Any],
    progress: Callable[[], object] = lambda: None,
    verified: dict[str, shards.Data] | None = None,
) -> None:
    """Raises Damaged unless every byte of this file is as written. Calls `progress` every 8 MiB. verified: gets the
    bytes, by the file's name."""
    facts = manifest["files"][name]
    with _as_damage(folder.name, name):
        if verified is None:
            sha256 = sha256_of(folder / name, progress)
        else:
            verified[name], sha256 = shards.read_whole(folder / name, facts["bytes"], progress)
        if sha256 != facts["sha256"]:
            raise Damaged(f"{folder.name}: the bytes of {name} are not those that were written (sha256 differs)")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest. Reads none of the files. Raises Damaged unless it is as written, has every
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
    with _as_damage(name, MANIFEST):
        manifest: dict[str, Any] = json.loads(raw)
        if manifest["format"] not in READABLE:
            readable = f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
            raise Damaged(f"{name}: format {manifest['format']}, this paceline reads {readable}")
        if seal(manifest) != raw:
            raise Damaged(f"{name}: {MANIFEST} is not as it was written (sha256 differs)")
        if folder_name(manifest["step"]) != name:
            raise Damaged(f"{name}: its {MANIFEST} is of step {manifest['step']}")
        if manifest["format"] < FORMAT:
            _add_parts(manifest)
        _check(manifest)
    return manifest


def _add_parts(manifest: dict[str, Any]) -> None:
    """Makes the parts of a former manifest, which lists the slices in each file."""
    slices: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for kind, writer, facts in _files(manifest):
        for _, name, start, stop in facts["pieces"]:
            slices.setdefault((kind, name), []).append((start, stop, writer))
    for kind, specs in manifest["tensors"].items():
        for name, spec in specs.items():
            spec["parts"] = parts_of(name, spec["shape"], slices.get((kind, name), ()))


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises Damaged unless all files are regular files of the sizes in the manifest."""
    for name, facts in manifest["files"].items():
        with _as_damage(folder.name, name), shards.open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != facts["bytes"]:
                raise Damaged(f"{folder.name}: {name} has {size} bytes, its manifest says {facts['bytes']}")


def _check(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError if the manifest is malformed or lacks elements of a tensor."""
    writers: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for kind, writer, facts in _files(manifest):
        writers[kind].add(writer)
        if type(facts["bytes"]) is not int or facts["bytes"] < 0 or not isinstance(facts["sha256"], str):
            raise ValueError(f"size or digest of a file of {kind} is invalid")
    for kind in KINDS:
        runs = set()
        for name, (shape, _) in tensors(manifest, kind).items():
            parts = manifest["tensors"][kind][name]["parts"]
            if any(type(number) is not int or number < 0 for part in parts for number in (*part, len(part) - 3)):
                raise ValueError(f"{name}: its parts are invalid")
            if any(size == 0 for _, _, size in parts):
                raise ValueError(f"{name}: a part of it has no element")
            if sum(count * size for _, count, size in parts) != math.prod(shape):
                raise ValueError(f"{name}: its parts do not have its {math.prod(shape)} elements")
            runs |= {(first, count) for first, count, _ in parts}
        if any(not writers[kind].issuperset(range(first, first + count)) for first, count in runs):
            raise ValueError(f"a file of {kind} is not listed")


def _files(manifest: Mapping[str, Any]) -> Iterator[tuple[Kind, int, dict[str, Any]]]:
    """Yields kind, writer and facts of each file. Raises ValueError for another name."""
    for name, facts in manifest["files"].items():
        match = _FILE.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not the name of a checkpoint's file")
        yield match[1], int(match[2]), facts  # type: ignore[misc]


def parts_of(name: str, shape: Iterable[int], slices: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """Returns a tensor's parts from (start, stop, writer) of its slices. Raises ValueError unless these hold every
    element exactly once."""
    parts: list[list[int]] = []
    reached = 0
    for start, stop, writer in sorted(slices):
        if start != reached:
            fault = "twice" if start < reached else "nowhere"
            raise ValueError(f"{name}: element {min(start, reached)} is stored {fault}")
        reached = stop
        if parts and parts[-1][2] == stop - start and writer == parts[-1][0] + parts[-1][1]:
            parts[-1][1] += 1
        elif start < stop:
            parts.append([writer, 1, stop - start])
    if reached != math.prod(shape):
        raise ValueError(f"{name}: {reached} of its {math.prod(shape)} elements are stored")
    return parts


def stored(manifest: Mapping[str, Any], kind: Kind, item: Slice) -> Iterator[tuple[str, Slice]]:
    """Yields (file, stored slice) for each that has elements of this one, in the order of elements."""
    begin = 0
    for first, count, size in manifest["tensors"][kind][item.name]["parts"]:
        after = max(0, item.start - begin) // size
        until = min(count, -(-max(0, item.stop - begin) // size))
        for index in range(after, until):
            start = begin + index * size
            num_writers = int(next(iter(manifest["files"])).rpartition("-")[2].removesuffix(".safetensors"))
            yield file_name(kind, first + index, num_writers), Slice(item.name, start, start + size)
        begin += count * size


def num_bytes(manifest: Mapping[str, Any]) -> int:
    return sum(int(facts["bytes"]) for facts in manifest["files"].values())


def tensors(manifest: Mapping[str, Any], kind: Kind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns name -> (shape, dtype)."""
    specs = manifest["tensors"].get(kind, {})
    return {name: (tuple(spec["shape"]), shards.dtype_of(spec["dtype"])) for name, spec in specs.items()}


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
