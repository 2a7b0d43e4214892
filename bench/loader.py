"""B=8, T=1024, uint16: the loader's tokens/s against nanoGPT's own `get_batch`; a rank's costs in worlds of 1 to 1024.

nanoGPT's function is taken from a checkout of its own (`--checkout`): it stands in the body of its train.py, which can
not be imported, so its source is cut out and executed as it is. Both sides read one and the same train.bin, a batch at
a time in one thread, without prefetching, and in turn, so that a machine whose speed drifts is fair to both.
"""

import argparse
import ast
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich.table
import torch
from side import show, show_header

from paceline.data.loader import Loader
from paceline.data.mixture import Blend, Sequences
from paceline.data.plan import BatchPlan
from paceline.record.console import Console, table

BATCH, SEQ_LEN, VOCAB = 8, 1024, 50257
WORLDS = (1, 8, 64, 1024)
_ROUNDS = 7  # worlds take turns in each, since a machine's speed may drift
_SEED = 1337
_DRAWN_SEQUENCES = 2048  # least number for the wrapper, which reads 1000 times as much in a world of 1024


def nanogpt_get_batch(checkout: Path, folder: Path) -> Callable[[], Any]:
    """Returns nanoGPT's function, with the globals that its script gives it."""
    source = (checkout / "train.py").read_text()
    (function,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "get_batch"
    ]
    script: dict[str, Any] = {
        **{"os": os, "np": np, "torch": torch, "data_dir": str(folder)},
        **{"block_size": SEQ_LEN, "batch_size": BATCH, "device_type": "cpu", "device": "cpu"},
    }
    exec(compile(ast.Module([function], []), str(checkout / "train.py"), "exec"), script)
    return lambda: script["get_batch"]("train")


def us_a_batch(make: Callable[[], Any], batches: int) -> float:
    began = time.perf_counter()
    for _ in range(batches):
        make()
    return 1e6 * (time.perf_counter() - began) / batches


def paceline_batches(blend: Blend, cache: Path) -> Callable[[], Any]:
    loader = Loader(blend.training(SEQ_LEN, cache=cache), BatchPlan(BATCH, BATCH, 1), 0, 1337)
    steps = iter(range(1 << 62))
    return lambda: loader.micro_batches(next(steps))


def compare(checkout: Path, folder: Path, blend: Blend, rounds: int, batches: int) -> None:
    sides = {"nanoGPT get_batch": nanogpt_get_batch(checkout, folder), "paceline": paceline_batches(blend, folder)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for make in sides.values():
        us_a_batch(make, batches)
    for _ in range(rounds):
        for name, make in sides.items():
            times[name].append(us_a_batch(make, batches))
    show_header()
    for name, values in times.items():
        show(f"{name}, a batch", values, "us")
        show("", [BATCH * SEQ_LEN / us for us in values], "M tokens/s")
    nanogpt, ours = times.values()
    show("times nanoGPT's tokens/s", [a / b for a, b in zip(nanogpt, ours, strict=True)], "x")


# ---- worlds of several sizes ----


@dataclass(frozen=True)
class WorldCost:
    """The cost of a sequence on one rank of a world; every rank has equally many a step in every world."""

    world_size: int
    cpu_us_per_sequence: float
    bytes_per_sequence: float
    drawn_cpu_us_per_sequence: float  # the wrapper that draws all sequences of a step and keeps its own
    drawn_bytes_per_sequence: float


def measure_worlds(blend: Blend, sequences: Sequences, batch: int, steps: int = 500) -> list[WorldCost]:
    """Returns costs of micro-batches of `batch` sequences, one a rank and step. Ranks of larger worlds are simulated: a
    loader takes rank and world size as integers. For comparison a wrapper draws the sequences of all ranks and keeps
    its own, as one must with a loader without ranks."""
    loaders = [Loader(sequences, BatchPlan(batch * size, batch, size), size // 2, _SEED) for size in WORLDS]
    by_world: list[list[tuple[float, float]]] = [[] for _ in loaders]
    for _ in range(_ROUNDS + 1):
        for costs, loader in zip(by_world, loaders, strict=True):
            costs.append(_cost(blend, loader, steps, batch))
    rows = []
    for size, loader, costs in zip(WORLDS, loaders, by_world, strict=True):
        cpu_us, num_bytes = (statistics.median(values) for values in zip(*costs[1:], strict=True))
        everything = Loader(sequences, BatchPlan(batch * size, batch, 1), 0, _SEED)
        drawn = _cost(blend, everything, max(1, _DRAWN_SEQUENCES // (batch * size)), batch, keep=loader.rank)
        rows.append(WorldCost(size, cpu_us, num_bytes, *drawn))
    return rows


def _cost(blend: Blend, loader: Loader, steps: int, batch: int, keep: int = 0) -> tuple[float, float]:
    """Returns CPU microseconds and bytes read, for each sequence that is kept: one micro-batch a step."""
    bytes_before, cpu_before = _bytes_read(blend), time.process_time()
    for step in range(steps):
        _ = loader.micro_batches(step)[keep]
    cpu_s = time.process_time() - cpu_before
    return 1e6 * cpu_s / (steps * batch), (_bytes_read(blend) - bytes_before) / (steps * batch)


def _bytes_read(blend: Blend) -> int:
    return sum(dataset.train.bytes_read for dataset in blend.datasets)


def worlds_table(worlds: list[WorldCost]) -> rich.table.Table:
    columns = ["world size", "CPU us a sequence", "bytes", "drawing all: CPU us", "bytes"]
    rows = [
        [
            f"{row.world_size}",
            f"{row.cpu_us_per_sequence:.2f}",
            f"{row.bytes_per_sequence:.0f}",
            f"{row.drawn_cpu_us_per_sequence:.1f}",
            f"{row.drawn_bytes_per_sequence:.0f}",
        ]
        for row in worlds
    ]
    return table("What a sequence costs its rank, and a wrapper that draws all and keeps its own", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=2000, help="in a round")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="in train.bin")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ids = np.random.default_rng(0).integers(0, VOCAB, options.tokens, dtype=np.uint16)
        ids.tofile(folder / "train.bin")
        ids[: 10 * SEQ_LEN].tofile(folder / "val.bin")
        blend = Blend.open([(folder, 1.0)], VOCAB)
        compare(options.checkout, folder, blend, options.rounds, options.batches)
        worlds = measure_worlds(blend, blend.training(SEQ_LEN, cache=folder), BATCH)
    Console(0).say(worlds_table(worlds))


if __name__ == "__main__":
    main()
