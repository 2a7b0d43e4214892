"""The law: a config and a seed have one curve, that of a plain loop, whatever the strategy and the number of ranks, and
wherever it is stopped and goes on.

Processes are started once for many runs; whole_runs.py has how they make worlds of any size. 9 sequences in
micro-batches of 4 are 4, 4 and 1: on two ranks and on three one has less to do. A run whose replicas differ in one bit
after any step ends with status 1, since they are compared after each.
"""

import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from plain_loop import plain_curve
from program import digest, losses, rows, steps, val_loss
from ranks import run_ranks
from whole_runs import SEQ_LEN, SHARDS, tiny, train_on

from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

TOLERANCE = 1e-5  # of a loss; seen are 1e-6, of sums in another order
TOLERANCE_BFLOAT16 = 1e-2  # there a last bit is larger
BATCH, STEPS = 9, 4
LAW = {
    **{"train__global_batch_size": BATCH, "train__steps": STEPS, "optim__lr": 0.01, "optim__warmup_steps": 1},
    **{"parallel__bucket_mb": 0.05, "parallel__check_every": 1},  # four buckets
}
# DESIGN.md, "The run folder".
PROMISED = {
    *("step", "loss", "lr", "grad_norm", "tokens", "step_ms", "tokens_per_s", "mfu", "compute_ms", "comm_ms"),
    *("exposed_comm_ms", "data_ms", "world_size", "rank_step_ms", "rank_compute_ms"),
}
PROMISED_OF_EVALUATION = {"step", "val_loss", "val_bpb", "tokens"}


class Run(NamedTuple):
    """A run that is stopped and goes on with another strategy or on another number of ranks, once for each part."""

    parts: tuple[tuple[str, int], ...]
    changes: dict[str, Any]

    @property
    def steps(self) -> int:
        steps: int = self.changes.get("train__steps", STEPS)
        return steps


class Curve(NamedTuple):
    """What a run came to."""

    losses: list[float]
    val_loss: float
    digest: str
    world_sizes: list[int]


def a_run(parts: str, **changes: Any) -> Run:
    """Returns the run of parts such as "zero 2, fsdp 3"."""
    words = [part.split() for part in parts.split(", ")]
    return Run(tuple((strategy, int(num_ranks)) for strategy, num_ranks in words), changes)


def train_all(_: ParallelConfig, env: Environment, base: Path, runs: list[Run]) -> list[Curve]:
    """Trains these runs, each in the folder of its number, and returns their curves on rank 0."""
    for number, run in enumerate(runs):
        for done, (strategy, num_ranks) in enumerate(run.parts, 1):
            stop_at = run.steps * done // len(run.parts) if done < len(run.parts) else 0
            changes = LAW | {"parallel__strategy": strategy, "train__stop_at_step": stop_at} | run.changes
            status = 75 if stop_at else 0
            train_on(num_ranks, env, tiny(**changes), base / str(number), status, resume=done > 1)
    folders = [base / str(number) for number in range(len(runs))] if env.rank == 0 else []
    return [
        Curve(losses(folder), val_loss(folder), digest(folder), [row["world_size"] for row in steps(folder)])
        for folder in folders
    ]


def curves_of(runs: list[Run], base: Path) -> list[Curve]:
    """Trains these runs with one set of processes, and returns their curves, which have each step once."""
    num_ranks = max(num_ranks for run in runs for _, num_ranks in run.parts)
    timeout_s = 60 + 5 * sum(len(run.parts) for run in runs)
    curves: list[Curve] = run_ranks(train_all, num_ranks, base, runs, timeout_s=timeout_s, opened=False)[0]
    assert [len(curve.losses) for curve in curves] == [run.steps for run in runs]
    return curves


def assert_same_curve(curve: Curve, expected: Curve, tolerance: float = TOLERANCE, what: object = "") -> None:
    assert curve.losses == pytest.approx(expected.losses, abs=tolerance), what
    assert curve.val_loss == pytest.approx(expected.val_loss, abs=tolerance), what


# ---- the law ----

# device_batch_size 5: two micro-batches, so that the third rank has none. With fsdp it makes passes of weight 0.
SHORT = [
    *(a_run("ddp 1"), a_run("ddp 2"), a_run("naive 3", train__device_batch_size=5)),
    *(a_run("zero 2"), a_run("zero 2, zero 2"), a_run("zero 2, fsdp 3", train__device_batch_size=5)),
]
ONE_RANK, TWO_RANKS, ZERO, ZERO_RESUMED = 0, 1, 3, 4  # in SHORT


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Curve]]:
    """The folder of the short test's runs, and their curves."""
    base = tmp_path_factory.mktemp("runs")
    return base, curves_of(SHORT, base)


