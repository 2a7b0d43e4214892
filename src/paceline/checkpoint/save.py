"""Writing a checkpoint: beside, synced, read back, renamed in. A crash at any line leaves the older ones alone."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.base.files import replace, sync, write_synced
from paceline.checkpoint import manifest as mf


def save(
    checkpoints: Path,
    step: int,
    weights: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
    facts: dict[str, Any],
    keep: int,
) -> Path:
    """Returns the folder of the new checkpoint, complete and on disk; older ones beyond `keep` are gone after it.

    One process calls this (rank 0). Raises OSError where the disk fails or is full; then nothing has changed but an
    unfinished folder that the next save sweeps.
    """
    final = checkpoints / mf.folder_name(step)
    with contextlib.suppress(mf.Damaged):
        mf.read(final)
        # This very step is there and whole. `set_aside` has moved what another course of this run left, so it is the
        # checkpoint that was resumed from, and its state is the one to be saved.
        return final
    _sweep(checkpoints)
    aside = checkpoints / f".{final.name}.unfinished"
    aside.mkdir(parents=True)
    _write_tensors(aside / mf.WEIGHTS, weights)
    _write_tensors(aside / mf.OPTIMIZER, optimizer)
    content = {"format": mf.FORMAT, "step": step, **facts, "files": mf.describe(aside, [mf.WEIGHTS, mf.OPTIMIZER])}
    write_synced(aside / mf.MANIFEST, mf.seal(content))
    sync(aside)
    if final.exists():  # a damaged one of the same step
        shutil.rmtree(final)
    os.rename(aside, final)
    sync(checkpoints)
    replace(checkpoints / "latest", f"{final.name}\n".encode())
    _prune(checkpoints, keep)
    return final


def set_aside(checkpoints: Path, step: int) -> list[str]:
    """Renames the checkpoints of later steps to `superseded-NAME` and returns their names; `latest` names this step.

    For a run that goes on from an older checkpoint: what came after it belongs to another course of the run. It counts
    no longer and is not deleted.
    """
    later = [mf.folder_name(number) for number in mf.list_steps(checkpoints) if number > step]
    for name in later:
        target = checkpoints / f"superseded-{name}"
        if target.exists():
            shutil.rmtree(target)
        os.rename(checkpoints / name, target)
    if later:
        replace(checkpoints / "latest", f"{mf.folder_name(step)}\n".encode())
        sync(checkpoints)
    return later


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    host = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(host, path)
    except safetensors.SafetensorError as error:  # how it reports a full disk
        raise OSError(f"{path}: {error}") from error
    sync(path)


def _sweep(checkpoints: Path) -> None:
    for debris in checkpoints.glob(".step-*.unfinished"):
        shutil.rmtree(debris)


def _prune(checkpoints: Path, keep: int) -> None:
    folders = [checkpoints / mf.folder_name(step) for step in mf.list_steps(checkpoints)]
    whole = [folder for folder in folders if mf.is_whole(folder)]  # a damaged one must not push a whole one out
    for folder in whole[:-keep]:
        # The manifest first: a crash half-way through leaves a folder that counts as absent.
        (folder / mf.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
