"""What a reader of docs/guide/your-model.md has after its first section: a world, a model, a replica, loaders; and
what its blocks name in passing."""

import sys  # noqa: F401
from collections.abc import Iterator
from itertools import islice  # noqa: F401

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

world = paceline.join()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
loader = DataLoader(dataset, batch_size=32, shuffle=True)
tests = DataLoader(dataset, batch_size=32)
easy, hard = DataLoader(dataset, batch_size=32), DataLoader(dataset, batch_size=16)
criterion, criterion_none = nn.MSELoss(), nn.MSELoss(reduction="none")
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)).to(world.device)
replica = paceline.Replica(model, torch.optim.AdamW(model.parameters(), lr=3e-4), world)

generator = nn.Linear(8, 4).to(world.device)

files = [f"part-{number}" for number in range(8)]
num_items = 6


def rows_of(name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from torch.utils.data.Subset(dataset, range(3 * files.index(name), 3 * files.index(name) + 3))


def stream() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from DataLoader(dataset, batch_size=16)


def prepare() -> str:
    return "prepared"
