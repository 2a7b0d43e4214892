"""The law: shares decide who computes a sequence; the sequences of a step and its loss stay the same."""

import json
import shutil
from pathlib import Path

import pytest
from program import TINY, digest, losses, rows, run, steps, val_loss

import paceline

pytestmark = pytest.mark.long

# Rank 1 is slow in every step, so that auto changes the shares.
SLOW = {"PACELINE_FAULTS": "rank=1 step=3 phase=data kind=sleep seconds=0.15 times=60"}
LONG = ("--train.steps", "60")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Dropout, and a mixture of two data sets packed by best fit; micro-batches of 2, so shares are several of them."""
    base, package = tmp_path_factory.mktemp("mixture"), Path(paceline.__file__).parent
    for name, tokenizer in (("data", "train:512"), ("replica", str(base / "data/tokenizer.json"))):
        run("data", "prepare", str(package / name), "--out", str(base / name), "--tokenizer", tokenizer).require()
    mix = f"{base / 'data'}=2", f"{base / 'replica'}=1"
    return "--model.dropout", "0.1", "--data.packing", "bestfit", "--data.mix", *mix, *LONG


def assert_same_curve(a: Path, b: Path, num_steps: int) -> None:
    first, second = losses(a), losses(b)
    assert len(first) == len(second) == num_steps
    assert max(abs(x - y) for x, y in zip(first, second, strict=True)) <= 1e-5
    assert abs(val_loss(a) - val_loss(b)) <= 1e-5


def shares_by_step(folder: Path) -> dict[int, list[int]]:
    """Replays the events: step -> sequences by rank."""
    found: dict[int, list[int]] = {}
    for event in rows(folder / "events.jsonl"):
        if "sequences" in event:
            first = event["step"] + (event["event"] == "resume") if event["event"] != "start" else 1
            found.update(dict.fromkeys(range(first, 61), event["sequences"]))
    return found


def test_every_choice_of_shares_is_the_curve_of_one_process(runs, flags: tuple[str, ...], tmp_path: Path) -> None:
    alone, auto = runs.get(1, *flags), tmp_path / "auto"
    assert_same_curve(alone, runs.get(2, *flags), 60)
    assert_same_curve(alone, runs.get(2, *flags, "--parallel.shares", "9,3"), 60)
    run(*("train", *TINY, *flags, "--nproc", "2", "--parallel.shares", "auto", "--out", str(auto)), env=SLOW).require()
    assert_same_curve(alone, auto, 60)
    replayed = shares_by_step(auto)
    assert len({tuple(shares) for shares in replayed.values()}) > 1, "auto never changed the shares"
    for row in steps(auto):
        assert row["rank_sequences"] == replayed[row["step"]]
        assert sum(row["rank_sequences"]) == 12


# 7, 4 and 1 sequences are 4, 2 and 1 micro-batches; with fsdp the ranks that have no sequence make dummy passes.
@pytest.mark.parametrize(("strategy", "shares"), [("zero", "7,4,1"), ("fsdp", "0,12,0")])
def test_every_strategy_computes_any_shares(runs, strategy: str, shares: str) -> None:
    assert_same_curve(runs.get(1), runs.get(3, "--parallel.strategy", strategy, "--parallel.shares", shares), 40)


def test_fixed_shares_repeat_and_resume_bit_for_bit(runs, tmp_path: Path) -> None:
    flags, stopped = ("--parallel.shares", "9,3"), tmp_path / "stopped"
    straight = runs.get(2, *flags)
    run("train", *TINY, *flags, "--nproc", "2", "--out", str(stopped), "--train.stop-at-step", "17").require(75)
    run("resume", str(stopped), "--nproc", "2").require()
    assert (losses(stopped), digest(stopped)) == (losses(straight), digest(straight))
    assert {tuple(row["rank_sequences"]) for row in steps(stopped)} == {(9, 3)}


def test_auto_resumes_with_its_shares_in_the_same_world_and_with_equal_ones_in_another(runs, tmp_path: Path) -> None:
    auto, other = tmp_path / "auto", tmp_path / "other"
    flags = (*LONG, "--parallel.shares", "auto")
    run(*("train", *TINY, *flags, "--nproc", "2", "--out", str(auto), "--train.stop-at-step", "30"), env=SLOW).require(
        75
    )
    shutil.copytree(auto, other)
    manifest = json.loads((auto / "checkpoints/step-00000030/manifest.json").read_text())
    saved = manifest["progress"]["sequences"]
    assert saved == shares_by_step(auto)[31]
    assert saved[0] > saved[1]
    for folder, nproc, expected in ((auto, 2, saved), (other, 3, [4, 4, 4])):
        run("resume", str(folder), "--nproc", str(nproc)).require()
        (event,) = [row for row in rows(folder / "events.jsonl") if row["event"] == "resume"]
        assert event["sequences"] == steps(folder)[30]["rank_sequences"] == expected
        assert_same_curve(runs.get(1, *LONG), folder, 60)
    assert run("resume", str(other), "--nproc", "3", "--parallel.shares", "9,3").status == 2
