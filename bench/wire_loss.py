"""What rounding on the wire does to the loss: the same tokens in the same order, by path, seed and optimizer.

    python bench/wire_loss.py --out wire_loss.jsonl --size small --seeds 5

Trains a GPT on the bytes of the embedded corpus, on two ranks, once for each (seed, optimizer, path), and appends a
line to --out after each; what is there already is not repeated, so it may be stopped and started again. Then it prints
the mean difference of the validation loss from `exact` over paired seeds, with a 95% interval (Student's t). A path is
called equal if the whole interval lies within 0.2%. `local8` and `local32` are another algorithm, with rounds of 8 and
32 steps. Two controls must not be equal: `ternary` sends weights and gradients as -1, 0, 1 without feedback, `late`
applies each gradient one step late.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from side import TWO_RANKS

import paceline
from paceline.data.sources import embedded
from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import make_optimizers
from paceline.replica.batch import Batch
from paceline.replica.replica import Replica
from paceline.sync.codec import Blocks
from paceline.world.config import ParallelConfig

PATHS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "int4": {"wire": "int4"},
    "local8": {"strategy": "local", "sync_every": 8},
    "local32": {"strategy": "local", "sync_every": 32},
    "ternary": {"wire": "int8"},
    "late": {},
}
SIZES = {  # layers, width, tokens of a sequence, sequences of a step, steps
    "tiny": (1, 64, 32, 4, 6),
    "small": (2, 128, 128, 16, 300),
    "demo": (4, 256, 128, 16, 100),
    "lesson": (6, 384, 128, 8, 96),
}
# At three times these rates two runs that differ by one rounding end 0.75% apart (standard deviation over seeds), at
# these 0.08%: only so five seeds can show a difference of 0.2%.
LEARNING_RATES = {"adamw": 1e-3, "muon": 3e-3}
LIMIT = 0.002  # of the loss
# Student's t: 97.5% of the distribution lie below, by degrees of freedom.
T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def corpus() -> torch.Tensor:
    """The embedded corpus, a token a byte."""
    return torch.frombuffer(
        bytearray(b"\n".join(Path(file.path).read_bytes() for file in embedded().files)), dtype=torch.uint8
    )


def make_late(replica: Replica) -> None:
    """Makes each update use the gradient of the step before."""
    make, before = replica.updates.make, [torch.zeros_like(part.parameter) for part in replica.updates.slices]

    def make_late(unused: Sequence[str], *parts: Any) -> None:
        for part, old in zip(replica.updates.slices, before, strict=True):
            assert part.parameter.grad is not None
            new = part.parameter.grad.clone()
            part.parameter.grad.copy_(old)
            old.copy_(new)
        make(unused, *parts)

    replica.updates.make = make_late  # type: ignore[method-assign]


def train(world: Any, data: torch.Tensor, size: str, optimizer: Any, path: str, seed: int) -> float:
    """Returns the validation loss at the end, in nats per byte, over the last 2% of the data."""
    layers, width, length, batch, num_steps = SIZES[size]
    shape: dict[str, Any] = {"n_layer": layers, "n_head": width // 64, "n_embd": width, "vocab_size": 256}
    model = build(
        ModelConfig(arch="llama" if optimizer == "muon" else "gpt2", n_positions=length, **shape), seed, "cpu"
    )
    model.compute_dtype = torch.bfloat16
    optim = OptimConfig(name=optimizer)
    made = make_optimizers(optim, model.named_parameters(), lr=1.0, weight_decay=0.1, compute_dtype=torch.bfloat16)
    replica = Replica(model, made, world, **{"strategy": "zero", "read_as": model.read_as()} | PATHS[path])
    if path == "ternary":
        for bucket in replica.sync.buckets:  # type: ignore[attr-defined]
            bucket.codec = bucket.change_codec = Blocks(2, bucket.codec.block)
    if path == "late":
        make_late(replica)
    held_out = len(data) // 50 // length * length
    generator = torch.Generator().manual_seed(seed)
    for number in range(num_steps):
        starts = torch.randint(len(data) - held_out - length - 1, (batch,), generator=generator)
        rows = torch.stack(
            [data[start : start + length + 1] for start in starts[world.rank :: world.world_size]]
        ).long()
        rate = LEARNING_RATES[optimizer] * min(1.0, (number + 1) / 20, 2 * (1 - number / num_steps))
        for group in replica.param_groups():
            group["lr"] = rate
        step = replica.step(Batch([rows]), total=float(batch * length))
        for tokens in step:
            loss = model(tokens[:, :-1], tokens[:, 1:])
            step.backward(loss, weight=tokens[:, 1:].numel(), is_sum=True)
        step.finish(max_norm=1.0)
    replica.merge()
    replica.wait_for_params()
    blocks = data[-held_out:][: 256 * length].view(-1, length).long()
    with torch.no_grad():
        total = float(model(blocks[:, :-1], blocks[:, 1:])) / blocks[:, 1:].numel()
    return total


def on_ranks(options: argparse.Namespace) -> None:
    world = paceline.join(ParallelConfig(device="cpu", threads=1))
    data, done = corpus(), {key(row) for row in rows_of(options.out)}
    for seed in range(options.seeds):
        for optimizer in options.optimizers:
            for path in options.paths:
                row = {"size": options.size, "optimizer": optimizer, "path": path, "seed": seed}
                if key(row) in done:
                    continue
                row["val_loss"] = train(world, data, options.size, optimizer, path, seed)
                if world.rank == 0:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(row, flush=True)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["size"], row["optimizer"], row["path"], row["seed"]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each size, optimizer and path: the paired difference from `exact`."""
    losses = {key(row): row["val_loss"] for row in rows}
    for size, optimizer, path in dict.fromkeys(name[:3] for name in losses):
        pairs = [
            (loss, losses[size, optimizer, "exact", name[3]])
            for name, loss in losses.items()
            if name[:3] == (size, optimizer, path) and (size, optimizer, "exact", name[3]) in losses
        ]
        if path == "exact" or not pairs:
            continue
        differences = [100 * (loss / exact - 1) for loss, exact in pairs]
        mean, n = statistics.fmean(differences), len(differences)
        line = f"{size:<8}{optimizer:<7}{path:<9}n={n}  exact {statistics.fmean(e for _, e in pairs):.4f}  {mean:+.3f}%"
        if n > 1:
            half = T.get(n - 1, 2.23) * statistics.stdev(differences) / math.sqrt(n)
            is_equal = max(abs(mean - half), abs(mean + half)) <= 100 * LIMIT
            line += f" +- {half:.3f}%  {'equal' if is_equal else 'not shown equal'}"
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--optimizers", nargs="+", choices=LEARNING_RATES, default=list(LEARNING_RATES))
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_ranks(options)
        return
    subprocess.run([*TWO_RANKS, __file__, *sys.argv[1:]], check=True)
    print("\n".join(table(rows_of(options.out))))


if __name__ == "__main__":
    main()
