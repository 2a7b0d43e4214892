"""Two nets train against each other: one makes points, the other tells them from points on a circle of eight spots.

python train.py
torchrun --standalone --nproc-per-node 2 train.py

Each net is a replica of its own, and one run holds both, so a killed one has them from the same step. The noise
is drawn for the whole batch and divided by rows: the losses are the same on any number of ranks.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

NOISE = 8  # numbers that a point is made from


def spots(num_points: int) -> torch.Tensor:
    """Returns points (num_points, 2), each near one of eight spots on a circle of radius 2."""
    chance = torch.Generator().manual_seed(0)
    angle = torch.randint(8, (num_points,), generator=chance) * (math.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.1 * torch.randn(num_points, 2, generator=chance)


def net(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, num_out)
    )


def told_apart(logits: torch.Tensor, real: float) -> torch.Tensor:
    """Returns the loss of saying so; real: 1 or 0."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=100, help="points, of all ranks together")
    parser.add_argument("--out", default="runs/gan")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    options = parser.parse_args()

    world = paceline.join()
    torch.manual_seed(0)
    generator, discriminator = net(NOISE, 2).to(world.device), net(2, 1).to(world.device)
    makes = paceline.Replica(generator, torch.optim.Adam(generator.parameters(), 1e-3, (0.5, 0.99)), world)
    tells = paceline.Replica(discriminator, torch.optim.Adam(discriminator.parameters(), 1e-3, (0.5, 0.99)), world)
    run = paceline.Run(options.out, config=vars(options), tells=tells, makes=makes)  # rows are of the first

    loader = DataLoader(TensorDataset(spots(10_000)), options.batch_size, shuffle=True)
    for step in run.steps(loader, max_steps=options.steps):
        noises = []
        for (points,) in step:
            noises.append(step.draw(torch.randn, NOISE))
            made = generator(noises[-1]).detach()
            step.backward(told_apart(discriminator(points), 1.0) + told_apart(discriminator(made), 0.0))
        told = step.finish()

        update = makes.step(paceline.Batch(noises))  # a batch of its own: what the generator learns from
        for noise in update:
            update.backward(told_apart(discriminator(generator(noise)), 1.0), weight=len(noise))
        fooled = update.finish()
        run.log(generator_loss=fooled.loss)
        if step.number % 10 == 0:
            world.say(f"step {step.number} discriminator {told.loss:.6f} generator {fooled.loss:.6f}")
        run.save_every(options.save_every)


if __name__ == "__main__":
    main()
