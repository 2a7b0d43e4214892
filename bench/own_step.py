"""What a script pays for `paceline.Replica`: its step against the same step in torch's bare DistributedDataParallel.

Two ranks of one thread; a GPT of 12 million parameters, T=256, micro-batches of 4, float32, AdamW, clipping at 1. All
sides live in the same two processes, on the same process group, and take turns of a few steps each, in the order A B C
C B A, so that what else the machine does meets all. Every step is timed on rank 0; a turn's first one warms caches and
is left out. A round's ratio is that of the medians of its steps. The replica's step has in it what bare DDP does not
do: the loss and the weight of the whole batch, whether a gradient was finite, who wants to stop. The third side is DDP
with the loss averaged over ranks and read, as a script does that prints it.

All sides make the same updates from the same weights: how far these are apart at the end is printed, too.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from side import TWO_RANKS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build
from paceline.world.config import ParallelConfig

MICRO_BATCH, SEQ_LEN = 4, 256
SHAPE = ModelConfig(arch="gpt2", n_layer=6, n_head=6, n_embd=384, n_positions=SEQ_LEN, vocab_size=4096)
MAX_NORM = 1.0
SIDES = {
    "replica": "paceline.Replica",
    "ddp": "torch DistributedDataParallel",
    "ddp-loss": "torch DDP, loss of all ranks",
}

Step = Callable[[], object]
MicroBatch = tuple[torch.Tensor, torch.Tensor]


def make(world: paceline.World, num_micro_steps: int) -> tuple[GPT, torch.optim.Optimizer, list[MicroBatch]]:
    """Returns a model, its optimizer, and the micro-batches of this rank: ids and targets (4, 256)."""
    model = build(SHAPE, 1337, "cpu")
    generator = torch.Generator().manual_seed(world.rank)
    size = (num_micro_steps, MICRO_BATCH, SEQ_LEN + 1)
    ids = torch.randint(0, SHAPE.vocab_size, size, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return model, optimizer, [(micro[:, :-1], micro[:, 1:]) for micro in ids]


def replica_side(world: paceline.World, num_micro_steps: int) -> tuple[GPT, Step]:
    """As the guide has it."""
    model, optimizer, batch = make(world, num_micro_steps)
    replica = paceline.Replica(model, optimizer, world)

    def step() -> None:
        update = replica.step(paceline.Batch(batch))
        for ids, targets in update:
            update.backward(model(ids, targets) / targets.numel())
        update.finish(max_norm=MAX_NORM)

    return model, step


def ddp_side(world: paceline.World, num_micro_steps: int, reads_loss: bool = False) -> tuple[GPT, Step]:
    """As torch's tutorials have it, with the option that saves a copy of the gradients."""
    model, optimizer, batch = make(world, num_micro_steps)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step() -> None:
        losses = torch.zeros(())
        for number, (ids, targets) in enumerate(batch, start=1):
            ddp.require_backward_grad_sync = number == num_micro_steps
            loss = ddp(ids, targets) / targets.numel() / num_micro_steps
            loss.backward()
            losses += loss.detach()
        if reads_loss:
            dist.all_reduce(losses, dist.ReduceOp.AVG)
            losses.item()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


def turn(world: paceline.World, step: Step, num_steps: int) -> list[float]:
    """Returns the milliseconds of each step on this rank."""
    world.group.barrier()
    times = [time.perf_counter()]
    for _ in range(num_steps + 1):
        step()
        times.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(times[1:])]


def measure(world: paceline.World, num_micro_steps: int, rounds: int, num_steps: int) -> dict[str, list[list[float]]]:
    """Returns, by side, the step times of each round; says how far the weights are apart afterwards."""
    sides = {
        "replica": replica_side(world, num_micro_steps),
        "ddp": ddp_side(world, num_micro_steps),
        "ddp-loss": ddp_side(world, num_micro_steps, reads_loss=True),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        times: dict[str, list[float]] = {name: [] for name in sides}
        for name in (*sides, *reversed(sides)):
            times[name] += turn(world, sides[name][1], num_steps)
        for name in sides if number else ():  # the first round warms up
            found[name].append(times[name])
    models = [model for model, _ in sides.values()]
    apart = max(
        float((a - b).detach().abs().max())
        for other in models[1:]
        for a, b in zip(models[0].parameters(), other.parameters(), strict=True)
    )
    num_made = 2 * (rounds + 1) * (num_steps + 1)
    world.say(
        f"accumulation {num_micro_steps}: after {num_made} steps of each the weights are {apart:.1e} apart at most"
    )
    del sides, models
    gc.collect()  # a live DDP object and destroy_process_group() abort half of all exits
    return found


def show(times: dict[str, list[list[float]]]) -> None:
    """Prints the table of one accumulation."""
    print(f"  {'ms a step':<32} {'lower quartile':>14} {'median':>9} {'upper quartile':>14}")
    for name, label in SIDES.items():
        lower, middle, upper = statistics.quantiles([ms for row in times[name] for ms in row], n=4)
        print(f"  {label:<32} {lower:14.2f} {middle:9.2f} {upper:14.2f}")
    for name, label in [("ddp", "replica over DDP, per cent"), ("ddp-loss", "replica over DDP with its loss")]:
        pairs = zip(times["replica"], times[name], strict=True)
        ratios = [100 * (statistics.median(ours) / statistics.median(theirs) - 1) for ours, theirs in pairs]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        print(f"  {label:<32} {lower:+14.2f} {middle:+9.2f} {upper:+14.2f}   of {len(ratios)} rounds")
    sys.stdout.flush()


def be_a_rank(options: argparse.Namespace) -> None:
    """All sides on this rank; rank 0 prints."""
    world = paceline.join(ParallelConfig(device="cpu", threads=1, interface="lo"))
    for num_micro_steps in options.accumulation:
        times = measure(world, num_micro_steps, options.rounds, max(2, options.steps // num_micro_steps))
        if world.is_main:
            show(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="each has two turns of each side; at least 2")
    parser.add_argument("--steps", type=int, default=8, help="micro-steps in a turn, about")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4], help="micro-steps in a step")
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(options)
        return
    sys.exit(subprocess.run([*TWO_RANKS, __file__, *sys.argv[1:]]).returncode)


if __name__ == "__main__":
    main()
