"""How long a run stands still when a rank is killed: from the death to the first step that had not been made before.

    python bench/restart.py [--kills 20] [--nproc 3]

Runs `paceline train --preset tiny` with warm ranks (forked from one process that has imported torch) and with cold
ones, in turn; kills a rank every few steps, as the kernel does when memory runs out; and compares the losses with those
of a run that nobody disturbed. Also the time from the command to its first step, both ways.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from side import show, show_header

_STEPS_BETWEEN = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=3)
    options = parser.parse_args()
    num_steps = _STEPS_BETWEEN * (options.kills // 2 + 2)
    gaps: dict[str, list[float]] = {"warm": [], "cold": []}
    starts: dict[str, list[float]] = {"warm": [], "cold": []}
    with tempfile.TemporaryDirectory() as folder:
        plain = Run(Path(folder, "plain"), "warm", num_steps, options.nproc)
        starts["warm"].append(plain.seconds_to_step(1))
        plain.end()
        for number in range(4):  # in turn, because a machine's speed drifts
            start = ("cold", "warm")[number % 2]
            run = Run(Path(folder, str(number)), start, num_steps, options.nproc)
            starts[start].append(run.seconds_to_step(1))
            for kill in range(options.kills // 2):
                run.seconds_to_step(_STEPS_BETWEEN * (kill + 1))
                gaps[start].append(run.kill_a_rank())
            run.end()
            assert run.losses() == plain.losses(), "the curve is another one"
    show_header()
    for start in ("warm", "cold"):
        show(f"{start}, {len(gaps[start])} kills: from a death to the next new step", gaps[start], "s")
        show(f"{start}: from the command to its first step", starts[start], "s")


class Run:
    """A run of the preset `tiny` that saves after each step."""

    def __init__(self, folder: Path, start: str, num_steps: int, nproc: int):
        self._metrics, self._began = folder / "metrics.jsonl", time.monotonic()
        flags = ("--train.steps", str(num_steps), "--checkpoint.every", "1", "--train.sample-tokens", "0")
        command = (
            "train",
            "--preset",
            "tiny",
            *flags,
            "--nproc",
            str(nproc),
            "--max-restarts",
            "100",
            "--start",
            start,
        )
        self._process = subprocess.Popen(
            (sys.executable, "-m", "paceline", *command, "--out", str(folder)), stdout=subprocess.DEVNULL
        )

    def losses(self) -> list[float]:
        rows = [json.loads(line) for line in self._metrics.read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    def num_steps(self) -> int:
        """Returns the number of steps made; cheap, because it is asked all the time beside the run."""
        return self._metrics.read_bytes().count(b'"grad_norm"') if self._metrics.exists() else 0

    def seconds_to_step(self, step: int) -> float:
        """Returns the seconds from the command to the end of this step, once it is made."""
        while self.num_steps() < step:
            assert self._process.poll() is None, "the run has ended"
            time.sleep(0.005)
        return time.monotonic() - self._began

    def kill_a_rank(self) -> float:
        """Returns the seconds from the death of a rank to the next step that had not been made."""
        launcher = psutil.Process(self._process.pid)
        ranks = [each for each in launcher.children() if "paceline.launch.warm" not in _words(each) or _is_rank(each)]
        os.kill(random.choice(ranks).pid, signal.SIGKILL)
        reached, died = self.num_steps(), time.monotonic()
        while self.num_steps() <= reached:
            time.sleep(0.005)
        return time.monotonic() - died

    def end(self) -> None:
        assert self._process.wait() == 0


def _words(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _is_rank(process: psutil.Process) -> bool:
    return process.name().startswith("paceline-r")


if __name__ == "__main__":
    main()
