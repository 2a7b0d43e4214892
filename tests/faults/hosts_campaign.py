"""Two hosts that ssh reaches, each with a disk of its own; one is lost at a random moment and comes back.

    python tests/faults/hosts_campaign.py --runs 20 --seed 1

`paceline launch` runs on the other one. A host is lost by SIGKILL of everything on it, by its power (the cable is
silent first), or by its cable alone; either host may be the one. It comes back after up to 4 s. Or somebody sleeps for
10 s: the host, or the coordinator. Every run must end by itself with the curve of the undisturbed run within 1e-4, each
step once in the records of both hosts, and the last checkpoint on both; a sleep changes nothing at all. Prints a line
for each run and a table of the times. Linux, as root.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from program import TINY, Program, losses, run, steps
from ssh_hosts import SshHosts, ssh_hosts

STEPS, EVERY, TOLERANCE = 80, 20, 1e-4
WAYS = ("kill", "power", "cable", "sleep", "coordinator")
SLEEPS = ("sleep", "coordinator")
PACE = "rank=0 step=1 phase=data kind=sleep seconds=0.1 times=1000 attempt=any"  # else it would end before the return
FLAGS = (*TINY, "--train.device-batch-size", "6", "--train.steps", str(STEPS), "--checkpoint.every", str(EVERY))
_DEADLINE_S = 180.0


@dataclass
class Hit:
    """One disturbed run: how it was hit, how it ended."""

    number: int
    way: str
    victim: int  # the first host has rank 0 at the start
    at_step: int
    after_s: float  # from that step
    away_s: float
    problems: list[str] = field(default_factory=list)
    on_s: float | None = None  # from the loss to the next step
    back_s: float | None = None  # from the return to the first step with all hosts


def plan(number: int, seed: int) -> Hit:
    """Returns how run `number` is hit."""
    draw = random.Random(f"{seed} {number}")
    way = draw.choice(WAYS)
    away_s = 10.0 if way in SLEEPS else draw.uniform(0, 4)
    return Hit(number, way, draw.randrange(2), draw.randint(1, STEPS // 3), draw.uniform(0, 2), away_s)


def last(folder: Path) -> tuple[int, int]:
    """Returns (step, world size) of the last step in a host's records, as its own ranks or a copy wrote it."""
    found = steps(folder) if (folder / "metrics.jsonl").exists() else []
    return (found[-1]["step"], found[-1]["world_size"]) if found else (0, 0)


def started(pair: SshHosts, on: int, run_name: str, *flags: str) -> Program:
    """`paceline launch` on host number `on`."""
    launch = ("launch", "--ssh", pair.ssh, "--python", pair.warm_python, "--hosts", "a:1,b:1", "--min-hosts", "1")
    train = ("--chdir", str(pair.disk), "--", "train", *FLAGS, *flags, "--out", run_name)
    return Program(*launch, *train, host=pair.hosts[on], env={"PACELINE_FAULTS": PACE})


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_host(pair: SshHosts, number: int) -> None:
    """Stopped first, so that nobody sees another die."""
    while pids := pair.pids(number):
        for each in (signal.SIGSTOP, signal.SIGKILL):
            signal_all(pids, each)
        time.sleep(0.01)


