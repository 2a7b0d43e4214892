"""The sharded optimizer: time, memory and bytes against `ddp` and against torch's DDP with ZeroRedundancyOptimizer.

Two ranks of one thread; 6 layers x 384 wide, T=256, micro-batches of 8, bfloat16. All sides live in the same two
processes and take turns, a few steps each a round, so that what else the machine does meets all of them. A turn's first
step warms caches and is left out; a turn ends when the weights of its last update have arrived. Bytes are those of the
loopback interface's counter, both ranks together, headers included; our ranks share no memory, as if they were on two
hosts. Run as root the bench has a network of its own (`unshare --net`), so that nobody else's bytes are in it.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import make_optimizers
from paceline.world.config import ParallelConfig
from paceline.world.device import choose_dtype
from paceline.world.env import detect
from paceline.world.runtime import World, open_world

MICRO_BATCH, SEQ_LEN, WORLD_SIZE = 8, 256, 2
SHAPE = ModelConfig(arch="gpt2", n_layer=6, n_head=6, n_embd=384, n_positions=SEQ_LEN, vocab_size=4096)
LR = 6e-4
LABELS = {
    "ddp": "ddp, AdamW",
    "zero": "zero, AdamW",
    "zero-waits": "zero, AdamW, publish waited for at once",
    "torch-ddp": "torch DDP, AdamW",
    "torch-zero": "torch DDP, ZeroRedundancyOptimizer(AdamW)",
    "ddp-muon": "ddp, Muon",
    "zero-muon": "zero, Muon",
}
RATIOS = [
    ("zero", "ddp"),
    ("zero", "zero-waits"),
    ("zero", "torch-zero"),
    ("zero", "torch-ddp"),
    ("torch-zero", "torch-ddp"),
    ("zero-muon", "ddp-muon"),
]


class Side:
    """One way to make a step: `step()` makes it, `wait()` returns when its weights have arrived."""

    def __init__(self, step: Callable[[], object], wait: Callable[[], None], state_bytes: Callable[[], int]):
        self.step, self.wait, self.state_bytes = step, wait, state_bytes


def model_and_data(world: World) -> tuple[GPT, torch.Tensor]:
    """Returns the model in the compute type that `paceline train` chooses here, and ids (8, 257), the rank's own."""
    model = build(SHAPE, 1337, "cpu")
    model.compute_dtype = choose_dtype("auto", world.device)[0]
    generator = torch.Generator().manual_seed(world.rank)
    return model, torch.randint(0, SHAPE.vocab_size, (MICRO_BATCH, SEQ_LEN + 1), generator=generator)


def our_side(world: World, name: str, num_micro_steps: int, bucket_mb: float) -> Side:
    """`ddp` or `zero`, with AdamW or Muon."""
    strategy, _, rest = name.partition("-")
    model, ids = model_and_data(world)
    optimizers = make_optimizers(
        OptimConfig(name="muon" if rest == "muon" else "adamw"),
        model.named_parameters(),
        lr=LR,
        weight_decay=0.1,
        compute_dtype=model.compute_dtype,
    )
    replica = paceline.Replica(
        model,
        optimizers,
        world,
        strategy=strategy,  # type: ignore[arg-type]
        blocks=list(model.layers),
        bucket_mb=bucket_mb,
        read_as=model.read_as(),
        rounded_gradients=model.rounded_gradients(),
    )
    batch = [ids.clone() for _ in range(num_micro_steps)]  # each in memory of its own, which a Batch checks
    replica.waits_at_once = False
    num_tokens = MICRO_BATCH * SEQ_LEN * num_micro_steps * world.world_size

    def step() -> None:
        update = replica.step(paceline.Batch(batch), total=num_tokens)
        for micro_batch in update:
            update.backward(model(micro_batch[:, :-1], micro_batch[:, 1:]), MICRO_BATCH * SEQ_LEN, is_sum=True)
        update.finish(max_norm=1.0)
        if rest == "waits":
            replica.sync.wait_for_params()

    def state_bytes() -> int:
        states = [state for optimizer in replica.optimizers for state in optimizer.state.values()]
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))

    return Side(step, replica.sync.wait_for_params, state_bytes)


def torch_side(world: World, name: str, num_micro_steps: int) -> Side:
    """DistributedDataParallel as its tutorial has it, the optimizer whole or sharded by torch."""
    model, ids = model_and_data(world)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settings: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    sharded = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **settings)
        if name == "torch-zero"
        else None
    )
    optimizer = sharded or torch.optim.AdamW(model.parameters(), **settings)
    num_tokens = MICRO_BATCH * SEQ_LEN * num_micro_steps  # DDP takes the mean over ranks

    def step() -> None:
        for i in range(num_micro_steps):
            ddp.require_backward_grad_sync = i == num_micro_steps - 1
            (ddp(ids[:, :-1], ids[:, 1:]) / num_tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def state_bytes() -> int:
        local = sharded.optim if sharded else optimizer
        tensors = [tensor for state in local.state.values() for tensor in state.values()]
        return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)

    return Side(step, lambda: None, state_bytes)


