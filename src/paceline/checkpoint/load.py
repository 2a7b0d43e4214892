"""Reading a checkpoint: the newest whole one, verified before use, by slices, in whatever parts it was written.

Where all ranks see the folder they share the verifying and each reads what it needs. Else only rank 0's host needs it:
rank 0 reads and the others receive, so two machines without a shared disk resume like one.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import PacelineError, RunError, UserError
from paceline.base.ownership import Slice, deal
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import shards
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.shards import Piece
from paceline.checkpoint.steps import require_step
from paceline.world.group import DistributedGroup, Group

Found = tuple[Path, dict[str, Any], list[str]]  # folder, manifest, what was wrong with newer ones
Shapes = Mapping[str, tuple[int, ...]]

_MOST_TRIES = 20


class NothingSaved(UserError):
    """There has never been a checkpoint here: nothing is lost, and there is nothing to go on from."""


def find(checkpoints: Path, step: int | None = None) -> Found:
    """Returns (folder, manifest, what was wrong with newer ones) of the newest whole checkpoint, or of `step`.

    Reads every byte of it. Raises UserError where the named step is not there, NothingSaved where none ever was,
    RunError with the list where none is whole: a resume never starts over silently.
    """
    for _ in range(_MOST_TRIES):
        problems: list[str] = []
        candidates = _candidates(checkpoints, step)
        for folder in candidates:
            try:
                return folder, mf.read(folder), problems
            except mf.Damaged as damage:
                if folder.exists():  # else a run that goes on has just pruned it, and there is a newer one
                    problems.append(str(damage))
        if len(problems) == len(candidates):
            raise _none_whole(checkpoints, problems)
    raise _too_fast(checkpoints)


def agree(group: Group, checkpoints: Path, step: int | None, everyone_sees: bool) -> Found:
    """Returns what `find` does, the same on all ranks, or raises the same on all. Collective.

    Where `everyone_sees` the folder, a candidate's files are dealt out and verified in parallel; else by rank 0.
    """
    folders = _from_rank_0(group, lambda: [str(folder) for folder in _candidates(checkpoints, step)])
    problems: list[str] = []
    for folder in [checkpoints / Path(name).name for name in folders]:
        manifest, damage = _from_rank_0(group, lambda folder=folder: _manifest_or_damage(folder))
        if damage is None:
            damage = _first_damage(group, folder, manifest, everyone_sees)
        if damage is None:
            return folder, manifest, problems
        problems.append(damage)
    error = _none_whole(checkpoints, problems)
    error.reach = "world"
    raise error


def read_slices(
    folder: Path,
    manifest: Mapping[str, Any],
    kind: Kind,
    wanted: Iterable[Slice],
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
) -> dict[Slice, torch.Tensor]:
    """Returns the wanted elements of a verified checkpoint, flat, on the CPU; reads no others.

    `shapes` are those of all parameters, whole. Raises ValueError naming the first tensor that the checkpoint has not,
    has in another shape or dtype, or has and the model has not; nothing is cast.
    """
    items = list(wanted)
    if problem := misfit(manifest, kind, items, shapes, dtype):
        raise ValueError(problem)
    return _read(folder, mf.stored(manifest, kind), items, dtype)


def receive(
    group: Group,
    folder: Path,
    manifest: Mapping[str, Any],
    kind: Kind,
    wanted: Iterable[Slice],
    shapes: Shapes,
    everyone_sees: bool,
    dtype: torch.dtype = torch.float32,
) -> dict[Slice, torch.Tensor]:
    """Returns what `read_slices` does, on each rank what it wants. Collective.

    Where not `everyone_sees` the folder, rank 0 reads tensor by tensor and broadcasts each: costs the kind's bytes.
    Raises the first rank's ValueError on all.
    """
    items = list(wanted)
    misfits = group.share_text(misfit(manifest, kind, items, shapes, dtype) or "")
    if problem := next(filter(None, misfits), None):
        raise ValueError(problem)
    places = mf.stored(manifest, kind)
    if everyone_sees:
        return _read(folder, places, items, dtype)
    device = group.device if isinstance(group, DistributedGroup) else torch.device("cpu")
    found = {item: torch.empty(item.num_elements, dtype=dtype) for item in items}
    specs = mf.tensors(manifest, kind)
    for name, (shape, stored_dtype) in specs.items():
        if stored_dtype != dtype:
            continue
        whole = Slice(name, 0, math.prod(shape))
        if group.rank == 0:
            tensor = _read(folder, places, [whole], dtype)[whole].to(device)
        else:
            tensor = torch.empty(whole.num_elements, dtype=dtype, device=device)
        group.broadcast(tensor)
        for item in items:
            if item.name == name:
                found[item].copy_(tensor[item.start : item.stop])
    return found


def read_weights(checkpoints: Path, step: int | None = None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the weights of the newest whole checkpoint, or of `step`, in their shapes, on the CPU, and what was wrong
    with newer ones.

    For readers beside a run that goes on: it may prune the checkpoint while it is read, and then there is a newer one.
    Raises as `find` does.
    """
    for _ in range(_MOST_TRIES):
        folder, manifest, problems = find(checkpoints, step)
        with contextlib.suppress(FileNotFoundError):
            return _read_whole(folder, manifest), problems
    raise _too_fast(checkpoints)


