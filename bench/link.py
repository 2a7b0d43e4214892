"""`paceline bench link` between two hosts of a lab: its bandwidth against iperf3's, its prediction against training.

A GPT-2 family model of 10.9M parameters (6 layers x 384), micro-batches of 8 x 256 tokens, float32 gradients, `ddp`.
Every round makes a lab three times at each rate: for iperf3 (b sends to a; the median of its turns), for `bench link`,
and for training, whose `comm_ms` of rank 0 is the median over its steps but the first three. Takes root, iperf3, and a
machine that does nothing else: at an unlimited rate two busy processors are the network.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side import median_ms, run

from paceline.tools.bench.runs import PACELINE, training_rows

MODEL = [
    *("--model.arch", "gpt2", "--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384"),
    *("--data.tokenizer-vocab", "512", "--data.seq-len", "256", "--train.global-batch-size", "16"),
    *("--train.device-batch-size", "8", "--parallel.strategy", "ddp", "--optim.name", "adamw", "--optim.lr", "6e-4"),
]
TRAINING = ["--train.eval-every", "-1", "--train.sample-tokens", "0", "--parallel.check-every", "0"]
TURNS, TURN_S = 5, 3.0  # of iperf3


def lab(rate: str, *command: str) -> str:
    """Runs a command on two hosts of a lab that is in nobody's way, and returns what it printed."""
    return run([*PACELINE, "lab", "--hosts", "2", "--rate", rate, "--", *command], {"PACELINE_LAB": str(os.getpid())})


def iperf_bytes_per_s(rate: str, scratch: Path) -> float:
    """From b to a, by the receiver."""
    folder = scratch / "turns"
    folder.mkdir()
    lab(rate, "exec", sys.executable, str(Path(__file__).absolute()), "--as-host", str(folder))
    ends = [json.loads(path.read_text())["end"] for path in folder.glob("*.json")]
    return statistics.median(end["sum_received"]["bits_per_second"] / 8 for end in ends)


def be_a_host(folder: Path) -> None:
    """What each host of the lab does: a receives, b sends."""
    is_a = socket.gethostname() == "a"
    for turn in range(TURNS):
        with (folder / f"{turn}.json").open("w") if is_a else open(os.devnull, "w") as out:
            ends = ["-s", "-1", "-J"] if is_a else ["-c", "a", "-O", "1", "-t", str(round(TURN_S))]
            for _ in range(20):  # until the server listens
                if subprocess.run(["iperf3", *ends], stdout=out, stderr=out).returncode == 0:  # with -J always 0
                    break
                time.sleep(0.2)


def link_report(rate: str, scratch: Path, budget_s: float) -> dict[str, Any]:
    """What `bench link` says of this model."""
    found = scratch / "link.json"
    lab(rate, "bench", "link", *MODEL, "--time-budget", str(budget_s), "--json", str(found))
    report: dict[str, Any] = json.loads(found.read_text())
    return report


def training_comm_ms(rate: str, out: Path, steps: int) -> float:
    """The median `comm_ms` of a run."""
    lab(rate, "train", *MODEL, *TRAINING, "--train.steps", str(steps), "--out", str(out))
    return median_ms(training_rows(out), "comm_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,1gbit,unlimited")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of a run; a quarter of them at 100mbit and below")
    parser.add_argument("--time-budget", type=float, default=60, help="of bench link, seconds")
    parser.add_argument("--as-host", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_host:
        be_a_host(options.as_host)
        return
    found: dict[str, list[list[tuple[str, float]]]] = {rate: [] for rate in options.rates.split(",")}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for rate, rounds in found.items():
                scratch = Path(name) / f"{rate}-{number}"
                scratch.mkdir()
                iperf = iperf_bytes_per_s(rate, scratch)
                report = link_report(rate, scratch, options.time_budget)
                is_slow = report["model"]["computed_s"] > 2
                comm_ms = training_comm_ms(rate, scratch / "run", options.steps // 4 if is_slow else options.steps)
                rounds.append(figures(iperf, report, comm_ms))
                print(f"round {number + 1}, {rate}: {rounds[-1]}", file=sys.stderr, flush=True)
    rates = list(found)
    print(f"{'medians of ' + str(options.rounds) + ' rounds (worst round)':<58}" + "".join(f"{r:>24}" for r in rates))
    for number, (label, _) in enumerate(found[rates[0]][0]):
        cells = []
        for rate in rates:
            values = [rows[number][1] for rows in found[rate]]
            worst = f" ({max(values, key=abs):+.1f})" if label.endswith("%") else ""
            cells.append(f"{statistics.median(values):.1f}{worst}")
        print(f"{label:<58}" + "".join(f"{cell:>24}" for cell in cells))


def figures(iperf: float, report: dict[str, Any], comm_ms: float) -> list[tuple[str, float]]:
    """Returns the rows of the table, of one round; iperf in bytes a second."""
    (pair,), model = report["pairs"], report["model"]
    rows = [
        ("iperf3, MB/s of payload", iperf / 1e6),
        ("bench link, each way while both are busy, MB/s", pair["bytes_per_s"] / 1e6),
        ("  against iperf3, %", 100 * (pair["bytes_per_s"] / iperf - 1)),
        ("training, comm_ms", comm_ms),
    ]
    ways = {"computed": "all-reduce computed from bytes", "fitted": "by the fit", "predicted": "its prediction"}
    for name, what in ways.items():
        ms = 1e3 * model[f"{name}_s"]
        rows += [(f"bench link, {what}, ms", ms), ("  against training, %", 100 * (ms / comm_ms - 1))]
    return rows


if __name__ == "__main__":
    main()
