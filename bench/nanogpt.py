"""One process, two threads, 6 layers x 384 wide, T=256, batch 8: tokens/s against nanoGPT's own recipe for CPU.

nanoGPT runs from a checkout of its own (`--checkout`), with the flags of its README for CPU but these shapes: float32,
no compile, AdamW not fused, as its train.py does on a CPU. Both sides get the same tokens and vocabulary, and run in
turn, so that a machine whose speed drifts is fair to both.

A round also times the matrix products of a step alone: forward and backward of linear layers and head, from the same
shapes and by the kernels that the model takes. Their share of a step's time is what the step reaches of the machine;
attention's products count as overhead.
"""

import argparse
import pickle
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from side import median_ms, run, run_paceline, show, show_header

from paceline.data.cache import ensure_datasets
from paceline.data.config import DataConfig
from paceline.data.dataset import Dataset
from paceline.data.report import Quiet
from paceline.model import cpu
from paceline.world.cores import usable_cores
from paceline.world.device import choose_dtype

STEPS = 14
SHAPES = {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "batch_size": 8, "dropout": 0.0}
PACELINE = [
    *("--model.arch", "gpt2", "--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384"),
    *("--data.seq-len", "256", "--train.global-batch-size", "8", "--train.device-batch-size", "8"),
    *("--train.steps", str(STEPS), "--train.eval-every", "-1", "--train.sample-tokens", "0"),
]


def nanogpt_ms(folder: Path, threads: int) -> float:
    """Returns the median milliseconds of a step of nanoGPT's train.py."""
    flags = [f"--{name}={value}" for name, value in SHAPES.items()]
    flags += ["--dataset=same", "--device=cpu", "--compile=False", "--eval_only=False", "--eval_interval=100000"]
    flags += ["--eval_iters=1", "--log_interval=1", f"--max_iters={STEPS}", "--gradient_accumulation_steps=1"]
    flags += ["--out_dir=out", "--always_save_checkpoint=False", "--bias=False"]
    said = run([sys.executable, "train.py", *flags], {"OMP_NUM_THREADS": str(threads)}, folder)
    times = [float(ms) for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", said, flags=re.MULTILINE)]
    return statistics.median(times[3:])


def products_ms(dtype: torch.dtype, vocab_size: int, threads: int) -> float:
    """Returns the median milliseconds of a step's matrix products, made one after another and nothing between them."""
    torch.set_num_threads(threads)
    rows, width = int(SHAPES["batch_size"] * SHAPES["block_size"]), int(SHAPES["n_embd"])
    layer = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    sizes = [(rows, ins, outs) for ins, outs in layer * int(SHAPES["n_layer"])]
    sizes += [(512, width, vocab_size)] * (rows // 512)  # the loss takes 512 rows at once
    tensors = {
        (n, ins, outs): [torch.randn(*shape).to(dtype) for shape in ((n, ins), (outs, ins), (n, outs))]
        for n, ins, outs in set(sizes)
    }
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for size in sizes:
            x, weight, grad = tensors[size]
            _ = cpu.mm(x, weight.t()), cpu.mm(grad, weight), cpu.mm(grad.t(), x)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    dataset = Dataset.open(ensure_datasets(DataConfig(), Quiet(), usable_cores())[0])
    with tempfile.TemporaryDirectory() as scratch:
        peer = Path(scratch) / "nanogpt"
        shutil.copytree(options.checkout, peer, ignore=shutil.ignore_patterns(".git"))
        (peer / "data" / "same").mkdir(parents=True)
        for name, stream in (("train", dataset.train), ("val", dataset.validation)):
            count = min(stream.num_tokens, 2_000_000)
            stream.read(0, count).astype(np.uint16).tofile(peer / "data" / "same" / f"{name}.bin")
        (peer / "data" / "same" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": dataset.vocab_size}))
        sides: dict[str, list[float]] = {"nanoGPT": [], "paceline float32": [], "paceline auto": []}
        shares: dict[str, list[float]] = {"paceline float32": [], "paceline auto": []}
        for i in range(options.rounds):
            sides["nanoGPT"].append(nanogpt_ms(peer, options.threads))
            for dtype in ("float32", "auto"):
                flags = [*PACELINE, "--train.dtype", dtype, "--parallel.threads", str(options.threads)]
                rows = run_paceline(Path(scratch) / f"{dtype}-{i}", flags)
                sides[f"paceline {dtype}"].append(median_ms(rows))
                products = products_ms(choose_dtype(dtype, torch.device("cpu"))[0], dataset.vocab_size, options.threads)
                shares[f"paceline {dtype}"].append(100 * products / median_ms(rows))
    tokens = SHAPES["batch_size"] * SHAPES["block_size"]
    show_header()
    for name, values in sides.items():
        show(f"{name}, {options.threads} threads, a step", values, "ms")
        show("", [tokens / ms * 1e3 for ms in values], "tokens/s")
    for name in ("paceline float32", "paceline auto"):
        ratios = [peer_ms / ms for peer_ms, ms in zip(sides["nanoGPT"], sides[name], strict=True)]
        show(f"{name}: times nanoGPT's tokens/s", ratios, "x")
        show("", shares[name], "% of the step are its products alone")


if __name__ == "__main__":
    main()
