"""Small checkpoints for tests: one writer or several, in one process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.base.ownership import Slice, cut
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.save import Outcome, Saver
from paceline.checkpoint.steps import MANIFEST, folder_name

WEIGHTS, OPTIMIZER = mf.file_name("weights", 0, 1), mf.file_name("optimizer", 0, 1)

Tensors = Mapping[str, torch.Tensor]


def weights(step: int) -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.full((3, 4), float(step)),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "s": torch.tensor(2.0),
    }


def read(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest after verifying every file. Raises Damaged."""
    manifest = mf.read_manifest(folder)
    for name in manifest["files"]:
        mf.verify(folder, name, manifest)
    return manifest


def keep(folder: Path, step: int, keep: int = 9, **facts: Any) -> Path:
    facts = {"progress": {"step": step, "tokens": 1234567}, "note": "Übergröße", **facts}
    return put(folder, step, weights(step), {"a.weight/momentum": torch.ones(3, 4) * step}, facts, keep)


def put(folder: Path, step: int, weights: Tensors, state: Tensors, facts: Mapping[str, Any], keep: int) -> Path:
    """Saves by one writer; raises what went wrong as OSError."""
    outcome = save_by(1, folder, step, weights, state, facts, CheckpointConfig(keep=keep))[0]
    if outcome.problem:
        raise OSError(outcome.problem)
    return folder / folder_name(step)


def save_by(
    num_writers: int,
    folder: Path,
    step: int,
    weights: Tensors,
    state: Tensors,
    facts: Mapping[str, Any],
    config: CheckpointConfig,
) -> list[Outcome]:
    """Saves by several writers at once, each with an equal share of the elements."""
    savers = [Saver(folder, config, writer, num_writers, token="t") for writer in range(num_writers)]
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    parts = zip(shares(weights, num_writers), shares(state, num_writers), strict=True)
    for saver, (mine, my_state) in zip(savers, parts, strict=True):
        saver.begin(step, {"weights": mine, "optimizer": my_state}, shapes, facts)
    return [ended(saver) for saver in savers]


def ended(saver: Saver) -> Outcome:
    saver.finish()
    outcome = saver.take_outcome()
    assert outcome is not None
    return outcome


def shares(tensors: Tensors, num_parts: int) -> list[dict[Slice, torch.Tensor]]:
    """The tensors' elements in equal parts, flat."""
    slices = [Slice(name, 0, tensor.numel()) for name, tensor in tensors.items()]
    return [
        {item: tensors[item.name].reshape(-1)[item.start : item.stop] for item in part}
        for part in cut(slices, num_parts)
    ]


def reseal(folder: Path, **changes: Any) -> None:
    """Changes a manifest as somebody would who knows how it is sealed."""
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_bytes(mf.seal({**content, **changes}))
