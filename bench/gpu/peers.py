#!/usr/bin/env python3
"""Tokens/s and MFU of paceline's gpt2-124m beside nanoGPT's bench.py and nanochat's model, in turn, on one GPU.

    python bench/gpu/peers.py --nanogpt DIR --nanochat DIR [--rounds 3]    # checkouts; at least one
    python bench/gpu/peers.py --nanogpt DIR --nanochat DIR --rehearse      # on a CPU, tiny: only that all commands run

nanoGPT: 1024 tokens, its own batch of 12, and 32; bench.py counts the update of each batch. paceline trains with 1024
tokens and the micro-batch it chooses; its update comes once a step of 480 sequences. nanochat: its model of 12 layers,
768 wide, 12 heads, full attention, paceline's vocabulary, sequences of 2048, forward and backward without its update,
beside paceline with 2048. Its FlashAttention 3 comes with the package kernels; without that it takes torch's attention,
and a line says so.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from checks import SPEED

GOALS = {"nanoGPT, batch 12": 1.3, "nanoGPT, batch 32": 1.15, "nanochat": 1.1}  # of paceline's tokens/s


def nanogpt(options: argparse.Namespace, batch: int) -> float:
    """Returns tokens/s."""
    seq_len, flags = 1024, ["--real_data=False", "--bias=False", f"--batch_size={batch}"]
    if options.rehearse:
        batch, seq_len = 1, 16
        flags = [*flags[:2], "--batch_size=1", "--block_size=16", "--device=cpu", "--compile=False"]
    script = ["-c", WITHOUT_CUDA] if options.rehearse else ["bench.py"]
    said = output([sys.executable, *script, *flags], options.nanogpt)
    times = re.findall(r"time per iteration: ([\d.]+)ms", said)
    return batch * seq_len / float(times[-1]) * 1e3


WITHOUT_CUDA = "import runpy, torch; torch.cuda.synchronize = lambda: None; runpy.run_path('bench.py')"


def nanochat(options: argparse.Namespace) -> float:
    """Returns tokens/s of its forward and backward pass, compiled as its scripts do."""
    words = [sys.executable, str(Path(__file__).resolve()), "--inside-nanochat", *(["--rehearse"] * options.rehearse)]
    attention, rate = output(words, options.nanochat).splitlines()[-2:]
    print(f"nanochat takes {attention}")
    return float(rate)


def inside_nanochat(rehearse: bool) -> tuple[str, float]:
    """Returns (the name of its attention, tokens/s)."""
    sys.path[0] = "."  # not this script's folder, whose kernels.py is no package of that name
    from nanochat.flash_attention import USE_FA3  # type: ignore[import-not-found]
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    device, batch, seq_len = ("cpu", 1, 16) if rehearse else ("cuda", 32, 2048)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 64} if rehearse else {"n_layer": 12, "n_head": 12, "n_embd": 768}
    config = GPTConfig(sequence_len=seq_len, vocab_size=50304, n_kv_head=size["n_head"], window_pattern="L", **size)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    passes = model if rehearse else torch.compile(model, dynamic=False)
    tokens = torch.randint(config.vocab_size, (batch, seq_len + 1), device=device)
    times = []
    for _ in range(3 if rehearse else 30):
        if not rehearse:
            torch.cuda.synchronize()
        began = time.perf_counter()
        passes(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        if not rehearse:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    rate = batch * seq_len / statistics.median(times[len(times) // 3 :])
    return "FlashAttention 3" if USE_FA3 else "torch's attention", rate


def paceline(options: argparse.Namespace, seq_len: int) -> float:
    """Returns tokens/s of training."""
    size = ("--train.global-batch-size", "480", "--data.seq-len", str(seq_len), "--train.compile")
    flags = ["--preset", "tiny", *SPEED] if options.rehearse else ["--preset", "gpt2-124m", *size, *SPEED]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        output([sys.executable, "-m", "paceline", "train", "--out", f"{folder}/run", *flags], Path.cwd())
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([row["tokens_per_s"] for row in rows if "step_ms" in row][4:])


def output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--nanochat", type=Path, help="a checkout of karpathy/nanochat")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--inside-nanochat", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside_nanochat:
        print(*inside_nanochat(options.rehearse), sep="\n")
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        print(f"no GPU here (torch {torch.__version__}); see --rehearse", file=sys.stderr)
        return 2
    peers: dict[str, tuple[int, Callable[[], float]]] = {}  # the sequence length, and what gives its tokens/s
    if options.nanogpt:
        peers["nanoGPT, batch 12"] = 1024, lambda: nanogpt(options, 12)
        peers["nanoGPT, batch 32"] = 1024, lambda: nanogpt(options, 32)
    if options.nanochat:
        peers["nanochat"] = 2048, lambda: nanochat(options)
    if not peers:
        parser.error("name a checkout: --nanogpt DIR, --nanochat DIR")
    if options.rehearse:
        print("a rehearsal of tiny models on the CPU: its numbers compare nothing")
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(options.rounds):
        ours: dict[int, float] = {}
        for name, (seq_len, measure) in peers.items():
            theirs = measure()
            ours[seq_len] = ours.get(seq_len) or paceline(options, seq_len)
            ratios[name].append(ours[seq_len] / theirs)
            both = f"{name} {theirs:,.0f} tokens/s, paceline {ours[seq_len]:,.0f}"
            print(f"round {number + 1}: {both}: {ratios[name][-1]:.3f}", flush=True)
    for name, each in ratios.items():
        print(f"{name}: {statistics.median(each):.3f} times ({min(each):.3f} to {max(each):.3f}; goal {GOALS[name]})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
