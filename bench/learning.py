"""The demo preset against a plain recipe with the same wall time, on the embedded corpus with the same tokenizer.

Plain: GPT-2 family of the same width and depth, AdamW, cosine, float32, as one would write it down first; its learning
rate and batch are the best of those tried (docs/LOG.md). Prints both validation curves over training time.
"""

import argparse
import tempfile
from pathlib import Path

from side import evaluations, run_paceline

PLAIN = [
    *("--model.arch", "gpt2", "--model.no-qk-norm", "--train.dtype", "float32"),
    *("--optim.name", "adamw", "--optim.schedule", "cosine", "--optim.min-lr-frac", "0.1"),
    *("--train.global-batch-size", "8"),
]


def curve(out: Path, flags: list[str]) -> list[tuple[float, float]]:
    """Trains the demo preset with these flags; returns (seconds of training, validation loss) of each evaluation."""
    run_paceline(out, ["--preset", "demo", *flags])
    return [(row["elapsed_s"], row["val_loss"]) for row in evaluations(out)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--nproc", default="auto")
    parser.add_argument("--plain-lr", default="1e-3")
    options = parser.parse_args()
    common = ["--train.time-budget", str(options.seconds), "--nproc", options.nproc]
    with tempfile.TemporaryDirectory() as scratch:
        curves = {
            "plain": curve(Path(scratch) / "plain", [*common, *PLAIN, "--optim.lr", options.plain_lr]),
            "demo": curve(Path(scratch) / "demo", common),
        }
    for name, points in curves.items():
        print(name + ": " + "  ".join(f"{seconds:.0f}s {loss:.3f}" for seconds, loss in points))
    difference = curves["plain"][-1][1] - curves["demo"][-1][1]
    print(f"the demo preset ends {difference:.3f} nats per token below the plain recipe")


if __name__ == "__main__":
    main()
