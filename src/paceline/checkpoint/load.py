"""Reads checkpoints: finds the newest complete one, verifies it, and returns any slices, whoever wrote them.

If all ranks see the folder, they share the verification and each reads what it needs. Otherwise rank 0 reads and
broadcasts, so hosts without a shared disk can resume, too.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch

from paceline.base.errors import PacelineError, RunError, UserError
from paceline.base.ownership import Slice
from paceline.checkpoint import manifest as mf
from paceline.checkpoint import shards
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.shards import Progress
from paceline.checkpoint.steps import folder_name, list_steps, require_step
from paceline.world.cores import free_memory
from paceline.world.group import DistributedGroup, Group, LocalGroup, from_rank_0

T = TypeVar("T")
Whole = tuple[Path, dict[str, Any], list[str]]  # folder, manifest, what is wrong with newer ones
Wanted = Mapping[Slice, torch.dtype]
Verified = dict[str, shards.Data]  # the bytes of files, by name

_MAX_TRIES = 20
_OF_FREE_MEMORY = 4  # ranks together keep at most this part of it in verified bytes
_TOO_FAST = "checkpoints in {} are replaced faster than they can be read; try again"
_ROUND_S = 0.5  # how often reading ranks tell each other whether they have finished


class NothingSaved(UserError):
    """There has never been a checkpoint here: nothing is lost, and there is nothing to resume from."""


def find(
    checkpoints: Path,
    step: int | None = None,
    progress: Progress = lambda: None,
    kinds: Sequence[Kind] = mf.KINDS,
    verified: Verified | None = None,
) -> Whole:
    """Returns what `agree` does, in a single process."""
    try:
        return agree(LocalGroup(torch.device("cpu")), checkpoints, step, True, progress, kinds, verified)
    except PacelineError as error:
        error.reach = "host" if isinstance(error, UserError) else "rank"
        raise


def agree(
    group: Group,
    checkpoints: Path,
    step: int | None,
    everyone_sees: bool,
    progress: Progress = lambda: None,
    kinds: Sequence[Kind] = mf.KINDS,
    verified: Verified | None = None,
) -> Whole:
    """Returns (folder, manifest, what is wrong with newer ones) of the newest good checkpoint, or of `step`, after
    reading every byte of its files of these kinds. Equal on all ranks. Collective.

    If `everyone_sees` the folder, ranks verify its files in parallel; else rank 0 does. This may take any time, but
    no rank waits longer for another than the disk needs for a few MB. verified: gets the bytes that this rank
    verifies, by file, for `receive`, as far as memory allows: with as many ranks as have saved, each reads its part
    once. Raises on all ranks UserError if `step` is absent, NothingSaved if there never was a checkpoint, RunError
    with the list if none is good: a resume never starts over.
    """
    for _ in range(_MAX_TRIES):
        names = from_rank_0(group, lambda: [folder.name for folder in _candidates(checkpoints, step)])
        problems: list[str] = []
        for folder in [checkpoints / name for name in names]:
            manifest, damage = from_rank_0(group, partial(_manifest_or_damage, folder))
            if verified is not None:
                verified.clear()
            damage = damage or _first_damage(group, folder, manifest, everyone_sees, progress, kinds, verified)
            if not damage:
                return folder, manifest, problems
            if from_rank_0(group, folder.exists):  # else a running job has just pruned it, and there is a newer one
                problems.append(damage)
        if len(problems) == len(names):
            from_rank_0(group, lambda: _refuse(checkpoints, step, problems))  # noqa: B023
    raise RunError(_TOO_FAST.format(checkpoints))


def receive(
    group: Group,
    folder: Path,
    manifest: Mapping[str, Any],
    kind: Kind,
    wanted: Wanted,
    everyone_sees: bool,
    progress: Progress = lambda: None,
    verified: Mapping[str, shards.Data] = MappingProxyType({}),
) -> dict[Slice, torch.Tensor]:
    """Returns the elements of a verified checkpoint that this rank wants, flat, on the CPU. Collective.

    If `everyone_sees` the folder, each rank reads only its own. Else rank 0 reads and broadcasts tensor by tensor,
    which sends the bytes of this kind. May take any time, as `agree`. Raises ValueError on all ranks, naming the first
    tensor that the checkpoint lacks or has in another dtype; nothing is cast.
    """
    if problem := next(filter(None, group.share_text(_misfit(manifest, kind, wanted))), ""):
        raise ValueError(problem)
    if everyone_sees:
        return in_rounds(group, progress, partial(_read, folder, manifest, kind, wanted, verified))
    device = group.device if isinstance(group, DistributedGroup) else torch.device("cpu")
    flats = {item: torch.empty(item.num_elements, dtype=dtype) for item, dtype in wanted.items()}
    for name, (shape, dtype) in mf.tensors(manifest, kind).items():
        full = Slice(name, 0, math.prod(shape))
        read_here = {full: dtype} if group.rank == 0 else {}
        read = in_rounds(group, progress, partial(_read, folder, manifest, kind, read_here, verified))
        tensor = read[full].to(device) if read_here else torch.empty(full.num_elements, dtype=dtype, device=device)
        group.broadcast(tensor)
        progress()
        for item in wanted:
            if item.name == name:
                flats[item].copy_(tensor[item.start : item.stop])
    return flats


def read_weights(
    checkpoints: Path, step: int | None = None, progress: Progress = lambda: None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the complete weights of the newest good checkpoint, or of `step`, on the CPU, and what is wrong with
    newer ones. Raises as `find`."""
    verified: Verified = {}
    folder, manifest, problems = find(checkpoints, step, progress, ("weights",), verified)
    specs = mf.tensors(manifest, "weights")
    items = {Slice(name, 0, math.prod(shape)): dtype for name, (shape, dtype) in specs.items()}
    try:
        flats = _read(folder, manifest, "weights", items, verified, progress)
    except FileNotFoundError:
        raise RunError(_TOO_FAST.format(checkpoints)) from None
    return {item.name: flat.view(specs[item.name][0]) for item, flat in flats.items()}, problems


