"""Strategy local against its definition, written down again for one process; and what a run with it keeps."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program import TINY, digest, losses, one_message, rows, run, steps, val_loss
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.sync.replicas import overall
from paceline.world.runtime import World

NUM_STEPS, POISONED, MAX_NORM = 11, 6, 0.3
LOCAL = ("--parallel.strategy", "local", "--parallel.sync-every")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def inner(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.8)


def rows_of(step: int, rank: int) -> torch.Tensor:
    """What a rank sees in a step: none, or up to four rows; a row that is not a number on rank 0 in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = torch.randn((step + 3 * rank) % 5, 3, dtype=torch.float64, generator=generator)
    return found * math.nan if (step, rank) == (POISONED, 0) else found


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(x), x.sum(1, keepdim=True))


def trained(world: World, sync_every: int) -> dict[str, Any]:
    net = network()
    replica = Replica(net, inner(net), world, strategy="local", sync_every=sync_every)
    skipped, anchors = [], []
    for number in range(NUM_STEPS):
        x = rows_of(number, world.rank)
        step = replica.step(Batch([x] if len(x) else []))
        for micro_batch in step:
            step.backward(loss_of(net, micro_batch), weight=len(micro_batch))
        result = step.finish(max_norm=MAX_NORM)
        skipped += [number] if result.skipped else []
        anchors.append(overall(replica.state_dict()))
    own, shared = overall(dict(net.named_parameters())), overall(replica.state_dict())
    with replica.sync.shared_weights():
        assert overall(dict(net.named_parameters())) == shared != own
    before = flat(net)
    replica.merge()
    assert overall(dict(net.named_parameters())) == overall(replica.state_dict())
    return {"own": before, "skipped": skipped, "anchors": anchors, "merged": flat(net)}


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def reference(num_ranks: int, sync_every: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns each rank's own weights after the last step, and the average at the end: by the definition, one rank after
    the other, on flat vectors, without the strategy's code."""
    nets = [network() for _ in range(num_ranks)]
    optimizers = [inner(net) for net in nets]
    size = flat(nets[0]).numel()
    borders = [round(size * part / sync_every) for part in range(sync_every + 1)]
    weight = torch.zeros(sync_every, num_ranks, dtype=torch.float64)  # rows seen since the fragment's last exchange
    sent: list[torch.Tensor] = []

    def exchange(part: int, vectors: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        share = weight[part] / weight[part].sum() if weight[part].sum() else torch.full((num_ranks,), 1 / num_ranks)
        mean = sum(s * vector for s, vector in zip(share, sent, strict=True))
        for vector, before in zip(vectors, sent, strict=True):
            vector[borders[part] : borders[part + 1]] += mean - before
        weight[part] = 0

    for number in range(NUM_STEPS):
        batches = [rows_of(number, rank) for rank in range(num_ranks)]
        if number != POISONED:
            norms = []
            for net, optimizer, x in zip(nets, optimizers, batches, strict=True):
                optimizer.zero_grad()
                (loss_of(net, x) if len(x) else 0 * flat_sum(net)).backward()
                norms.append(sum(p.grad.square().sum() for p in net.parameters()))
            norm = (sum(norms) / num_ranks).sqrt()
            for net, optimizer in zip(nets, optimizers, strict=True):
                for parameter in net.parameters():
                    parameter.grad *= min(1.0, MAX_NORM / norm)
                optimizer.step()
        vectors = [flat(net) for net in nets]
        if sent:
            exchange(number % sync_every, vectors, sent)
        weight += torch.tensor([len(x) for x in batches])
        part = (number + 1) % sync_every
        sent = [vector[borders[part] : borders[part + 1]].clone() for vector in vectors]
        for net, vector in zip(nets, vectors, strict=True):
            nn.utils.vector_to_parameters(vector, net.parameters())
    own = [vector.clone() for vector in vectors]
    for part in range(sync_every):
        exchange(part, vectors, [vector[borders[part] : borders[part + 1]].clone() for vector in vectors])
    return own, vectors[0]


def flat_sum(net: nn.Module) -> torch.Tensor:
    return sum(parameter.sum() for parameter in net.parameters())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("sync_every", [1, 4])
def test_ranks_train_as_the_definition_says(num_ranks: int, sync_every: int) -> None:
    found = run_ranks(trained, num_ranks, sync_every)
    own, merged = reference(num_ranks, sync_every)
    assert [each["skipped"] for each in found] == [[POISONED]] * num_ranks, "all ranks skip the step"
    assert len({tuple(each["anchors"]) for each in found}) == 1, "the anchor has the same bits after every step"
    assert len(set(found[0]["anchors"])) > NUM_STEPS / 2
    for mine, wanted in zip(found, own, strict=True):
        torch.testing.assert_close(mine["own"], wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(mine["merged"], merged, rtol=0, atol=1e-12)
    assert all(torch.equal(each["merged"], found[0]["merged"]) for each in found)
    assert not torch.equal(found[0]["own"], found[1]["own"])
