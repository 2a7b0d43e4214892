"""Your own model and loop, data-parallel, in the lines marked with an arrow.

    python examples/own_model.py
    torchrun --standalone --nproc-per-node 2 examples/own_model.py     # the same losses

The model is any torch module. What makes it data-parallel: the world is opened; each rank takes its own part of the
batch; the loss is divided by the size of the whole world's batch; gradients are summed between backward and update.
"""

import torch
from torch import nn

from paceline import BatchPlan, make_strategy, open_world  # <-
from paceline.sync.replicas import broadcast_parameters  # <-
from paceline.world.config import ParallelConfig  # <-
from paceline.world.env import detect  # <-

BATCH, MICRO_BATCH, STEPS = 24, 4, 20


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs (24, 16) and targets (24, 1) of a step: a noisy function that can be learned."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 16, generator=generator)
    return x, x[:, :4].prod(dim=1, keepdim=True) + 0.01 * torch.randn(BATCH, 1, generator=generator)


def main() -> None:
    config = ParallelConfig(device="cpu", strategy="ddp")  # <- "zero": each rank keeps its share of AdamW's state
    with open_world(config, detect()) as world:  # <- torchrun's environment, or one process
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        broadcast_parameters(model, world.group)  # <- all start as rank 0, whatever the seeds were
        sync = make_strategy(config, model, world.group)  # <-
        optimizer = torch.optim.AdamW(
            [piece.parameter for piece in sync.pieces()], lr=1e-2
        )  # <- what this rank updates
        mine = BatchPlan(BATCH, MICRO_BATCH, world.world_size).micro_batches(world.rank)  # <-
        for step in range(STEPS):
            x, y = batch_of(step)
            loss_sum = 0.0
            for i, places in enumerate(mine):
                rows = slice(places.start, places.stop)
                with sync.accumulate(last=i == len(mine) - 1):  # <- gradients travel behind the last backward
                    loss = (model(x[rows]) - y[rows]).square().sum() / BATCH  # <- of the whole world's batch
                    loss.backward()
                loss_sum += loss.item()
            sync.reduce()  # <- now the gradient of what this rank updates is the sum over ranks
            optimizer.step()
            sync.publish()  # <- and is let go of; what other ranks updated arrives here
            losses = world.group.share([loss_sum])  # <-
            if world.is_main:
                print(f"step {step + 1} loss {sum(row[0] for row in losses):.6f}")


if __name__ == "__main__":
    main()