def misfit(
    manifest: Mapping[str, Any], kind: Kind, wanted: Iterable[Slice], shapes: Shapes, dtype: torch.dtype
) -> str | None:
    """Returns what of the wanted tensors, or of the checkpoint's, does not fit the other; None where all does."""
    specs = mf.tensors(manifest, kind)
    for name in specs:
        try:
            mf.tensor_shape(kind, name, shapes)
        except ValueError:
            return f"the checkpoint has {name}, and the model has no such parameter"
    for name in dict.fromkeys(item.name for item in wanted):
        if name not in specs:
            return f"the checkpoint has no {name}"
        shape, found_dtype = specs[name]
        if shape != mf.tensor_shape(kind, name, shapes):
            return f"{name} is {list(shape)} there and {list(mf.tensor_shape(kind, name, shapes))} here"
        if found_dtype != dtype:
            return f"{name} is {found_dtype} there and {dtype} here"
    return None


def _read(
    folder: Path, places: Mapping[str, Sequence[tuple[str, Piece]]], items: Sequence[Slice], dtype: torch.dtype
) -> dict[Slice, torch.Tensor]:
    found = {item: torch.empty(item.num_elements, dtype=dtype) for item in items}
    by_file: dict[str, list[tuple[Piece, Slice, Slice]]] = {}
    for item in items:
        for file, piece in places[item.name]:
            if part := piece.item.overlap(item):
                by_file.setdefault(file, []).append((piece, part, item))
    for file, parts in by_file.items():
        with shards.open_regular(folder / file) as opened:
            reader = shards.Reader(opened, folder / file, [piece for piece, _, _ in parts])
            for piece, part, item in parts:
                reader.read(piece.item, part, found[item][part.start - item.start : part.stop - item.start])
    return found


def _read_whole(folder: Path, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    specs, places = mf.tensors(manifest, "weights"), mf.stored(manifest, "weights")
    found: dict[str, torch.Tensor] = {}
    for dtype in {dtype for _, dtype in specs.values()}:
        items = [Slice(name, 0, math.prod(shape)) for name, (shape, own) in specs.items() if own == dtype]
        for item, tensor in _read(folder, places, items, dtype).items():
            found[item.name] = tensor.view(specs[item.name][0])
    return {name: found[name] for name in specs}


def _candidates(checkpoints: Path, step: int | None) -> list[Path]:
    """The folders to try, the newest first. Raises where there is none."""
    steps = require_step(checkpoints, step)
    if not steps and (checkpoints / "latest").exists():
        raise RunError(f"checkpoints have been in {checkpoints}, and none is there now; nothing was changed")
    if not steps:
        raise NothingSaved(
            f"{checkpoints} holds no checkpoint yet, so there is nothing to go on from; "
            "start again with `paceline train` and another --out, or wait for the first save"
        )
    return [checkpoints / mf.folder_name(number) for number in reversed(steps)]


def _none_whole(checkpoints: Path, problems: Sequence[str]) -> RunError:
    return RunError(f"no checkpoint in {checkpoints} is whole, nothing was changed:\n  " + "\n  ".join(problems))


def _too_fast(checkpoints: Path) -> RunError:
    return RunError(f"checkpoints in {checkpoints} come and go faster than they can be read; try again")


def _from_rank_0(group: Group, answer: Any) -> Any:
    """What the call returns on rank 0, on all ranks; the error that it raises there, too. Collective."""
    told: dict[str, Any] = {}
    if group.rank == 0:
        try:
            told = {"answer": answer()}
        except PacelineError as error:
            told = {"error": str(error), "kind": type(error).__name__}
    told = group.broadcast_json(told)
    if "error" in told:
        kinds = {kind.__name__: kind for kind in (UserError, RunError, NothingSaved)}
        raise kinds[told["kind"]](told["error"], reach="world")
    return told["answer"]


def _manifest_or_damage(folder: Path) -> tuple[dict[str, Any], str | None]:
    try:
        return mf.read_manifest(folder), None
    except mf.Damaged as damage:
        return {}, str(damage)


def _first_damage(group: Group, folder: Path, manifest: Mapping[str, Any], everyone_sees: bool) -> str | None:
    """Looks at every byte of a checkpoint's files; the same on all ranks. Collective."""
    names = sorted(manifest["files"])
    sizes = [manifest["files"][name]["bytes"] for name in names]
    owners = deal(sizes, group.size) if everyone_sees else [0] * len(names)
    damage = ""
    for name, owner in zip(names, owners, strict=True):
        if owner == group.rank and not damage:
            try:
                mf.verify(folder, name, manifest)
            except mf.Damaged as found:
                damage = str(found)
    return next(filter(None, group.share_text(damage)), None)
