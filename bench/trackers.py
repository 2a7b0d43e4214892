"""What five trackers cost a run of `lesson` on two ranks, as a difference of step times with its confidence interval.

    python bench/trackers.py --out windows.jsonl            # 6 pairs of windows, appended; run it several times
    python bench/trackers.py --out windows.jsonl --pairs 0   # only what the file says

The follower is stopped for 15 s (SIGSTOP) and then runs for 15 s, and so on. Its wait of 30 s between batches is over
each time it continues, so each window in which it runs has one batch, with the rows of 30 s: as many batches and rows
for a time as there are without the stops. The cost is half the difference, since the other half of the time has none.
With `--followers 4` four such followers run, and the cost is divided by four, and so is the noise; as they share the
processor time that is left over, it is an upper bound then. A machine's speed drifts by more than a follower costs, so
a step counts in units of the median of the eleven around it. That hides what slows eleven steps alike; the processor
time shows it.

MLflow's server is another machine elsewhere. In its place a server of a few lines takes what MLflow's library sends
(`tests/tools/track` reads a real one). Needs wandb, trackio and mlflow.
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from paceline.tools.bench.runs import PACELINE, training_rows

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "prometheus")
TRAIN = ("--preset", "lesson", "--nproc", "2", "--train.steps", "100000", "--checkpoint.every", "0")
WINDOW_S = 15.0  # half of the follower's time between batches to libraries
SETTLE_S = 5.0
RUN = {"info": {"run_id": "1", "run_uuid": "1", "experiment_id": "1", "status": "RUNNING"}, "data": {}}
ANSWERS = {
    "get-by-name": {"experiment": {"experiment_id": "1", "name": "paceline"}},
    "create": {"run": RUN},
    "update": {"run_info": RUN["info"]},
}


class Sink(BaseHTTPRequestHandler):
    """Answers MLflow's library as its server does, and forgets what it said."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps(ANSWERS.get(self.path.partition("?")[0].rpartition("/")[2], {})).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *arguments: object) -> None: ...