def test_every_strategy_and_world_has_the_curve_of_a_plain_loop(short: tuple[Path, list[Curve]]) -> None:
    """Finds: naive without its all-reduce, a tail of a batch that counts as a whole micro-batch, betas swapped, moments
    lost by a resume on another number of ranks."""
    plain = plain_curve(tiny(**LAW))
    assert plain.losses[-1] < plain.losses[0] - 0.1, "it learns"
    for run, curve in zip(SHORT, short[1], strict=True):
        assert curve.losses == pytest.approx(plain.losses, abs=TOLERANCE), run
        assert curve.val_loss == pytest.approx(plain.val_loss, abs=TOLERANCE), run


def test_a_resume_on_as_many_ranks_is_exact_to_the_bit(short: tuple[Path, list[Curve]]) -> None:
    straight, resumed = short[1][ZERO], short[1][ZERO_RESUMED]
    assert (resumed.losses, resumed.digest) == (straight.losses, straight.digest)


STRATEGIES, WORLDS = ("ddp", "zero", "fsdp"), (1, 2, 3, 4)
Item = TypeVar("Item")


def each_after_each(items: Sequence[Item]) -> list[Item]:
    """Returns a sequence in which each of these follows each, itself too, once: that of de Bruijn."""
    found = []
    for number, item in enumerate(items):
        found.append(item)
        for other in items[number + 1 :]:
            found += [item, other]
    return [*found, items[0]]


def places() -> list[str]:
    """Every world after every other, and itself; every strategy after every other, and itself; hsdp on 2 x 2 ranks."""
    if "PACELINE_TEST_ALL_PAIRS" in os.environ:
        return each_after_each([f"{strategy} {world}" for strategy in STRATEGIES for world in WORLDS])
    strategies = itertools.cycle(each_after_each(STRATEGIES)[:-1])
    found = [f"{strategy} {world}" for strategy, world in zip(strategies, each_after_each(WORLDS), strict=False)]
    return [*found, "zero 3", "hsdp 4", "fsdp 3", "hsdp 4", "hsdp 2"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_any_strategy_saved_on_any_number_of_ranks_any_other_goes_on_from(tmp_path: Path) -> None:
    """One run whose every step is another process's, of 22 places; with PACELINE_TEST_ALL_PAIRS=1 of all 144 pairs."""
    parts = places()
    how = {"train__steps": len(parts)}
    straight, moved = curves_of([a_run("ddp 1", **how), a_run(", ".join(parts), **how)], tmp_path)
    for place, loss, expected in zip(parts, moved.losses, straight.losses, strict=True):
        assert loss == pytest.approx(expected, abs=TOLERANCE), f"{place}, of {parts}"
    assert moved.world_sizes == [int(place.split()[1]) for place in parts]


@pytest.fixture
def mixture() -> dict[str, Any]:
    """Dropout, and a mixture of two data sets of one tokenizer, packed by best fit, each document by itself."""
    mix = (f"{SHARDS}/trained=2", f"{SHARDS}/again=1")
    how = {"data__mix": mix, "data__packing": "bestfit", "data__mask_documents": True}
    return {"model__dropout": 0.1, "train__device_batch_size": 2, **how}


@pytest.mark.long
def test_dropout_a_mixture_and_any_shares_keep_the_curve(tmp_path: Path, mixture: dict[str, Any]) -> None:
    """7, 2 sequences are 4 and 1 micro-batches. With fsdp ranks that have no sequence make passes of weight 0."""
    parts_and_shares = {
        "zero 2": "7,2",
        "zero 2, zero 2": "7,2",
        "ddp 3": "equal",
        "zero 3": "5,3,1",
        "fsdp 3": "0,9,0",
    }
    runs = [a_run(parts, **mixture, parallel__shares=shares) for parts, shares in parts_and_shares.items()]
    without = a_run("ddp 1", **mixture | {"model__dropout": 0.0})
    alone, undropped, *others = curves_of([a_run("ddp 1", **mixture), without, *runs], tmp_path)
    for run, curve in zip(runs, others, strict=True):
        assert_same_curve(curve, alone, what=run)
    assert max(abs(a - b) for a, b in zip(alone.losses, undropped.losses, strict=True)) > 1e-3, "dropout has an effect"
    straight, resumed, *_ = others
    assert (resumed.losses, resumed.digest) == (straight.losses, straight.digest)
    assert {tuple(row["rank_sequences"]) for row in steps(tmp_path / "3")} == {(7, 2)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"optim__name": "muon", "optim__lr": 0.003}, "ddp"),
        # The model's weights are rounded, the checkpoint's are not; then gradients are rounded, too.
        ({"train__dtype": "bfloat16", "parallel__wire": "int4"}, "zero"),
    ],
    ids=["muon", "rounded-int4"],
)
def test_worlds_of_2_then_3_then_1(tmp_path: Path, changes: dict[str, Any], parts: str) -> None:
    runs = [a_run(text.replace("_", parts), **changes) for text in ("_ 2", "_ 2, _ 2", "_ 2, _ 3, _ 1")]
    straight, same_world, other_worlds = curves_of(runs, tmp_path)
    assert (same_world.losses, same_world.digest) == (straight.losses, straight.digest)
    assert_same_curve(other_worlds, straight, TOLERANCE_BFLOAT16 if "train__dtype" in changes else TOLERANCE)
    assert other_worlds.world_sizes == [2, 3, 1, 1]
    assert all((row["codec_ms"] > 0) == ("parallel__wire" in changes) for row in steps(tmp_path / "0"))


