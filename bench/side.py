"""What the comparisons share: running a side as a process of its own, and reading its step times."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path


def run_paceline(out: Path, flags: list[str], environment: dict[str, str] | None = None) -> list[dict[str, object]]:
    """Runs `paceline train` with these flags and returns the training rows of its metrics.jsonl."""
    command = [sys.executable, "-m", "paceline", "train", "--out", str(out), *flags]
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "step_ms" in row]


def median_ms(rows: list[dict[str, object]], warmup: int = 3, name: str = "step_ms") -> float:
    """Returns the median of a field over the steps after the warm-up."""
    return statistics.median(float(str(row[name])) for row in rows[warmup:])


def show(label: str, values: list[float], unit: str) -> None:
    """Prints minimum, median and maximum."""
    print(f"{label:<44} {min(values):10.2f} {statistics.median(values):10.2f} {max(values):10.2f}  {unit}")