def make(hit: Hit, pair: SshHosts, straight: list[float]) -> None:
    """Makes one disturbed run and judges it."""
    victim, host = hit.victim, pair.hosts[hit.victim]
    folders = [pair.disk_of(number) / f"run-{hit.number}" for number in (0, 1)]
    with started(pair, 1 - victim, folders[0].name) as program:
        program.wait_for(lambda: last(folders[0])[0] >= hit.at_step)
        time.sleep(hit.after_s)
        asleep = [program.pid] if hit.way == "coordinator" else pair.pids(victim) if hit.way == "sleep" else []
        if hit.way in ("power", "cable"):
            host.cable("down")
        if hit.way in ("kill", "power"):
            kill_host(pair, victim)
        signal_all(asleep, signal.SIGSTOP)
        lost_s = time.monotonic()
        if hit.way not in SLEEPS:
            hit.on_s = _until(lambda: last(folders[1 - victim])[1] == 1, program, lost_s)
        time.sleep(max(0.0, lost_s + hit.away_s - time.monotonic()))
        if hit.way in ("power", "cable"):
            host.cable("up")
        signal_all(asleep, signal.SIGCONT)
        came_s = time.monotonic()
        if hit.on_s:
            alone = max(last(folder)[0] for folder in folders)
            is_back = lambda: any(step > alone and size == 2 for step, size in map(last, folders))  # noqa: E731
            hit.back_s = _until(is_back, program, came_s)
        ended = program.wait(_DEADLINE_S)
        program.wait_until_gone()
    if ended.status:
        hit.problems.append(f"it ended with {ended.status}: {ended.err[-1500:]}")
    else:
        judge(hit, folders, straight)
    if not hit.problems and hit.way in SLEEPS and {row["world_size"] for row in steps(folders[0])} != {2}:
        hit.problems.append("a sleep changed the hosts")


def _until(condition: Callable[[], bool], program: Program, began_s: float) -> float | None:
    """Returns the seconds until the condition held; None if the run ended before."""
    while program.process.poll() is None and time.monotonic() < began_s + _DEADLINE_S:
        if condition():
            return round(time.monotonic() - began_s, 2)
        time.sleep(0.02)
    return None


def judge(hit: Hit, folders: list[Path], straight: list[float]) -> None:
    """Compares the records and checkpoints of both hosts with the undisturbed run, and with each other."""
    for folder in folders:
        try:
            found = losses(folder)  # fails if a step is missing or there twice
        except AssertionError:
            hit.problems.append(f"{folder} does not have each step once")
            continue
        if len(found) != len(straight):
            hit.problems.append(f"{folder} has {len(found)} steps")
        elif (apart := max(abs(a - b) for a, b in zip(found, straight, strict=True))) > TOLERANCE:
            hit.problems.append(f"{folder}: the losses differ by up to {apart:.1e}")
    manifests = [(folder / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_bytes() for folder in folders]
    if manifests[0] != manifests[1]:
        hit.problems.append("the last checkpoints differ")


def table(hits: list[Hit]) -> str:
    """Returns what all runs came to, by the way in which the host was lost."""
    lines = ["lost by      runs  failed  next step after, s (median, most)  back after, s (median, most)"]
    for way in (*WAYS, "all"):
        mine = [hit for hit in hits if way in (hit.way, "all")]
        times = [_median_and_most([getattr(hit, name) for hit in mine]) for name in ("on_s", "back_s")]
        failed = sum(bool(hit.problems) for hit in mine)
        lines.append(f"{way:<11}{len(mine):>6}{failed:>8}{times[0]:>35}{times[1]:>30}")
    return "\n".join(lines)


def _median_and_most(seconds: list[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return f"{statistics.median(known):.1f}, {max(known):.1f} of {len(known)}" if known else "none"


def undisturbed(base: Path) -> list[float]:
    """Returns the losses of one process that nobody disturbs."""
    run("train", *FLAGS, "--out", str(base / "straight")).require(0)
    return losses(base / "straight")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # hosts share the cores
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no host behind
    base = Path(tempfile.mkdtemp(prefix="hosts-campaign-"))
    straight, hits = undisturbed(base), []
    for number in range(arguments.first, arguments.first + arguments.runs):
        hit, folder = plan(number, arguments.seed), base / str(number)
        folder.mkdir()
        with ssh_hosts(folder) as pair:
            try:
                make(hit, pair, straight)
            except AssertionError as error:
                hit.problems.append(str(error)[-2000:])
        hits.append(hit)
        print(json.dumps(vars(hit)), flush=True)
    print(table(hits))
    return int(any(hit.problems for hit in hits))


if __name__ == "__main__":
    sys.exit(main())
