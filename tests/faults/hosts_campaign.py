"""Two hosts, each with a launcher and a disk of its own; one is lost at a random moment and comes back.

    python tests/faults/hosts_campaign.py --runs 20 --seed 1

A host is lost by SIGKILL of everything on it, by its power (the cable is silent first), by its cable alone, or it
sleeps like a closed laptop; either host may be the one. It comes back after up to 4 s: the same command again, the
cable, or it wakes up. Every run must end by itself on both hosts with the curve of the undisturbed run within 1e-4,
each step once in the records of both hosts, and the last checkpoint on both. Prints a line for each run and a table of
the times. Linux, as root.
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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from namespaces import Host, two_hosts
from program import TINY, Program, losses, run, steps

STEPS, EVERY, TOLERANCE = 160, 20, 1e-4
WAYS = ("kill", "power", "cable", "sleep")
PACE = "rank=0 step=1 phase=data kind=sleep seconds=0.04 times=1000 attempt=any"  # else it would end before the return
FLAGS = (*TINY, "--train.device-batch-size", "6", "--train.steps", str(STEPS), "--checkpoint.every", str(EVERY))
_DEADLINE_S = 180.0


@dataclass
class Hit:
    """One disturbed run: how it was hit, how it ended."""

    number: int
    way: str
    victim: int  # the first host leads at the start: it has rank 0
    at_step: int  # 0: while it starts
    after_s: float  # from that step
    away_s: float
    problems: list[str] = field(default_factory=list)
    on_s: float | None = None  # from the loss to the next step
    back_s: float | None = None  # from the return to the first step with all hosts


def plan(number: int, seed: int) -> Hit:
    """Returns how run `number` is hit."""
    draw = random.Random(f"{seed} {number}")
    at_step = 0 if draw.random() < 0.2 else draw.randint(1, STEPS // 3)
    after_s = draw.uniform(0, 2 if at_step else 6)
    return Hit(number, draw.choice(WAYS), draw.randrange(2), at_step, after_s, draw.uniform(0, 4))


class Machine:
    """A host with its own run folder."""

    def __init__(self, hosts: list[Host], number: int, base: Path, stack: ExitStack):
        self.host, self.folder, self._stack = hosts[number], base / hosts[number].name / "run", stack
        self._addresses = ",".join(f"{host.address}:29400" for host in hosts)

    def start(self) -> None:
        """Starts the command, as a person does on each host, the first time and after each loss."""
        wish = ("--hosts", self._addresses, "--min-hosts", "1", "--out", str(self.folder))
        program = Program("train", *FLAGS, *wish, env={"PACELINE_FAULTS": PACE}, host=self.host)
        self.program = self._stack.enter_context(program)

    def lose(self, way: str) -> None:
        if way in ("power", "cable"):
            self.host.cable("down")
        if way in ("kill", "power"):
            self.program.kill_all()
        if way == "sleep":
            self._signal(signal.SIGSTOP)

    def come_back(self, way: str) -> None:
        if way in ("power", "cable"):
            self.host.cable("up")
        if way in ("kill", "power"):
            self.start()
        if way == "sleep":
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.program.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def last(self) -> tuple[int, int]:
        """Returns (step, world size) of the last step in this host's records, as its own ranks or a copy wrote it."""
        found = steps(self.folder) if (self.folder / "metrics.jsonl").exists() else []
        return (found[-1]["step"], found[-1]["world_size"]) if found else (0, 0)


def make(hit: Hit, hosts: list[Host], base: Path, straight: list[float]) -> None:
    """Makes one disturbed run and judges it."""
    with ExitStack() as stack:
        machines = [Machine(hosts, number, base, stack) for number in (0, 1)]
        for machine in machines:
            machine.start()
        victim, survivor = machines[hit.victim], machines[1 - hit.victim]
        if hit.at_step:
            machines[0].program.wait_for(lambda: len(steps(machines[0].folder)) >= hit.at_step)
        time.sleep(hit.after_s)
        victim.lose(hit.way)
        lost_s = time.monotonic()
        if hit.at_step:
            hit.on_s = _until(lambda: survivor.last()[1] == 1, survivor, lost_s)
        time.sleep(max(0.0, lost_s + hit.away_s - time.monotonic()))
        victim.come_back(hit.way)
        came_s = time.monotonic()
        if hit.on_s:
            alone = max(machine.last()[0] for machine in machines)
            is_back = lambda: any(step > alone and size == 2 for step, size in (m.last() for m in machines))  # noqa: E731
            hit.back_s = _until(is_back, survivor, came_s)
        for machine in machines:
            ended = machine.program.wait(_DEADLINE_S)
            if ended.status:
                hit.problems.append(f"{machine.host.name} ended with {ended.status}: {ended.err[-600:]}")
        if not hit.problems:
            judge(hit, [machine.folder for machine in machines], straight)


def _until(condition: Callable[[], bool], machine: Machine, began_s: float) -> float | None:
    """Returns the seconds until the condition held; None if the run ended before."""
    while machine.program.process.poll() is None and time.monotonic() < began_s + _DEADLINE_S:
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
    lines = ["lost by  runs  failed  next step after, s (median, most)  back after, s (median, most)"]
    for way in (*WAYS, "all"):
        mine = [hit for hit in hits if way in (hit.way, "all")]
        times = [_median_and_most([getattr(hit, name) for hit in mine]) for name in ("on_s", "back_s")]
        failed = sum(bool(hit.problems) for hit in mine)
        lines.append(f"{way:<7}{len(mine):>6}{failed:>8}{times[0]:>35}{times[1]:>30}")
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
        hit = plan(number, arguments.seed)
        with two_hosts() as hosts:
            try:
                make(hit, hosts, base, straight)
            except AssertionError as error:
                hit.problems.append(str(error)[-2000:])
        hits.append(hit)
        print(json.dumps(vars(hit)), flush=True)
    print(table(hits))
    return int(any(hit.problems for hit in hits))


if __name__ == "__main__":
    sys.exit(main())
