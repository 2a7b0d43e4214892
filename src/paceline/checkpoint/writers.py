"""Who writes a checkpoint: the ranks that see rank 0's folder, on its host or through a shared disk; or one process."""

import contextlib
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import UserError
from paceline.base.files import write_synced
from paceline.base.ownership import Slice
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.manifest import Kind
from paceline.checkpoint.save import Saver
from paceline.checkpoint.steps import folder_name
from paceline.world.group import Group, from_rank_0

_TOKEN = ".seen"  # rank 0 writes a random text into it; a rank that can read the text sees the same folder


def find_writers(group: Group, folder: Path) -> tuple[list[int], str]:
    """Returns the ranks that see rank 0's folder, which must exist, and a random token of this attempt. Collective.
    Raises UserError on all ranks if rank 0 cannot write to the folder, or cannot rename folders in it."""
    path = folder / _TOKEN

    def write_token() -> str:
        token = secrets.token_hex(8)
        try:
            write_synced(path, token.encode(), 0o600)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}") from None
        _require_renaming(folder)
        return token

    token = from_rank_0(group, write_token)
    sees = False
    with contextlib.suppress(OSError, ValueError):  # not there, or a file of another user
        sees = path.read_text() == token
    writers = [rank for rank, row in enumerate(group.share_integers([int(sees)])) if row[0]]
    if group.rank == 0:
        path.unlink()
    return writers, token


def _require_renaming(folder: Path) -> None:
    """Raises UserError if folders cannot be renamed, as on some mounted buckets: a checkpoint gets its name when it is
    complete, so none could ever be saved."""
    tried = folder / f"{_TOKEN}-folder"
    renamed = tried.with_name(f"{tried.name}-renamed")
    try:
        tried.mkdir(exist_ok=True)
        tried.rename(renamed)
    except OSError as error:
        raise UserError(
            f"folders in {folder} cannot be renamed: {error.strerror}. A checkpoint gets its name by that when it is "
            "complete: take a folder on another file system, and copy finished runs to this one"
        ) from None
    finally:
        for left in (tried, renamed):
            with contextlib.suppress(OSError):
                left.rmdir()


def save_complete(
    checkpoints: Path,
    step: int,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
) -> Path:
    """Saves complete tensors from one process; returns the checkpoint's folder, on the disk. Raises OSError."""
    saver = Saver(checkpoints, CheckpointConfig(keep=sys.maxsize), 0, 1, token="complete")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    kinds: dict[Kind, Mapping[str, torch.Tensor]] = {"weights": weights, "optimizer": optimizer}
    parts = {kind: {Slice(name, 0, t.numel()): t for name, t in part.items()} for kind, part in kinds.items()}
    saver.begin(step, parts, shapes, facts)
    saver.finish()
    if (outcome := saver.take_outcome()) is None or outcome.problem:
        raise OSError(outcome.problem if outcome else "it did not end")
    return checkpoints / folder_name(step)
