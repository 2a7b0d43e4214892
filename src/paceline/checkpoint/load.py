"""Reading a checkpoint: the newest whole one, verified before use; rank 0 reads and the others receive.

Only rank 0's host needs the run folder, so two machines without a shared disk resume like one.
"""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.base.errors import RunError, UserError
from paceline.checkpoint import manifest as mf
from paceline.world.group import Group

_MOST_TRIES = 20


def find(checkpoints: Path, step: int | None = None) -> tuple[Path, dict[str, Any], list[str]]:
    """Returns (folder, manifest, what was wrong with newer ones) of the newest whole checkpoint, or of `step`.

    Raises UserError where the named step is not there, RunError with the list where none is whole: a resume never
    starts over silently.
    """
    steps = mf.list_steps(checkpoints)
    if step is not None and step not in steps:
        raise UserError(f"{checkpoints} has no checkpoint of step {step}; it has {steps or 'none'}")
    problems: list[str] = []
    for candidate in [step] if step is not None else reversed(steps):
        folder = checkpoints / mf.folder_name(candidate)
        try:
            return folder, mf.read(folder), problems
        except mf.Damaged as damage:
            if folder.exists():  # else a run that goes on has just pruned it
                problems.append(str(damage))
    if not problems:
        raise UserError(
            f"{checkpoints} holds no checkpoint yet, so there is nothing to go on from; "
            "start again with `paceline train` and another --out, or wait for the first save"
        )
    raise RunError(f"no checkpoint in {checkpoints} is whole, nothing was changed:\n  " + "\n  ".join(problems))


def read_tensors(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of one file of a verified checkpoint, on the CPU."""
    return safetensors.torch.load_file(folder / name)


def read_live(checkpoints: Path, step: int | None, name: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the tensors of one file of the newest whole checkpoint, and what was wrong with newer ones.

    For readers beside a run that goes on: it may prune the checkpoint while it is read, and then there is a newer one.
    """
    for _ in range(_MOST_TRIES):
        folder, _, problems = find(checkpoints, step)
        try:
            return read_tensors(folder, name), problems
        except FileNotFoundError:
            continue
    raise RunError(f"checkpoints in {checkpoints} come and go faster than they can be read; try again")


def agree(group: Group, checkpoints: Path, step: int | None) -> tuple[Path, dict[str, Any], list[str]]:
    """`find` on rank 0, told to all ranks; what it raises there, every rank raises. Collective."""
    answer: dict[str, Any] = {}
    if group.rank == 0:
        try:
            folder, manifest, problems = find(checkpoints, step)
            answer = {"folder": str(folder), "manifest": manifest, "problems": problems}
        except (UserError, RunError) as error:
            answer = {"error": str(error), "user": isinstance(error, UserError)}
    answer = group.broadcast_json(answer)
    if "error" in answer:
        raise (UserError if answer["user"] else RunError)(answer["error"], reach="world")
    return Path(answer["folder"]), answer["manifest"], answer["problems"]


def receive(group: Group, folder: Path, name: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns rank 0's tensors of one checkpoint file on every rank. Collective; costs the file's bytes."""
    tensors = read_tensors(folder, name) if group.rank == 0 else {}
    specs = group.broadcast_json([[k, list(t.shape), str(t.dtype)] for k, t in tensors.items()])
    received = {}
    for key, shape, dtype in specs:
        tensor = (
            tensors[key].to(device)
            if group.rank == 0
            else torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        )
        group.broadcast(tensor)
        received[key] = tensor
    return received
