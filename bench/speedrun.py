"""Wall time to the validation loss at which nanoGPT's recipe for CPU ends, on the same characters and the same split.

nanoGPT runs from a checkout (`--checkout`) with the flags of its README for CPU: characters, 4 layers x 128, 64
characters of context, 2,000 iterations. `--large` takes its recipe of 6 layers x 384 with 256 characters of context, in
batches of 8, for as many iterations as are given. Its target is the loss of its last weights over many batches of the
validation split. Then `paceline train --preset chars`, with 64 characters of context, trains by the clock on the same
two files. Both times are of whole processes, from the command to its end. Losses are nats per character.
With `--losses FILE` nanoGPT's loss is written there, and read in later runs, which time 12 of its iterations only: the
long part may then run beside other work (`--seeds 0`).

    python bench/texts.py /tmp/texts
    python bench/speedrun.py --checkout nanoGPT --texts /tmp/texts/*.txt
"""

import argparse
import json
import pickle
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from side import evaluations, run, show

from paceline.tools.bench.runs import PACELINE

CPU = ["--device=cpu", "--compile=False", "--log_interval=1", "--always_save_checkpoint=True", "--out_dir=out"]
README = [
    *("--eval_iters=20", "--block_size=64", "--batch_size=12"),
    *("--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0"),
]
LARGE = ["--eval_iters=1", "--batch_size=8"]


def prepare(text: str, folder: Path) -> None:
    """Writes train.bin, val.bin and meta.pkl as nanoGPT's shakespeare_char/prepare.py does: nine tenths to train on."""
    itos = dict(enumerate(sorted(set(text))))
    stoi = {character: i for i, character in itos.items()}
    ids = np.array([stoi[character] for character in text], np.uint16)
    folder.mkdir(parents=True)
    cut = len(ids) * 9 // 10
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(itos), "itos": itos, "stoi": stoi}))


def timed_run(command: list[str], folder: Path) -> tuple[float, str]:
    """Runs a command; returns its seconds and what it printed."""
    began_s = time.perf_counter()
    said = run(command, folder=folder)
    return time.perf_counter() - began_s, said


def nanogpt(checkout: Path, data: str, iterations: int, *, is_large: bool) -> tuple[float, float]:
    """Returns (seconds of its training, the loss of its last weights over 300 batches, or 40 large ones)."""
    command = nanogpt_command(data, iterations, is_large=is_large)
    if is_large:
        command += [f"--eval_interval={iterations}"]  # where it saves
    seconds, _ = timed_run(command, checkout)
    batches = 40 if is_large else 300
    said = run([*command, "--init_from=resume", "--eval_only=True", f"--eval_iters={batches}"], folder=checkout)
    return seconds, float(re.findall(r"val loss ([\d.]+)", said)[-1])


def nanogpt_seconds(checkout: Path, data: str, iterations: int, timed: int, *, is_large: bool) -> float:
    """Returns the seconds of its training, from a run of `timed` iterations: the others take their median each."""
    command = nanogpt_command(data, iterations, is_large=is_large)
    seconds, said = timed_run([*command, f"--max_iters={timed}", f"--eval_interval={timed + 1}"], checkout)
    times_ms = [float(ms) for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", said, flags=re.MULTILINE)]
    return seconds + (iterations - timed) * statistics.median(times_ms[1:]) / 1e3


def nanogpt_command(data: str, iterations: int, *, is_large: bool) -> list[str]:
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *CPU, *(LARGE if is_large else README)]
    return [*command, f"--dataset={data}", f"--max_iters={iterations}", f"--lr_decay_iters={iterations}"]


def paceline(folder: Path, data: Path, seconds: float, seed: int, flags: list[str]) -> tuple[float, float]:
    """Returns (seconds of the process, the validation loss at its end)."""
    command = [*PACELINE, "train", "--preset", "chars", "--data.path", str(data)]
    command += ["--out", str(folder), "--train.time-budget", str(seconds), "--train.seed", str(seed)]
    command += flags
    took_s, _ = timed_run(command, folder.parent)
    return took_s, float(evaluations(folder)[-1]["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="text files of about a million characters")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="paceline's horizon; its start comes on top")
    parser.add_argument("--iterations", type=int, default=2000, help="nanoGPT's")
    parser.add_argument("--large", action="store_true", help="nanoGPT's 6 x 384; give --iterations, too")
    parser.add_argument(
        "--losses", type=Path, help="JSON of nanoGPT's loss by text; what it lacks is trained and added"
    )
    options, flags = parser.parse_known_args()
    losses = json.loads(options.losses.read_text()) if options.losses and options.losses.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "nanogpt"
        shutil.copytree(options.checkout, checkout, ignore=shutil.ignore_patterns(".git"))
        for text in options.texts:
            data = checkout / "data" / text.stem
            prepare(text.read_text(encoding="utf-8", errors="replace"), data)
            if text.stem not in losses:
                peer_s, losses[text.stem] = nanogpt(checkout, text.stem, options.iterations, is_large=options.large)
                if options.losses:
                    options.losses.write_text(json.dumps(losses))
            else:
                peer_s = nanogpt_seconds(checkout, text.stem, options.iterations, 12, is_large=options.large)
            target = losses[text.stem]
            print(f"{text.name}: nanoGPT ends at {target:.4f} after {peer_s:.1f} s", flush=True)
            if not options.seeds:
                continue
            sides = [
                paceline(Path(scratch) / f"{text.stem}-{seed}", data, options.seconds, seed, flags)
                for seed in range(1, options.seeds + 1)
            ]
            show("paceline, the process", [took_s for took_s, _ in sides], "s")
            show("  validation loss", [loss for _, loss in sides], "nats")
            show("  share of nanoGPT's time", [took_s / peer_s * 100 for took_s, _ in sides], "%")
            print(f"  at or below its loss: {sum(loss <= target for _, loss in sides)} of {len(sides)}", flush=True)


if __name__ == "__main__":
    main()
