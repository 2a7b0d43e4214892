"""A script that makes one replica after another keeps no more than the last one's memory."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.world.runtime import World

KINDS: list[dict[str, Any]] = [
    {"strategy": "naive"},
    {"strategy": "ddp"},
    {"strategy": "zero"},
    {"strategy": "zero", "wire": "int8"},
    {"strategy": "local", "sync_every": 2},
    {"strategy": "fsdp"},
]


def train_a_while(world: World, folder: Path, kind: dict[str, Any]) -> list["weakref.ref[Any]"]:
    """Returns weak references to what nobody needs then."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = paceline.Replica(model, optimizer, world, **kind)
    checkpoints = paceline.Checkpoints(folder, net=replica)
    checkpoints.restore()
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 1)), batch_size=8)
    for step in replica.steps(loader, epochs=1):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        step.finish(max_norm=1.0)
        checkpoints.save_every(2)
    replica.evaluate(loader, lambda x, y: nn.functional.mse_loss(model(x), y))
    return [weakref.ref(each) for each in (model, optimizer, replica, replica.sync, model[0].weight)]


def look_for_leaks(world: World, folder: Path) -> None:
    for number, kind in enumerate(KINDS):
        left = train_a_while(world, folder / str(number), kind)
        train_a_while(world, folder / str(number), kind)  # as a notebook's cell that runs again
        gc.collect()
        kept = [type(each()) for each in left if each() is not None]
        assert kept == [], kind


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_free_what_nobody_needs(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(look_for_leaks, num_ranks, tmp_path)