def _misfit(manifest: Mapping[str, Any], kind: Kind, wanted: Wanted) -> str:
    specs = mf.tensors(manifest, kind)
    for item, dtype in wanted.items():
        if item.name not in specs:
            return f"the checkpoint has no {item.name}"
        shape, stored_dtype = specs[item.name]
        if item.stop > math.prod(shape):
            return f"{item.name} is {list(shape)} in the checkpoint, which has no element {item.stop - 1}"
        if stored_dtype != dtype:
            return f"{item.name} is {stored_dtype} in the checkpoint and {dtype} here"
    return ""


def _read(
    folder: Path,
    manifest: Mapping[str, Any],
    kind: Kind,
    wanted: Wanted,
    verified: Mapping[str, shards.Data],
    progress: Progress,
) -> dict[Slice, torch.Tensor]:
    flats = {item: torch.empty(item.num_elements, dtype=dtype) for item, dtype in wanted.items()}
    by_file: dict[str, list[shards.Place]] = {}
    for item, flat in flats.items():
        for file, stored in mf.stored(manifest, kind, item):
            part = stored.overlap(item)
            assert part is not None
            by_file.setdefault(file, []).append((stored, part, flat[part.start - item.start : part.stop - item.start]))
    shapes = {name: shape for name, (shape, _) in mf.tensors(manifest, kind).items()}
    for file, places in by_file.items():
        shards.read(folder / file, places, shapes, progress, verified.get(file))
    return flats


def in_rounds(group: Group, progress: Progress, work: Callable[[Progress], T]) -> T:
    """Returns the result of `work(progress)` when all ranks have finished theirs. Collective. Ranks meet twice a second
    meanwhile: waiting for a slow disk must not exceed the group's timeout, which is for ranks that hang."""
    met_s = time.monotonic()

    def have_all_finished(is_finished: bool) -> bool:
        return all(row == [1] for row in group.share_integers([int(is_finished)]))

    def on_progress() -> None:
        nonlocal met_s
        progress()
        if time.monotonic() - met_s > _ROUND_S:
            have_all_finished(False)
            met_s = time.monotonic()

    result = work(on_progress)
    while not have_all_finished(True):
        progress()
    return result


def from_rank_0_in_rounds(group: Group, progress: Progress, work: Callable[[Progress], T]) -> T:
    """Returns what `from_rank_0` does of `work(progress)`, which may take any time, as with `in_rounds`. Collective."""
    ended: Future[T] = Future()

    def attempt(on_progress: Progress) -> None:
        try:
            ended.set_result(work(on_progress))
        except PacelineError as error:
            if error.is_consequence:
                raise  # no collective is possible any more
            ended.set_exception(error)

    in_rounds(group, progress, attempt if group.rank == 0 else lambda _: None)
    return from_rank_0(group, ended.result)


def _candidates(checkpoints: Path, step: int | None) -> list[Path]:
    steps = require_step(checkpoints, step)
    if not steps and (checkpoints / "latest").exists():
        raise RunError(f"checkpoints have been in {checkpoints}, and none is there now; nothing was changed")
    if not steps:
        raise NothingSaved(
            f"{checkpoints} holds no checkpoint yet, so there is nothing to resume from; "
            "start again with `paceline train` and another --out, or wait for the first save"
        )
    return [checkpoints / folder_name(number) for number in reversed(steps)]


def _refuse(checkpoints: Path, step: int | None, problems: Sequence[str]) -> NoReturn:
    if step is None:
        raise RunError(f"no checkpoint in {checkpoints} is complete, nothing was changed:\n  " + "\n  ".join(problems))
    others = ", ".join(str(number) for number in list_steps(checkpoints) if number != step)
    way_out = f"leave --step out for the newest complete one, or give another by --step: there are {others}"
    raise RunError(
        f"the checkpoint of step {step} in {checkpoints} is damaged, nothing was changed: {'; '.join(problems)}; "
        + (way_out if others else "there is no other one")
    )


def _manifest_or_damage(folder: Path) -> tuple[dict[str, Any], str]:
    try:
        return mf.read_manifest(folder), ""
    except mf.Damaged as damage:
        return {}, str(damage)


def _first_damage(
    group: Group,
    folder: Path,
    manifest: Mapping[str, Any],
    everyone_sees: bool,
    progress: Progress,
    kinds: Sequence[Kind],
    verified: Verified | None,
) -> str:
    """Reads every byte of a checkpoint's files of these kinds; returns the first damage, equal on all ranks; empty: all
    are good. Collective."""
    names = sorted(name for name in manifest["files"] if name.partition("-")[0] in kinds)
    # The rank that reads a file verifies it, if as many ranks have saved, each its own part.
    owners = [int(name.split("-")[1]) % group.size if everyone_sees else 0 for name in names]
    names_here = [name for name, owner in zip(names, owners, strict=True) if owner == group.rank]

    def verify(on_progress: Progress) -> str:
        try:
            for name in names_here:
                # One rank that resumes what many have saved would need memory for all of it.
                fits = manifest["files"][name]["bytes"] <= free_memory() / _OF_FREE_MEMORY / group.size
                mf.verify(folder, name, manifest, on_progress, verified if fits else None)
        except mf.Damaged as found:
            return str(found)
        return ""

    return next(filter(None, group.share_text(in_rounds(group, progress, verify))), "")
