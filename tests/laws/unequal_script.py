"""Trains small models on ranks whose processors round differently: `python unequal_script.py FOLDER`, by
test_unequal_processors.py."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.optim.muon import Muon
from paceline.sync.replicas import differences, overall

STEPS, SAVED = 12, 6
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "plain": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "muon": lambda model: [
        Muon([model[0].weight, model[2].weight], lr=0.01, decay=0.1, momentum=0.9, compute_dtype=torch.float32),
        torch.optim.SGD([model[0].bias, model[2].bias], lr=0.01, momentum=0.9),
    ],
}


def train(world: paceline.World, name: str, folder: str, begin: int) -> tuple[str, str]:
    """Makes the steps up to STEPS, from a restored checkpoint if `begin` is not 0. Returns digests of weights and of
    their average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    replica = paceline.Replica(model, OPTIMIZERS[name](model), world, dtype="float16" if name == "plain" else "float32")
    assert replica.strategy == "zero"
    kept = paceline.Checkpoints(f"{folder}-{name}", net=replica, average=average)
    if begin:
        assert kept.restore() == begin
    for step in range(begin, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + world.rank)
        x, y = torch.rand(8, 33, generator=generator), torch.rand(8, 7, generator=generator)
        replica.train((x, y), lambda x, y: nn.functional.mse_loss(model(x), y), max_norm=0.1)
        average.update_parameters(model)
        assert not differences(dict(model.named_parameters()), world.group), f"{name}: step {step}"
        if step + 1 == SAVED and not begin:
            average_otherwise = world.facts[0].instructions != world.facts[1].instructions
            assert bool(averages(world, average)) == average_otherwise, name
            kept.save()
            assert not averages(world, average)
    kept.finish()
    return overall(dict(model.named_parameters())), overall(dict(average.module.named_parameters()))


def averages(world: paceline.World, average: nn.Module) -> Iterable[object]:
    return differences(dict(average.named_parameters()), world.group)


with paceline.join(paceline.ParallelConfig(device="cpu", threads=1, timeout_s=30)) as world:
    for name in OPTIMIZERS:
        straight = train(world, name, sys.argv[1], 0)
        assert train(world, name, sys.argv[1], SAVED) == straight, f"{name}: resumed otherwise"
        print(name, straight[0])
    try:
        model = nn.Linear(2, 2)
        paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), world, strategy="ddp")
    except paceline.UserError as error:
        print(error)
