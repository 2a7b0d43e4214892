"""What the comparisons share: running a side as a process of its own, reading its records, and the table."""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base.jsonl import rows as rows_of
from paceline.tools.bench.runs import PACELINE, training_rows

TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """Returns what a command printed. Ends this process, with the command's last words, if it fails."""
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def run_paceline(out: Path, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Runs `paceline train` with these flags and returns the training rows of its metrics.jsonl."""
    run([*PACELINE, "train", "--out", str(out), *flags], environment)
    return training_rows(out)


def evaluations(out: Path) -> list[dict[str, Any]]:
    """Returns the evaluation rows of a run's metrics.jsonl."""
    return [row for row in rows_of(out / "metrics.jsonl") if row and "val_loss" in row]


def show_header() -> None:
    print(f"{'':<60} {'min':>10} {'median':>10} {'max':>10}")


def show(label: str, values: Sequence[float], unit: str) -> None:
    """Prints minimum, median and maximum."""
    print(f"{label:<60} {min(values):10.2f} {statistics.median(values):10.2f} {max(values):10.2f}  {unit}")
