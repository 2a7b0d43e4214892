"""B=8, T=1024, uint16: the loader's tokens/s against nanoGPT's own `get_batch`; a rank's costs in worlds of 1 to 1024.

nanoGPT's function is taken from a checkout of its own (`--checkout`): it stands in the body of its train.py, which can
not be imported, so its source is cut out and executed as it is. Both sides read one and the same train.bin, a batch at
a time in one thread, without prefetching, and in turn, so that a machine whose speed drifts is fair to both.
"""

import argparse
import ast
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from side import show, show_header

from paceline.data.blend import Blend
from paceline.data.loader import Loader
from paceline.data.plan import BatchPlan
from paceline.record.console import Console
from paceline.tools.bench.loader import measure, worlds_table

BATCH, SEQ_LEN, VOCAB = 8, 1024, 50257


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
        report = measure(blend, blend.training(SEQ_LEN, cache=folder), batch=BATCH)
    Console(0).say(worlds_table(report))


if __name__ == "__main__":
    main()
