"""Runs that are hit at random, each held against the run that nobody disturbed.

    python tests/faults/campaign.py --runs 100 --seed 1
    python tests/faults/campaign.py --runs 250 --seed 7 --append tests/faults/kills.jsonl   # what was run so far

A run is hit once or twice: SIGKILL of one rank at a random (rank, step, phase), steps' phases and a save's; SIGKILL of
the launcher there; SIGKILL of one rank or of everything at a random moment, from outside. It must end: by itself
(--max-restarts) or by `paceline resume`. Then its weights and its optimizer's state must have the digests of the
undisturbed run, its metrics each step once and bit for bit, and no restart may have repeated more than a save interval.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from program import TINY, Program, losses, rows, run, steps

from paceline.base.faults import SAVE_PHASES, STEP_PHASES

STEPS, EVERY = 40, 5
MICRO_BATCHES = ("--train.device-batch-size", "4")  # three
SETTINGS = (
    (2, ("--parallel.strategy", "ddp")),
    (2, ("--parallel.strategy", "zero", "--optim.name", "muon")),
    (3, ("--parallel.strategy", "zero")),
    (2, ("--parallel.strategy", "fsdp")),
    (2, ("--parallel.wire", "int4")),
    (3, ("--parallel.wire", "int8", "--optim.name", "muon")),
    (2, ("--parallel.wire", "bf16", "--parallel.strategy", "zero")),
    (2, ("--parallel.strategy", "zero", "--train.layered-micro-batches", "2")),
    (2, ("--parallel.strategy", "local", "--parallel.sync-every", "4")),
)
BY_RANK_0 = ("save.manifest", "save.rename", "save.prune")  # of a save's phases
WAYS = ("rank", "rank", "save", "launcher", "all", "outside", "twice")


@dataclass
class Hit:
    """One disturbed run: how it was hit, how it ended."""

    number: int
    way: str
    what: str
    setting: int
    problems: list[str] = field(default_factory=list)
    by_itself: bool = False
    restarts: int = 0
    most_repeated: int = 0
    back_s: list[float] = field(default_factory=list)  # from a rank's death, seen from outside, to the next step


def flags(setting: int) -> tuple[str, ...]:
    return (
        *TINY,
        "--train.device-batch-size",
        "4",
        "--checkpoint.every",
        str(EVERY),
        "--nproc",
        str(SETTINGS[setting][0]),
        *SETTINGS[setting][1],
    )


def ending(folder: Path) -> dict[str, Any]:
    """What the run came to: its digests and its curve."""
    end = [row for row in rows(folder / "events.jsonl") if row["event"] == "end"][-1]
    return {"weights": end["digest"], "state": end["state_digests"], "losses": losses(folder)}


def undisturbed(base: Path, setting: int) -> dict[str, Any]:
    folder = base / f"straight-{setting}"
    run("train", *flags(setting), "--out", str(folder)).require(0)
    return ending(folder)


def one_fault(draw: random.Random, num_ranks: int, phases: tuple[str, ...], kind: str, attempt: int = 0) -> str:
    phase = draw.choice(phases)
    rank = 0 if phase in BY_RANK_0 or (phases is SAVE_PHASES and draw.random() < 0.5) else draw.randrange(num_ranks)
    step = EVERY * draw.randint(1, STEPS // EVERY) if phases is SAVE_PHASES else draw.randint(1, STEPS)
    return f"rank={rank} step={step} phase={phase} kind={kind} attempt={attempt}"


def plan(number: int, seed: int) -> tuple[Hit, dict[str, str], float]:
    """How run `number` is hit: the hit, the environment that injects it, and when the hit from outside comes."""
    draw = random.Random(f"{seed} {number}")
    way, setting = draw.choice(WAYS), draw.randrange(len(SETTINGS))
    num_ranks = SETTINGS[setting][0]
    faults = {
        "rank": lambda: one_fault(draw, num_ranks, STEP_PHASES, "kill"),
        "save": lambda: one_fault(draw, num_ranks, SAVE_PHASES, "kill"),
        "launcher": lambda: one_fault(draw, num_ranks, draw.choice((STEP_PHASES, SAVE_PHASES)), "launcher"),
        "twice": lambda: "; ".join(
            one_fault(draw, num_ranks, draw.choice((STEP_PHASES, SAVE_PHASES)), "kill", attempt) for attempt in (0, 1)
        ),
    }
    text = faults[way]() if way in faults else ""
    after_s = draw.uniform(0.0, 1.2)  # from the first step on
    what = text or f"kill -9 of {'everything' if way == 'all' else 'one rank'} {after_s:.2f} s after the first step"
    return Hit(number, way, what, setting), {"PACELINE_FAULTS": text} if text else {}, after_s


def make(hit: Hit, env: dict[str, str], after_s: float, base: Path, straight: dict[str, Any]) -> Hit:
    """Makes one disturbed run, as `plan` says, and notes how it ended."""
    folder = base / f"run-{hit.number}"
    with Program("train", *flags(hit.setting), "--max-restarts", "3", "--out", str(folder), env=env) as program:
        if hit.way in ("all", "outside"):
            program.wait_for(lambda: steps(folder))
            time.sleep(after_s)
            if hit.way == "all":
                program.kill_all()
            else:
                kill_one(program, folder, hit, random.Random(hit.number))
        ended = program.wait()
        program.wait_until_gone()
    hit.by_itself = ended.status == 0
    for _ in range(3):
        if ended.status == 0:
            break
        ended = run("resume", str(folder), "--nproc", str(SETTINGS[hit.setting][0]), "--max-restarts", "3")
    if ended.status != 0:
        hit.problems.append(f"ended with {ended.status}: {ended.err[-300:]}")
        return hit
    judge(hit, folder, straight)
    return hit


def kill_one(program: Program, folder: Path, hit: Hit, draw: random.Random) -> None:
    """SIGKILL of one rank from outside; notes the seconds until a step is made again."""
    ranks = program.ranks()
    if program.process.poll() is not None or not ranks:
        return
    known = len([row for row in rows(folder / "events.jsonl") if row["event"] in ("start", "resume")])
    os.kill(draw.choice(list(ranks.values())), signal.SIGKILL)
    began = time.monotonic()

    def is_back() -> bool:
        if program.process.poll() is not None:
            return True
        found = [row for row in rows(folder / "events.jsonl") if row["event"] in ("start", "resume")]
        return len(found) > known and len(steps(folder)) > (found[-1].get("step") or 0)

    program.wait_for(is_back)
    if program.process.poll() is None:
        hit.back_s.append(time.monotonic() - began)


def judge(hit: Hit, folder: Path, straight: dict[str, Any]) -> None:
    found = ending(folder)
    for name in ("weights", "state", "losses"):
        if found[name] != straight[name]:
            hit.problems.append(f"{name} differ from the undisturbed run's")
    for row in rows(folder / "events.jsonl"):
        if row["event"] in ("start", "resume") and row.get("reached"):
            hit.restarts += 1
            hit.most_repeated = max(hit.most_repeated, row["reached"] - (row.get("step") or 0))
    if hit.most_repeated > EVERY:
        hit.problems.append(f"{hit.most_repeated} steps were made again, a save interval is {EVERY}")


def summary(hits: list[Hit]) -> str:
    """What all runs came to, in a paragraph."""
    back = [seconds for hit in hits for seconds in hit.back_s]
    parts = [
        f"{len(hits)} runs, {sum(bool(hit.problems) for hit in hits)} with problems",
        f"{sum(hit.restarts > 0 for hit in hits)} began again with steps made",
        f"{sum(hit.by_itself for hit in hits)} ended by themselves, the others by resume",
        f"{sum(hit.restarts for hit in hits)} restarts",
        f"at most {max(hit.most_repeated for hit in hits)} steps made again, of a save interval of {EVERY}",
    ]
    if back:
        parts.append(f"training again after {statistics.median(back):.1f} s (at most {max(back):.1f})")
    return "; ".join(parts)


def record(hits: list[Hit], seed: int) -> dict[str, Any]:
    """Returns the line of kills.jsonl: which runs of which commit these were, and what they came to."""
    root = Path(__file__).resolve().parents[2]
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty", "--abbrev=12"), cwd=root, capture_output=True, text=True, check=True
    )
    back = [seconds for hit in hits for seconds in hit.back_s]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "seed": seed,
        "first": hits[0].number,
        "runs": len(hits),
        "with_problems": [vars(hit) for hit in hits if hit.problems],
        "by_way": Counter(hit.way for hit in hits),
        "ended_by_themselves": sum(hit.by_itself for hit in hits),
        "restarts": sum(hit.restarts for hit in hits),
        "most_repeated": max(hit.most_repeated for hit in hits),
        "median_back_s": round(statistics.median(back), 2) if back else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--append", type=Path, help="the file to which a line of what all runs came to is appended")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="campaign-"))
    straight = {}
    hits = []
    for number in range(arguments.first, arguments.first + arguments.runs):
        setting = plan(number, arguments.seed)[0].setting
        if setting not in straight:
            straight[setting] = undisturbed(base, setting)
        try:
            hit = make(*plan(number, arguments.seed), base, straight[setting])
        except AssertionError as error:
            hit = plan(number, arguments.seed)[0]
            hit.problems.append(str(error)[-900:])
        hits.append(hit)
        print(json.dumps(vars(hit)), flush=True)
        if not hit.problems:
            shutil.rmtree(base / f"run-{number}", ignore_errors=True)
    print(summary(hits))
    if arguments.append:
        with arguments.append.open("a") as file:
            file.write(json.dumps(record(hits, arguments.seed)) + "\n")
    return int(any(hit.problems for hit in hits))


if __name__ == "__main__":
    sys.exit(main())
