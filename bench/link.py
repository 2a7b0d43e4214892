"""`paceline bench link` between two hosts of a lab: its bandwidth against iperf3's, its prediction against training.

A GPT-2 family model of 10.9M parameters (6 layers x 384), micro-batches of 8 x 256 tokens, float32 gradients, `ddp`.
Every round makes a lab three times at each rate: for iperf3 and the plain connection of `bench link` in turn (b sends
to a; the medians of each), for `bench link` itself, and for training, whose `comm_ms` of rank 0 is the median over its
steps but the first three. Takes root, iperf3, and a machine that does nothing else: at an unlimited rate two busy
processors are the network.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from side import median_ms

from paceline.bench.link_tcp import Door, come_in, drain, let_in, open_door, pour

MODEL = [
    *("--model.arch", "gpt2", "--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384"),
    *("--data.tokenizer-vocab", "512", "--data.seq-len", "256", "--train.global-batch-size", "16"),
    *("--train.device-batch-size", "8", "--parallel.strategy", "ddp", "--optim.name", "adamw", "--optim.lr", "6e-4"),
]
TRAINING = ["--train.eval-every", "-1", "--train.sample-tokens", "0", "--parallel.check-every", "0"]
TURNS, TURN_S = 5, 3.0  # of iperf3 and of a plain connection
WARM_UP_STEPS = 3


def lab(rate: str, *command: str) -> str:
    """Runs a command on two hosts and returns what it printed."""
    line = [sys.executable, "-m", "paceline", "lab", "--hosts", "2", "--rate", rate, "--", *command]
    done = subprocess.run(line, capture_output=True, text=True)
    while "a lab runs already" in done.stderr:  # one at a time; somebody else's ends some time
        time.sleep(1)
        done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def bandwidths(rate: str, scratch: Path) -> dict[str, float]:
    """Bytes a second from b to a, by the receiver: of iperf3, and of the plain connection of `bench link`."""
    folder = scratch / "turns"
    folder.mkdir()
    lab(rate, "exec", sys.executable, str(Path(__file__).absolute()), "--as-host", str(folder))
    iperf = [json.loads(path.read_text())["end"]["sum_received"]["bits_per_second"] / 8 for path in folder.glob("*.ip")]
    plain = [float(path.read_text()) for path in folder.glob("*.tcp")]
    return {"iperf": statistics.median(iperf), "plain": statistics.median(plain)}


def be_a_host(folder: Path) -> None:
    """What each host of the lab does: a receives, b sends. They share the disk, and leave notes there."""
    is_a = socket.gethostname() == "a"
    for turn in range(TURNS):
        with (folder / f"{turn}.ip").open("w") if is_a else open(os.devnull, "w") as out:
            ends = ["-s", "-1", "-J"] if is_a else ["-c", "a", "-O", "1", "-t", str(round(TURN_S))]
            for _ in range(20):  # until the server listens
                if subprocess.run(["iperf3", *ends], stdout=out, stderr=out).returncode == 0:  # with -J always 0
                    break
                time.sleep(0.2)
        note = folder / f"{turn}.door"
        if is_a:
            with open_door(socket.gethostbyname("a")) as (listener, door):
                note.with_suffix(".new").write_text(json.dumps(asdict(door)))
                note.with_suffix(".new").rename(note)
                with let_in(listener, door) as connection:
                    (folder / f"{turn}.tcp").write_text(str(drain(connection)))
        else:
            while not note.exists():
                time.sleep(0.05)
            with come_in(Door(**json.loads(note.read_text())), socket.gethostbyname("b")) as connection:
                pour(connection, TURN_S)


def link_report(rate: str, scratch: Path, budget_s: float) -> dict[str, Any]:
    """What `bench link` says of this model."""
    found = scratch / "link.json"
    lab(rate, "bench", "link", *MODEL, "--time-budget", str(budget_s), "--json", str(found))
    report: dict[str, Any] = json.loads(found.read_text())
    return report


def training_comm_ms(rate: str, out: Path, steps: int) -> float:
    """The median `comm_ms` of a run."""
    lab(rate, "train", *MODEL, *TRAINING, "--train.steps", str(steps), "--out", str(out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return median_ms([row for row in rows if "step_ms" in row], WARM_UP_STEPS, "comm_ms")


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
    found: dict[str, list[dict[str, float]]] = {rate: [] for rate in options.rates.split(",")}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for rate, rounds in found.items():
                scratch = Path(name) / f"{rate}-{number}"
                scratch.mkdir()
                rates_found = bandwidths(rate, scratch)
                report = link_report(rate, scratch, options.time_budget)
                is_slow = report["model"]["computed_s"] > 2
                comm_ms = training_comm_ms(rate, scratch / "run", options.steps // 4 if is_slow else options.steps)
                rounds.append(figures(rates_found, report, comm_ms))
                print(f"round {number + 1}, {rate}: {rounds[-1]}", file=sys.stderr, flush=True)
    rates = list(found)
    print(f"{'medians of ' + str(options.rounds) + ' rounds (worst round)':<58}" + "".join(f"{r:>24}" for r in rates))
    for label in found[rates[0]][0]:
        cells = []
        for rate in rates:
            values = [row[label] for row in found[rate]]
            is_ratio = label.rstrip().endswith("%")
            worst = max(values, key=abs) if is_ratio else None
            cells.append(f"{statistics.median(values):.1f}" + (f" ({worst:+.1f})" if worst is not None else ""))
        print(f"{label:<58}" + "".join(f"{cell:>24}" for cell in cells))


def figures(found: dict[str, float], report: dict[str, Any], comm_ms: float) -> dict[str, float]:
    """The rows of the table, of one round."""
    (pair,), model = report["pairs"], report["model"]
    iperf, plain = found["iperf"], found["plain"]
    ms = {name: model[f"{name}_s"] * 1e3 for name in ("computed", "fitted", "predicted")}
    return {
        "iperf3, MB/s of payload": iperf / 1e6,
        "bench link's plain TCP in turn with it, MB/s": plain / 1e6,
        "  against iperf3, %": 100 * (plain / iperf - 1),
        "bench link, the link, MB/s": pair["link_bytes_per_s"] / 1e6,
        "  against iperf3, % ": 100 * (pair["link_bytes_per_s"] / iperf - 1),
        "bench link, through Gloo, MB/s": pair["back_bytes_per_s"] / 1e6,
        "  against iperf3,  %": 100 * (pair["back_bytes_per_s"] / iperf - 1),
        "training, comm_ms": comm_ms,
        "bench link, all-reduce computed from bytes, ms": ms["computed"],
        "  against training, %": 100 * (ms["computed"] / comm_ms - 1),
        "bench link, by the fit, ms": ms["fitted"],
        "  against training,  %": 100 * (ms["fitted"] / comm_ms - 1),
        "bench link, measured alone, ms": 1e3 * (model["alone_s"] or float("nan")),
        "bench link, its prediction (beside backward), ms": ms["predicted"],
        "  against training,   %": 100 * (ms["predicted"] / comm_ms - 1),
    }


if __name__ == "__main__":
    main()
