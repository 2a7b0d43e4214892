"""The law: what any strategy saved on any number of ranks, any other goes on from, on any other number of ranks.

Four processes are started once. A world of fewer ranks is the first of them, so nothing but training takes time.
"""

import dataclasses
import itertools
import os
import shutil
import socket
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from program import losses
from ranks import run_ranks

from paceline.config import Config, load_preset
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

STRATEGIES = ("ddp", "zero", "fsdp")
WORLDS = (1, 2, 3, 4)
SAVED_AT, STEPS = 4, 8
TOLERANCE = 1e-4  # seen are 1e-6, of sums in another order


Place = tuple[str, int]  # the strategy and the number of ranks with which a part of a run is trained
Pair = tuple[Place, Place]
EVERY_PAIR: list[Pair] = list(itertools.product(itertools.product(STRATEGIES, WORLDS), repeat=2))


def covering() -> list[Pair]:
    """Sixteen pairs: every pair of worlds once, every pair of strategies at least once. And hsdp, on 2 x 2 ranks."""
    strategies = itertools.cycle(itertools.product(STRATEGIES, STRATEGIES))
    worlds = itertools.product(WORLDS, WORLDS)
    pairs = [((a, m), (b, n)) for (m, n), (a, b) in zip(worlds, strategies, strict=False)]
    return [*pairs, (("zero", 3), ("hsdp", 4)), (("hsdp", 4), ("fsdp", 3)), (("hsdp", 4), ("hsdp", 2))]


def name(*places: Place) -> str:
    return "-to-".join(f"{strategy}-{world}" for strategy, world in places)


def tiny(strategy: str, stop_at_step: int = 0) -> Config:
    config = load_preset("tiny", Config())
    config = config.replace("train", steps=STEPS, sample_tokens=0, eval_every=-1, stop_at_step=stop_at_step)
    return config.replace("parallel", strategy=strategy, threads=1, check_every=1)


def train_here(place: Place, env: Environment, folder: Path, stop_at_step: int = 0, resume: bool = False) -> None:
    """Trains as one of the first ranks, when rank 0 says so: a world that still waits for its own would refuse them."""
    strategy, world = place
    turn = folder.with_name(f"{folder.name}.turn")
    if env.rank == 0:
        turn.touch()
    if env.rank >= world:
        return
    while not turn.exists():
        time.sleep(0.01)
    smaller = dataclasses.replace(env, world_size=world, local_world_size=world)
    host = (
        f"{socket.gethostname()}-{env.rank // 2}" if strategy == "hsdp" else socket.gethostname()
    )  # two ranks on each
    with patch("socket.gethostname", lambda: host):
        status = train(Request(tiny(strategy, stop_at_step), folder, resume=resume), smaller)
    assert status == (75 if stop_at_step else 0)


def save_and_go_on(_: ParallelConfig, env: Environment, base: Path, pairs: list[Pair]) -> dict[str, list[float]]:
    """On rank 0: the losses of the straight run, and of each pair's."""
    train_here(("ddp", 1), env, base / "straight")
    for place in dict.fromkeys(first for first, _ in pairs):
        train_here(place, env, base / name(place), stop_at_step=SAVED_AT)
    for first, second in pairs:
        folder = base / name(first, second)
        if env.rank == 0:
            shutil.copytree(base / name(first), folder)
        train_here(second, env, folder, resume=True)
    return {path.name: losses(path) for path in base.iterdir() if path.is_dir()} if env.rank == 0 else {}


def largest_difference(base: Path, pairs: list[Pair]) -> float:
    """The largest difference of a loss from the straight run's over all pairs, each of which has all steps once."""
    found = run_ranks(save_and_go_on, max(WORLDS), base, pairs, timeout_s=30 + 5 * len(pairs), opened=False)[0]
    straight = found["straight"]
    assert len(straight) == STEPS
    worst = 0.0
    for first, second in pairs:
        curve = found[name(first, second)]
        assert len(curve) == STEPS, name(first, second)
        difference = max(abs(a - b) for a, b in zip(curve, straight, strict=True))
        assert difference <= TOLERANCE, f"{name(first, second)}: {difference}"
        worst = max(worst, difference)
    return worst


@pytest.mark.long
def test_each_pair_of_strategies_and_of_worlds(tmp_path: Path) -> None:
    largest_difference(tmp_path, covering())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif("PACELINE_TEST_ALL_PAIRS" not in os.environ, reason="minutes: PACELINE_TEST_ALL_PAIRS=1 runs it")
def test_each_of_the_144_pairs(tmp_path: Path) -> None:
    """PACELINE_TEST_ALL_PAIRS=1 python -m pytest -s tests/laws/test_any_to_any.py"""
    worst = largest_difference(tmp_path, EVERY_PAIR)
    print(f"\n{len(EVERY_PAIR)} resumes, the largest difference of a loss from the straight run's is {worst:.1e}")