def trackers(prefix: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return [f"{prefix}to", ",".join(TRACKERS), f"{prefix}prometheus-port", str(probe.getsockname()[1])]


def family(process: psutil.Process) -> list[psutil.Process]:
    """Returns it and all that descend from it."""
    return [process, *process.children(recursive=True)]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def send(processes: Sequence[psutil.Process], number: int) -> None:
    for each in processes:
        each.send_signal(number)


def position(run: Path, name: str) -> int:
    """Returns the step up to which a tracker has rows."""
    path = run / "track" / f"{name}.json"
    return int(json.loads(path.read_text())["position"].get("step", 0)) if path.exists() else 0


def wait_for(condition: Callable[[], bool], train: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if train.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run does not begin, or a tracker has no rows; see above")
        time.sleep(0.2)


def measure(scratch: Path, num_followers: int, num_pairs: int) -> Iterator[dict[str, Any]]:
    """Yields what happened in each window of one run; the first and the last without the follower."""
    run, server = scratch / "run", ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ["--out", str(run), *trackers("--track.")]
    env = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(scratch / "trackio")}
    env |= {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.server_port}"}
    with (scratch / "train.log").open("wb") as log:
        train = subprocess.Popen([*PACELINE, "train", *TRAIN, *flags], env=env, stdout=log)
    others: list[subprocess.Popen[bytes]] = []
    try:
        wait_for(lambda: len(training_rows(run)) > 5, train)
        trainers = family(psutil.Process(train.pid))
        (follower,) = [each for each in trainers if each.cmdline()[2:4] == ["paceline", "track"]]
        trainers = [each for each in trainers if each not in family(follower)]
        send(trainers, signal.SIGSTOP)  # meanwhile the follower imports libraries, which takes a minute beside them
        others = start_followers(run, num_followers - 1, env)
        runs = [run, *(run.with_name(f"run{i}") for i in range(num_followers - 1))]
        wait_for(lambda: all(position(each, name) for each in runs for name in TRACKERS if name != "prometheus"), train)
        send(trainers, signal.SIGCONT)
        time.sleep(SETTLE_S)
        for number in range(2 * num_pairs + 1):
            pids = [follower.pid, *(other.pid for other in others)]
            followers = [each for pid in pids for each in family(psutil.Process(pid))]
            yield {"followers": num_followers, **window(run, followers, runs=number % 2 == 1)}
    finally:
        everyone = [each for first in (train, *others) for each in family(psutil.Process(first.pid))]
        send(everyone, signal.SIGKILL)
        psutil.wait_procs(everyone, 10)


def start_followers(run: Path, number: int, env: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Starts further followers of the run, each in a folder of its own that shares the run's records."""
    found = []
    for i in range(number):
        folder = run.with_name(f"run{i}")
        folder.mkdir()
        for name in ("config.toml", "metrics.jsonl", "events.jsonl", "lock.holder"):
            (folder / name).symlink_to(run / name)
        command = [*PACELINE, "track", str(folder), *trackers("--")]
        found.append(subprocess.Popen(command, env={**env, "TRACKIO_DIR": f"{folder}/trackio"}))
    return found


def window(run: Path, follower: Sequence[psutil.Process], runs: bool) -> dict[str, Any]:
    """Waits for a window; returns the times of its steps, and what the follower did."""
    send(follower, signal.SIGCONT if runs else signal.SIGSTOP)
    before, used_s, machine = len(training_rows(run)), cpu_s(follower), psutil.cpu_times()
    time.sleep(WINDOW_S)
    rows = training_rows(run)[before + 1 :]  # without the step during which the window began
    idle_s = psutil.cpu_times().idle - machine.idle
    found: dict[str, Any] = {
        "runs": runs,
        "step_ms": [row["step_ms"] for row in rows],
        "follower_s": cpu_s(follower) - used_s,
        "idle_s": idle_s,
        "behind": {name: rows[-1]["step"] - position(run, name) for name in TRACKERS if name != "prometheus"},
    }
    print(f"{runs=} mean {statistics.mean(found['step_ms']):.1f} ms", {**found, "step_ms": "..."}, flush=True)
    return found


def excess(windows: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the mean step time of each window, with each step in units of the median of the eleven around it."""
    times = [ms for each in windows for ms in each["step_ms"]]
    ratios = iter([ms / statistics.median(times[max(0, i - 5) : i + 6]) for i, ms in enumerate(times)])
    return [statistics.mean(next(ratios) for _ in each["step_ms"]) for each in windows]


def summary(windows: Sequence[dict[str, Any]]) -> None:
    """Prints what a follower costs by step times, with a 95% interval by 10,000 resamples of windows, and by processor
    time: what it took, and how much of that was idle without it."""
    means: dict[bool, list[float]] = {True: [], False: []}
    for each, mean in zip(windows, excess(windows), strict=True):
        means[each["runs"]].append(mean)
        print(f"  {'running' if each['runs'] else 'stopped'} {statistics.mean(each['step_ms']):.1f} ms, {mean:.4f}")
    share = 50 / windows[0]["followers"]  # half of the time has no batch
    draw, drawn = random.Random(1), []
    for _ in range(10_000):
        running, stopped = (statistics.mean(draw.choices(means[runs], k=len(means[runs]))) for runs in (True, False))
        drawn.append(share * (running - stopped))
    drawn.sort()
    cost = share * (statistics.mean(means[True]) - statistics.mean(means[False]))
    print(f"cost of one follower: {cost:+.2f}% of the step time [{drawn[250]:+.2f}, {drawn[9750]:+.2f}]")
    idle_s = {runs: statistics.mean(each["idle_s"] for each in windows if each["runs"] == runs) for runs in means}
    used_s = statistics.mean(each["follower_s"] for each in windows if each["runs"])
    print(f"its processor time: {share * used_s / WINDOW_S:.2f}% of a core", end=", ")
    print(f"of which {(idle_s[False] - idle_s[True]) / used_s:.0%} would be idle without it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--followers", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    if options.pairs:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        with tempfile.TemporaryDirectory() as scratch, options.out.open("a") as file:
            for found in measure(Path(scratch), options.followers, options.pairs):
                file.write(json.dumps(found) + "\n")
                file.flush()
    summary([json.loads(line) for line in options.out.read_text().splitlines()])


if __name__ == "__main__":
    main()