@pytest.mark.long
def test_layered_micro_batches_are_the_same_run(tmp_path: Path) -> None:
    """Bit for bit where the embedding is untied, as in this preset."""
    layered = {"train__layered_micro_batches": 5}
    by_2 = {"train__device_batch_size": 2}
    tied = {"model__arch": "gpt2", "parallel__shares": "7,2", **by_2}
    runs = [a_run(parts, **changes) for parts in ("ddp 2", "zero 3") for changes in (by_2, by_2 | layered)]
    runs += [a_run("zero 2", **tied), a_run("zero 2", **tied, **layered)]
    ddp, ddp_layered, zero, zero_layered, shares, shares_layered = curves_of(runs, tmp_path)
    for plain, other in ((ddp, ddp_layered), (zero, zero_layered)):
        assert (other.losses, other.digest) == (plain.losses, plain.digest)
    assert_same_curve(shares_layered, shares)


# ---- what a run leaves ----


@pytest.mark.parametrize(("run", "world_size"), [(ONE_RANK, 1), (TWO_RANKS, 2)])
def test_rows_say_what_is_promised(short: tuple[Path, list[Curve]], run: int, world_size: int) -> None:
    folder = short[0] / str(run)
    for index, row in enumerate(steps(folder)):
        assert row.keys() >= PROMISED
        assert row["step"] == index + 1
        assert row["tokens"] == (index + 1) * BATCH * SEQ_LEN
        assert row["world_size"] == world_size
        assert len(row["rank_step_ms"]) == len(row["rank_compute_ms"]) == world_size
        assert row["rank_compute_ms"][0] == row["compute_ms"]
        assert 0 < row["rank_compute_ms"][0] <= row["rank_step_ms"][0]
        assert row["tokens_per_s"] == pytest.approx(BATCH * SEQ_LEN / row["step_ms"] * 1e3, rel=1e-6)
    # A rank's own time has the update of the step before, and no waiting: never more than all steps in all.
    found = steps(folder)
    assert sum(row["rank_step_ms"][0] for row in found) <= sum(row["step_ms"] for row in found)
    evaluations = [row for row in rows(folder / "metrics.jsonl") if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [STEPS]
    assert evaluations[0].keys() >= PROMISED_OF_EVALUATION
    # bits per byte: the same nats over bytes; between one and four bytes a token for 512 tokens on source text
    assert 1 < evaluations[0]["val_loss"] / math.log(2) / evaluations[0]["val_bpb"] < 4


@pytest.mark.parametrize(("run", "world_size"), [(ONE_RANK, 1), (TWO_RANKS, 2)])
def test_the_parts_of_a_step_are_the_step(short: tuple[Path, list[Curve]], run: int, world_size: int) -> None:
    parts = ("data_ms", "forward_ms", "backward_ms", "exposed_comm_ms", "optim_ms", "other_ms")
    found = steps(short[0] / str(run))
    for row in found:
        assert sum(row[part] for part in parts) == pytest.approx(row["step_ms"], rel=0.02)
        # nothing is counted twice: `other` is what is left over, and it is not negative
        assert all(row[part] >= 0 for part in parts)
        assert row["exposed_comm_ms"] <= row["comm_ms"] * 1.001 + 0.01
        assert (row["comm_bytes"] > 0) == (world_size > 1)
        assert row["comm_ms"] > 0 or world_size == 1  # a process group of one rank takes time, too
    assert min(row["other_ms"] / row["step_ms"] for row in found) < 0.1, "in each step much belongs to no part"


def test_gradients_travel_once_a_step(short: tuple[Path, list[Curve]]) -> None:
    """4 bytes for each parameter, whatever the number of micro-batches; the rest is the step's small exchange."""
    folder = short[0] / str(TWO_RANKS)
    manifest = json.loads((folder / f"checkpoints/step-{STEPS:08d}/manifest.json").read_text())
    num_parameters = sum(math.prod(tensor["shape"]) for tensor in manifest["tensors"]["weights"].values())
    for row in steps(folder):  # a ring of two: each rank sends as much as there is
        assert 4 * num_parameters <= row["comm_bytes"] < 4 * num_parameters + 1024


def test_all_of_a_run_is_its_users_alone(short: tuple[Path, list[Curve]]) -> None:
    folder = short[0] / str(TWO_RANKS)
    assert [path for path in folder.rglob("*") if path.stat().st_mode & 0o077] == []
