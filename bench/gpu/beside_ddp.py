"""Trains the same small network with torch's DistributedDataParallel and with paceline, on the same batches, and prints
how far apart their losses are. Under torchrun: `torchrun --nproc-per-node 2 bench/gpu/beside_ddp.py cpu`."""

import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import ParallelConfig, World

STEPS, ROWS, WIDTH = 40, 16, 256  # rows of a rank


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, WIDTH)
    return nn.Sequential(*layers).to(device)


def batches(world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's rows of each step's inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(2, ROWS * world.world_size, WIDTH, generator=generator).to(world.device)
        yield x.chunk(world.world_size)[world.rank], y.chunk(world.world_size)[world.rank]


def by_torch(world: World) -> list[float]:
    model = DistributedDataParallel(network(world.device))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for x, y in batches(world):
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(world.mean(loss.item()))
    return losses


def by_paceline(world: World) -> list[float]:
    model = network(world.device)
    replica = paceline.Replica(model, torch.optim.AdamW(model.parameters(), lr=1e-3), world)
    return [float(replica.train(batch, lambda x, y: mse_loss(model(x), y)).loss) for batch in batches(world)]


with paceline.join(ParallelConfig(device=sys.argv[1])) as world:
    torchs, ours = by_torch(world), by_paceline(world)
    result = {
        "difference": max(abs(a - b) for a, b in zip(ours, torchs, strict=True)),
        "last_loss": ours[-1],
        "backend": dist.get_backend(),
    }
    world.say(json.dumps(result))