def sent_bytes() -> int:
    """Returns what has gone over the loopback interface so far; /sys would tell of the network it was mounted in."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def turn(world: World, side: Side, steps: int) -> tuple[float, float]:
    """Returns (seconds, bytes on the wire) a step, the same on all ranks up to the clock."""
    side.step()
    side.wait()
    world.group.barrier()
    started, sent = time.perf_counter(), sent_bytes()
    for _ in range(steps):
        side.step()
    side.wait()
    world.group.barrier()
    return (time.perf_counter() - started) / steps, (sent_bytes() - sent) / steps


def measure(world: World, options: argparse.Namespace, num_micro_steps: int, names: list[str]) -> dict[str, Any]:
    """Returns, by side: tokens/s and bytes of each turn, and the bytes of optimizer state on this rank."""
    sides = {
        name: torch_side(world, name, num_micro_steps)
        if name.startswith("torch")
        else our_side(world, name, num_micro_steps, options.bucket_mb)
        for name in names
    }
    steps = max(2, options.steps // num_micro_steps)
    rows: dict[str, Any] = {name: {"tokens_per_s": [], "wire_bytes": []} for name in names}
    for side in sides.values():
        turn(world, side, 1)
    for number in range(options.rounds):
        for name in names if number % 2 == 0 else names[::-1]:  # so that no side always follows the same one
            seconds, num_bytes = turn(world, sides[name], steps)
            rows[name]["tokens_per_s"].append(MICRO_BATCH * SEQ_LEN * num_micro_steps * WORLD_SIZE / seconds)
            rows[name]["wire_bytes"].append(num_bytes)
    for name, side in sides.items():
        rows[name]["state_bytes"] = [int(row[0]) for row in world.group.share([float(side.state_bytes())])]
    del sides
    gc.collect()  # a live DDP object and destroy_process_group() abort half of all exits
    return rows


def show(num_micro_steps: int, rows: dict[str, Any], weight_bytes: int) -> None:
    """Prints the table of one accumulation, and what the sides are to each other, turn by turn."""
    print(f"accumulation {num_micro_steps}; weights {weight_bytes / 2**20:.1f} MiB")
    print(f"  {'':<44} {'tokens/s':>9} {'min':>7} {'max':>7} {'MiB/step':>9} {'state MiB a rank':>18}")
    for name, row in rows.items():
        rates, wire = row["tokens_per_s"], statistics.median(row["wire_bytes"]) / 2**20
        state = ", ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in row["state_bytes"])
        speed = f"{statistics.median(rates):9.0f} {min(rates):7.0f} {max(rates):7.0f}"
        print(f"  {LABELS[name]:<44} {speed} {wire:9.1f} {state:>18}")
    for name, other in RATIOS:
        if name in rows and other in rows:
            pairs = zip(rows[name]["tokens_per_s"], rows[other]["tokens_per_s"], strict=True)
            ratios = sorted(100 * a / b for a, b in pairs)
            label = f"{name} of {other}, per cent"
            print(f"  {label:<44} {statistics.median(ratios):9.1f} {ratios[0]:7.1f} {ratios[-1]:7.1f}")


def be_a_rank(options: argparse.Namespace) -> None:
    """All sides on this rank; rank 0 prints."""
    config = ParallelConfig(device="cpu", threads=1, interface="lo", shared_memory=False)
    with open_world(config, detect()) as world:
        weight_bytes = sum(p.numel() * 4 for p in build(SHAPE, 0, "cpu").parameters())
        for num_micro_steps in options.accumulation:
            rows = measure(world, options, num_micro_steps, options.sides)
            if world.is_main:
                show(num_micro_steps, rows, weight_bytes)
                sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--steps", type=int, default=8, help="micro-steps in a turn, about")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4], help="micro-steps in a step")
    parser.add_argument("--sides", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--bucket-mb", type=float, default=ParallelConfig().bucket_mb)
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(options)
        return
    arguments = [str(Path(__file__).resolve()), *sys.argv[1:]]
    launcher = ["torch.distributed.run", "--nproc-per-node", str(WORLD_SIZE), "--master-addr", "127.0.0.1"]
    command = [sys.executable, "-m", *launcher, "--master-port", "29541", *arguments]
    if os.geteuid() == 0:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    else:
        print("not root: the bytes are those of everybody on this machine's loopback interface")
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
