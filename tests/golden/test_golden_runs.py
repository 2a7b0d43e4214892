"""Run folders that commit 3c0a85c wrote, stopped after step 4 of 6 on 2 ranks, one for each strategy and two wires.

The present code resumes a copy of each as 3c0a85c did: on 2 ranks, which is the curve of the run that was not stopped,
on 1 and on 3 (hsdp: 4). Former checkpoints are read, or refused with what to do: a later change of what a checkpoint
holds is tested with these folders, and does not make them anew.

Finds "an optimizer's moments are lost on resume" in tests/mutations.py.
"""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import golden
import pytest
from ranks import run_ranks
from test_golden_curves import STRATEGIES, TINY, config_of, curve
from whole_runs import train_on

from paceline.config import Config, load_run
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

FILE = "runs/curves.json"
RUNS = golden.HERE / "runs"
STOP = 4  # with `local`: amid the second round of three steps
SMALL = TINY | {"model.n_layer": 2, "model.n_embd": 16, "parallel.bucket_mb": 0.02, "train.dtype": "float32"}
CASES = {name: own for name, own in STRATEGIES.items() if name != "int4"}
# hsdp on two hosts of two: it takes hosts of equally many ranks.
CONTINUED = [f"{name} {world}" for name in CASES for world in (1, 2, 4 if name == "hsdp" else 3)]
SHORT = ("zero 2", "local 2")
NOT_NEEDED = ("ranks", "report.html", "lock")  # to resume


def settings_of(name: str) -> dict[str, Any]:
    return SMALL | {"parallel.strategy": name} | CASES[name]


def config_for(name: str, **changes: Any) -> Config:
    """Returns a config whose data.path is found from tests/golden/shards, wherever a copy of the run lies."""
    return config_of(settings_of(name), "tiny").replace("data", path="trained").replace("train", **changes)


def recorded_runs(_: ParallelConfig, env: Environment, folder: str) -> dict[str, dict[str, Any]]:
    """Makes all run folders here, and returns the curves of the runs that were not stopped, on rank 0."""
    os.chdir(golden.SHARDS)
    curves = {}
    for name in CASES:
        whole, stopped = Path(folder, "whole", name), Path(folder, "stopped", name)
        train_on(2, env, config_for(name), whole)
        train_on(2, env, config_for(name, stop_at_step=STOP), stopped, status=75)
        if env.rank == 0:
            curves[name] = curve(whole)
    return curves


def continued(_: ParallelConfig, env: Environment, base: Path, cases: list[str]) -> dict[str, dict[str, Any]]:
    """Resumes a copy of the run of each case, and returns their curves on rank 0."""
    gc.freeze()
    os.chdir(golden.SHARDS)
    curves = {}
    for case in cases:
        run = base / case
        config = load_run(run / "config.toml").replace("train", stop_at_step=0)  # as `paceline resume`
        train_on(int(case.split()[1]), env, config, run, resume=True)
        if env.rank == 0:
            curves[case] = curve(run)
    return curves


def computed(cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns case -> curve of the run that a copy of each folder is continued to."""
    chosen = list(cases)
    num_ranks, timeout_s = max(int(case.split()[1]) for case in chosen), 60 + 10 * len(chosen)
    with tempfile.TemporaryDirectory() as base:
        for case in chosen:
            shutil.copytree(RUNS / case.split()[0], Path(base, case))
        curves: dict[str, dict[str, Any]] = run_ranks(
            continued, num_ranks, Path(base), chosen, timeout_s=timeout_s, opened=False
        )[0]
    return curves


def record() -> None:
    """Makes the folders anew, too: only with the code of 3c0a85c (README.md)."""
    shutil.rmtree(RUNS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run_ranks(recorded_runs, 2, folder, opened=False)[0]
        for name in CASES:
            shutil.copytree(Path(folder, "stopped", name), RUNS / name, ignore=shutil.ignore_patterns(*NOT_NEEDED))
    curves = computed(CONTINUED)
    for name in CASES:
        assert curves[f"{name} 2"] == undisturbed[name], name
    golden.store(FILE, {"rounding": golden.rounding(), "curves": curves})


def assert_as_recorded(cases: Iterable[str]) -> None:
    recorded = golden.load(FILE)
    is_exact = recorded["rounding"] == golden.rounding()
    wrong = []
    for case, now in computed(cases).items():
        tolerance = 0 if is_exact else golden.tolerance(settings_of(case.split()[0]))
        if where := golden.difference(recorded["curves"][case], now, tolerance):
            wrong.append(f"{case}: {where}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_run_that_was_stopped_continues_as_recorded() -> None:
    assert_as_recorded(SHORT)


@pytest.mark.long
def test_all_runs_continue_as_recorded() -> None:
    assert_as_recorded(CONTINUED)
