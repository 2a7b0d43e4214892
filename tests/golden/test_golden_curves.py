"""The curves of small runs, as commit 3c0a85c computed them: loss and gradient norm of each step, the validation loss
at the end, and a digest of the last weights.

Finds "Adam's first beta is its second" and "the divisor of the loss counts one token too many" in tests/mutations.py.
"""

import gc
import itertools
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import golden
import pytest
from program import digest, losses, steps, val_loss
from ranks import run_ranks
from whole_runs import train_on

from paceline.config import Config, load_preset
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

FILE = "curves.json"
# A model of 45,000 parameters in four buckets, two local rounds, and 5 micro-batches, of which the last is smaller:
# neither 2 nor 3 ranks divide them.
TINY = {
    "model.n_embd": 32,
    "data.path": "trained",
    "data.seq_len": 16,
    "optim.lr": 0.01,
    "optim.warmup_steps": 2,
    "train.steps": 6,
    "train.global_batch_size": 9,
    "train.eval_sequences": 8,
    "train.sample_tokens": 0,
    "parallel.threads": 1,
    "parallel.bucket_mb": 0.05,
    "parallel.check_every": 3,
}
FAST = {
    "model.size": "given",
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.n_embd": 32,
    "data.path": "",
    "data.mix": ("trained=3", "again=1"),
    "data.seq_len": 32,
    "train.steps": 20,
    "train.time_budget": 0.0,
    "train.max_epochs": 0.0,
    "train.global_batch_size": 8,
    "train.device_batch_size": 2,
    "train.eval_every": 10,
    "train.eval_sequences": 8,
    "train.sample_tokens": 0,
    "parallel.threads": 1,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "naive": {},
    "zero": {},
    "fsdp": {},
    "hsdp": {},
    "local": {"parallel.sync_every": 3},
    "bf16": {"parallel.strategy": "zero", "parallel.wire": "bf16"},
    "int8": {"parallel.strategy": "zero", "parallel.wire": "int8"},
    "int4": {"parallel.strategy": "zero", "parallel.wire": "int4"},
}
OPTIMIZERS, DTYPES, WORLDS = ("adamw", "muon"), ("float32", "bfloat16"), (1, 2, 3)


def cases() -> dict[str, dict[str, Any]]:
    """Returns name -> what is changed in the preset; each name ends in the number of ranks."""
    found: dict[str, dict[str, Any]] = {}
    for strategy, optimizer, dtype, world in itertools.product(STRATEGIES, OPTIMIZERS, DTYPES, WORLDS):
        ranks = 4 if strategy == "hsdp" and world == 3 else world  # two hosts of two
        own = {"parallel.strategy": strategy, **STRATEGIES[strategy], "optim.name": optimizer, "train.dtype": dtype}
        found[f"tiny {strategy} {optimizer} {dtype} {ranks}"] = TINY | own
    for dtype, world in itertools.product(DTYPES, WORLDS):
        found[f"fast {dtype} {world}"] = FAST | {"train.dtype": dtype}
    plain = TINY | {"train.dtype": "float32", "parallel.strategy": "zero"}
    others: dict[str, dict[str, Any]] = {
        "gpt2 dropout": {"model.arch": "gpt2", "model.bias": True, "model.dropout": 0.1},
        "bestfit masked": {"data.packing": "bestfit", "data.mask_documents": True},
        "bytes": {"data.path": "bytes", "model.qk_norm": True, "model.n_kv_head": 1},
        "layered": {"train.layered_micro_batches": 3, "train.activation_checkpoint": True},
        "sockets": {"parallel.shared_memory": False},
    }
    for (name, own), world in itertools.product(others.items(), WORLDS):
        found[f"tiny {name} {world}"] = plain | own
    found["tiny shares 2"] = plain | {"parallel.shares": "7,2"}
    found["tiny shares 3"] = plain | {"parallel.shares": "2,7,0"}
    return found


CASES = cases()
# A few of each kind; runs/ and the long tests have the others.
SHORT = ("tiny gpt2 dropout 1", "tiny fsdp muon float32 2", "tiny int8 adamw float32 2")


def config_of(settings: dict[str, Any], preset: str) -> Config:
    """Returns the preset with these changes; data sets are those of tests/golden/shards."""
    config = load_preset(preset, Config())
    for name, value in settings.items():
        section, field = name.split(".")
        if name == "data.path" and value:
            value = str(golden.SHARDS / value)
        if name == "data.mix":
            value = tuple(f"{golden.SHARDS}/{part}" for part in value)
        config = config.replace(section, **{field: value})
    config.check()
    return config


def curves_of(_: ParallelConfig, env: Environment, base: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns each run's curve, on rank 0; a name ends in the number of the first ranks that train it."""
    gc.freeze()  # the collections at each run's end are of what the run made
    found = {}
    for number, name in enumerate(names):
        folder = base / str(number)
        train_on(int(name.split()[-1]), env, config_of(CASES[name], name.split()[0]), folder)
        if env.rank == 0:
            found[name] = curve(folder)
    return found


def curve(run_folder: Path) -> dict[str, Any]:
    return {
        "loss": losses(run_folder),
        "grad_norm": [row["grad_norm"] for row in steps(run_folder)],
        "val_loss": val_loss(run_folder),
        "digest": digest(run_folder),
    }


def computed(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns name -> curve, in the order of the names; the same processes train them all."""
    chosen = list(names)
    num_ranks, timeout_s = max(int(name.split()[-1]) for name in chosen), 60 + 10 * len(chosen)
    with tempfile.TemporaryDirectory() as base:
        curves: dict[str, dict[str, Any]] = run_ranks(
            curves_of, num_ranks, Path(base), chosen, timeout_s=timeout_s, opened=False
        )[0]
    return curves


def record() -> None:
    golden.store(FILE, {"rounding": golden.rounding(), "curves": computed(CASES)})


def assert_as_recorded(names: Iterable[str]) -> None:
    recorded = golden.load(FILE)
    is_exact = recorded["rounding"] == golden.rounding()
    wrong = []
    for name, now in computed(names).items():
        tolerance = 0 if is_exact else golden.tolerance(CASES[name])
        if where := golden.difference(recorded["curves"][name], now, tolerance):
            wrong.append(f"{name}: {where}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_each_case_is_recorded() -> None:
    assert list(golden.load(FILE)["curves"]) == list(CASES)


def test_a_few_curves_are_those_recorded() -> None:
    assert_as_recorded(SHORT)


def usual(name: str) -> bool:
    """Whether a case is trained unless all is asked for: of each strategy AdamW in float32 and Muon in bfloat16 by
    turns, on one rank, on two and on more."""
    _, strategy, *how, world = name.split()
    if strategy not in STRATEGIES:
        return True
    turn = list(STRATEGIES).index(strategy) + min(int(world), 3)
    return how == (["adamw", "float32"] if turn % 2 else ["muon", "bfloat16"])


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_curves_of_any_strategy_and_world_are_those_recorded(world: int) -> None:
    """With PACELINE_TEST_ALL_CURVES=1, for a rebuilding, all cases."""
    is_wanted = (lambda name: True) if "PACELINE_TEST_ALL_CURVES" in os.environ else usual
    assert_as_recorded([name for name in CASES if name.endswith(f" {world}") and is_wanted(name)])
