"""Blocks of all strategies share a few compiled graphs: torch gives up compiling after eight."""

from typing import Any

import pytest
import torch
from ranks import run_ranks

from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import make_optimizers
from paceline.replica.replica import Replica
from paceline.world.runtime import World

STRATEGIES: tuple[Any, ...] = ("ddp", "zero", "fsdp")
SIZES = (2, 2, 3, 4)  # sequences of a step's micro-batch
CONFIG = ModelConfig(n_layer=9, n_head=2, n_embd=16, vocab_size=32, n_positions=8)


def graphs(world: World) -> dict[str, list[int]]:
    """By strategy, how many graphs there are after each step; the second is followed by an evaluation."""
    from torch._dynamo.testing import CompileCounterWithBackend  # half a second, in ranks only

    found: dict[str, list[int]] = {}
    for strategy in STRATEGIES:
        torch._dynamo.reset()
        model, counter = build(CONFIG, 0, "cpu"), CompileCounterWithBackend("eager")
        for block in model.layers:
            block.compile(backend=counter)
        optimizers = make_optimizers(
            OptimConfig(), list(model.named_parameters()), lr=1e-3, weight_decay=0.1, compute_dtype=torch.float32
        )
        mine = Replica(model, optimizers, world, strategy=strategy, blocks=list(model.layers))
        found[strategy] = []
        for number, size in enumerate(SIZES):
            tokens = torch.zeros(size, 8, dtype=torch.int64)
            mine.train(tokens, lambda tokens: model(tokens, tokens) / tokens.numel())  # noqa: B023
            if number == 1:
                with torch.no_grad():
                    model.eval()(tokens, tokens)
                model.train()
            found[strategy].append(counter.frame_count)
    return found


@pytest.mark.long
def test_nine_blocks_of_every_strategy_share_a_few_graphs() -> None:
    for found in run_ranks(graphs, 2):
        assert found == {strategy: [1, 2, 3, 3] for strategy in STRATEGIES}  # training, evaluation, batches of any size
