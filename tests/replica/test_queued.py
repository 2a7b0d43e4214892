"""A GPU skips an update by itself, and the host learns of it afterwards: the same updates as where the host decides."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import make_optimizers
from paceline.replica.replica import Replica
from paceline.sync.replicas import digests
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.runtime import open_world

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8)


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_a_device_that_skips_by_itself_makes_the_updates_of_a_host_that_decides(strategy: Any) -> None:
    assert _trained(strategy, is_queued=True) == _trained(strategy, is_queued=False)


def _trained(strategy: Any, is_queued: bool) -> str:
    """Losses, norms, skips and digests of weights and state after each of five steps; the gradient of the third is not
    finite, nor that of the first, before there is any state."""
    found: list[Any] = []
    with open_world(ParallelConfig(device="cpu"), detect({})) as world:
        model = build(SMALL, 1, "cpu")
        config = replace(OptimConfig(), name="muon")
        optimizers = make_optimizers(
            config, list(model.named_parameters()), lr=0.05, weight_decay=0.1, compute_dtype=torch.float32
        )
        mine = Replica(model, optimizers, world, strategy=strategy)
        world.group.is_queued = is_queued  # after zero has made its buckets, which are padded for NCCL
        for step in range(5):
            tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
            one = mine.step(tokens, total=32.0)
            factor = math.inf if step in (0, 2) else 1.0
            one.backward(model(tokens, tokens) * factor, weight=32, is_sum=True)
            result = one.finish(max_norm=0.5)
            states = [each for optimizer in optimizers for each in optimizer.state.values()]
            state = {f"{i} {key}": value for i, each in enumerate(states) for key, value in each.items()}
            weights_and_state = digests(mine.state_dict() | (state if step else {}))
            counts = [group.get("step") for group in mine.param_groups()]
            found.append((result.grad_norm, result.loss, result.skipped, counts, weights_and_state))
    return repr(found)
