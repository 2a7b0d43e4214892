"""The law: shares decide who computes a sequence; the sequences of a step and its loss stay the same.

test_one_curve.py has shares that are given; here they follow the ranks' speeds.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from program import losses, rows, steps
from ranks import run_ranks
from whole_runs import tiny, train_on

from paceline.config import Config
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

# Rank 1 is slow in every step, by more than a busy machine makes rank 0, so that auto changes the shares.
SLOW = "rank=1 step=3 phase=data kind=sleep seconds=0.3 times=60"
STEPS, STOP = 50, 30


def config(**changes: Any) -> Config:
    few = {"train__steps": STEPS, "train__device_batch_size": 2, "train__eval_every": -1, "parallel__check_every": 10}
    return tiny(**few, **changes)


def train_all(_: ParallelConfig, env: Environment, base: Path) -> None:
    """One process; two, of which one is slow, until they are stopped; from there on two, and three."""
    train_on(1, env, config(), base / "alone")
    os.environ["PACELINE_FAULTS"] = SLOW
    train_on(2, env, config(parallel__shares="auto", train__stop_at_step=STOP), base / "stopped", 75)
    del os.environ["PACELINE_FAULTS"]
    for num_ranks in (2, 3):
        folder = base / f"on-{num_ranks}"
        if env.rank == 0:
            shutil.copytree(base / "stopped", folder)
        train_on(num_ranks, env, config(parallel__shares="auto"), folder, resume=True)


def shares_by_step(folder: Path) -> dict[int, list[int]]:
    """Replays the events: step -> sequences by rank."""
    found: dict[int, list[int]] = {}
    for event in rows(folder / "events.jsonl"):
        if "sequences" in event:
            first = event["step"] + (event["event"] == "resume") if event["event"] != "start" else 1
            found.update(dict.fromkeys(range(first, STEPS + 1), event["sequences"]))
    return found


@pytest.mark.long
def test_auto_resumes_with_its_shares_in_the_same_world_and_with_equal_ones_in_another(tmp_path: Path) -> None:
    run_ranks(train_all, 3, tmp_path, opened=False)
    manifest = json.loads((tmp_path / f"stopped/checkpoints/step-{STOP:08d}/manifest.json").read_text())
    saved = manifest["progress"]["sequences"]
    assert saved == shares_by_step(tmp_path / "stopped")[STOP + 1]
    assert saved[0] > saved[1], "auto never changed the shares"
    for folder, expected in ((tmp_path / "on-2", saved), (tmp_path / "on-3", [4, 4, 4])):
        (event,) = [row for row in rows(folder / "events.jsonl") if row["event"] == "resume"]
        assert event["sequences"] == steps(folder)[STOP]["rank_sequences"] == expected
        assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
        replayed = shares_by_step(folder)
        for row in steps(folder):
            assert row["rank_sequences"] == replayed[row["step"]]
            assert sum(row["rank_sequences"]) == 12
