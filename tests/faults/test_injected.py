"""Faults for which nobody need die: each injected for real, and what the run makes of it.

One set of three processes makes all the runs of two and three ranks, one after the other; tests look at what they left.
"""

import dataclasses
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import whole_runs
from plain_loop import plain_curve
from program import TINY, digest, losses, rows, run, steps
from ranks import run_ranks
from whole_runs import first_ranks, saved

from paceline.base.errors import PacelineError
from paceline.base.files import sha256_of
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.steps import MANIFEST, folder_name
from paceline.config import Config
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment

STEPS, EVERY = 8, 2
FIRST = "embed_tokens.weight"
# These steps take 20 ms and writing takes 40: a save that is to be of this very step needs the one before to be done.
WAITS = "rank=0 step=4 phase=data kind=sleep seconds=1"
STRATEGIES = ("ddp", "zero", "fsdp")

pytestmark = pytest.mark.long  # the runs that most of these look at take 20 s to make


def tiny(**changes: Any) -> Config:
    """The preset `tiny` for eight steps, saved every two and compared after each; changes: `section__field=value`."""
    run = {"train__steps": STEPS, "train__eval_every": -1, "checkpoint__every": EVERY, "checkpoint__retry_s": 60.0}
    return whole_runs.tiny(**run | {"parallel__check_every": 1, "parallel__strategy": "ddp"} | changes)


def train_with(faults: str, config: Config, folder: Path, env: Environment, resume: bool = False) -> str:
    """Trains, and returns the exit status or the error."""
    os.environ["PACELINE_FAULTS"] = faults
    try:
        return str(train(Request(config, folder, resume=resume), env))
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del os.environ["PACELINE_FAULTS"]


def nan(*found: int, rank: int = 1) -> str:
    return "; ".join(f"rank={rank} step={step} kind=nan" for step in found)


Scenario = tuple[int, Callable[[Path, Environment], list[str]]]  # the number of ranks, and what each of them does


def _scenarios() -> dict[str, Scenario]:
    def plain(faults: str = "", **changes: Any) -> Callable[[Path, Environment], list[str]]:
        return lambda folder, env: [train_with(faults, tiny(**changes), folder, env)]

    def then_resumed(faults: str, again: str = "", **changes: Any) -> Callable[[Path, Environment], list[str]]:
        def both(folder: Path, env: Environment) -> list[str]:
            first = train_with(faults, tiny(**changes), folder, env)
            if env.rank == 0:
                shutil.copytree(folder, folder.with_name(f"{folder.name}-before"))
            changes["train__stop_at_step"] = 0
            return [first, train_with(again, tiny(**changes), folder, env, resume=True)]

        return both

    flip = "rank=1 step=5 kind=flip"
    return {
        "straight": (2, plain()),
        "straight-3": (3, plain()),
        **{f"nan-{name}": (2, plain(nan(3), parallel__strategy=name)) for name in STRATEGIES},
        "nan-in-a-row": (2, then_resumed(nan(4, 5, 6), train__max_skips=3, checkpoint__every=1)),
        "nan-across-a-stop": (2, then_resumed(nan(4, 5), nan(6), train__max_skips=3, train__stop_at_step=5)),
        "flip-of-2": (2, then_resumed(flip)),
        "flip-of-3": (3, then_resumed(flip)),
        "flip-before-a-save": (3, plain("rank=1 step=6 kind=flip", parallel__check_every=100)),
        "full-at-a-writer": (2, plain(f"{WAITS}; rank=1 step=4 phase=save.write kind=full")),
        "slow-disk": (
            2,
            plain(
                "rank=1 step=1 phase=save.write kind=sleep seconds=2",
                **{"checkpoint__every": 1, "checkpoint__keep_every": 2},
                **{"train__eval_every": 1, "train__steps": 2 * STEPS},
            ),
        ),
        "slow-disk-and-best": (
            2,
            plain(
                "rank=0 step=1 phase=save.write kind=sleep; rank=1 step=2 phase=save.write kind=sleep",
                **{"checkpoint__every": 0, "checkpoint__keep_best": True, "train__eval_every": 1},
            ),
        ),
        "slow-last-save": (
            2,
            plain(f"rank=0 step={STEPS} phase=save.write kind=sleep seconds=9", parallel__step_timeout_s=3),
        ),
    }


def make_all(_: ParallelConfig, env: Environment, base: Path) -> dict[str, list[str]]:
    """What each run of each scenario came to, as this rank saw it."""
    came_to = {}
    for name, (num_ranks, scenario) in _scenarios().items():
        with first_ranks(num_ranks, env, base) as smaller:
            if smaller is not None:
                came_to[name] = scenario(base / name, smaller)
    return came_to


@dataclasses.dataclass(frozen=True)
class Made:
    """All runs, and what they came to by rank."""

    base: Path
    by_rank: list[dict[str, list[str]]]

    def ends(self, name: str) -> list[str]:
        """What the runs of a scenario came to; all ranks saw the same."""
        seen = [ends[name] for ends in self.by_rank if name in ends]
        assert all(other == seen[0] for other in seen), seen
        return seen[0]

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [row for row in rows(self.base / name / "events.jsonl") if row["event"] == kind]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    base = tmp_path_factory.mktemp("injected")
    return Made(base, run_ranks(make_all, 3, base, timeout_s=300, opened=False))


def assert_same_ending(a: Path, b: Path) -> None:
    """Bit for bit, each step once."""
    assert losses(a) == losses(b)
    assert digest(a) == digest(b)
    ends = [[row for row in rows(path / "events.jsonl") if row["event"] == "end"][-1] for path in (a, b)]
    assert ends[0]["state_digests"] == ends[1]["state_digests"]


def manifest_of(folder: Path, step: int) -> dict[str, Any]:
    return mf.read_manifest(folder / "checkpoints" / folder_name(step))


# ---- gradients that are not finite ----


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_in_one_ranks_gradient_is_an_update_of_nobody_and_named(made: Made, strategy: str) -> None:
    name = f"nan-{strategy}"
    assert made.ends(name) == ["0"], "replicas were compared after every step"
    assert losses(made.base / name) == pytest.approx(plain_curve(tiny(), without_update=3).losses, abs=1e-5)
    (event,) = made.events(name, "skipped step")
    assert (event["step"], event["parameter"]) == (3, FIRST)
    assert event["ranks"] == [1]
    assert [row["step"] for row in steps(made.base / name) if row["skipped"]] == [3]
    log = (made.base / name / "ranks/rank-00000.log").read_text()
    assert re.search(rf"gradients +{strategy}, summed over ranks", log), "the strategy is in force, and said"


def test_too_many_in_a_row_end_the_run_with_the_state_before_them(made: Made) -> None:
    """Saved after every step: what was saved in the trouble must not stand before, or push out, the state before it."""
    first, second = made.ends("nan-in-a-row")
    assert first.startswith("RunError: the gradient was not finite in 3 steps in a row, up to step 6")
    assert "is saved as step 3" in first
    assert re.search(r"Try this: all of them came from rank 1 \(.*\): check its memory", first)
    assert "--optim.lr" not in first, "nothing of the recipe is wrong"
    before = made.base / "nan-in-a-row-before"
    assert saved(before)[-1] == 3
    assert (before / "checkpoints/latest").read_text().strip() == "step-00000003"
    assert second == "0"
    assert [event["step"] for event in made.events("nan-in-a-row", "resume")] == [3]
    assert_same_ending(made.base / "nan-in-a-row", made.base / "straight")


def test_steps_in_a_row_are_counted_across_a_stop(made: Made) -> None:
    first, second = made.ends("nan-across-a-stop")
    assert first == "75"
    assert second.startswith("RunError: the gradient was not finite in 3 steps in a row, up to step 6")
    assert saved(made.base / "nan-across-a-stop")[-1] == 5


# ---- bits that flip ----


@pytest.mark.parametrize(("world", "says"), [(3, "(rank 1 differs)"), (2, "(no value has a majority)")])
def test_one_flipped_bit_ends_the_run_before_anything_is_saved(made: Made, world: int, says: str) -> None:
    name, straight = f"flip-of-{world}", {2: "straight", 3: "straight-3"}[world]
    first, second = made.ends(name)
    assert first.startswith(f"RunError: replicas are not equal at step 5: {FIRST} has 2 different values {says}")
    assert max(saved(made.base / f"{name}-before")) < 5
    assert second == "0"
    assert_same_ending(made.base / name, made.base / straight)


def test_a_flipped_bit_is_found_before_a_save(made: Made) -> None:
    (end,) = made.ends("flip-before-a-save")
    assert re.match(rf"RunError: replicas are not equal at step [678]: {FIRST}", end)
    assert max(saved(made.base / "flip-before-a-save")) < 6


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_a_flipped_bit_of_the_state_is_found_before_the_next_update(tmp_path: Path, strategy: str) -> None:
    """Between steps 4 and 5, on rank 1; where it is shared out nobody else has this part of it."""
    folder = tmp_path / "run"
    flags = ("--parallel.strategy", strategy, "--checkpoint.every", "2", "--nproc", "2", "--out", str(folder))
    ended = run("train", *TINY, *flags, env={"PACELINE_FAULTS": "rank=1 step=5 kind=flip-state"}).require(1)
    assert ended.err.count("error:") == 1
    assert "rank 1: error: rank 1: the optimizer's state changed by itself between steps 4 and 5 (" in ended.err
    assert f"(the log of this rank is {folder}/ranks/rank-00001.log)\nThe newest checkpoint is of step " in ended.err
    assert all(step <= 4 for step in saved(folder))


def test_what_nobody_foresaw_is_told_with_the_log_that_has_its_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fault = {"PACELINE_FAULTS": "rank=0 step=2 phase=forward kind=raise"}
    ended = run("train", *TINY, "--out", str(folder), env=fault).require(1)
    log = folder / "ranks/rank-00000.log"
    assert ended.err == (
        "error: Injected: an injected fault: forward of step 2 "
        f"(the traceback is in {log}, PACELINE_DEBUG=1 shows it here)\n"
    )
    assert "in _step\n" in log.read_text()


# ---- disks ----


def test_a_full_disk_at_one_writer_is_told_and_training_goes_on(made: Made) -> None:
    assert made.ends("full-at-a-writer") == ["0"]
    (event,) = made.events("full-at-a-writer", "checkpoint failed")
    assert event["step"] == 4
    assert event["error"].startswith("writer 1: ")
    assert event["error"].endswith(": No space left on device")
    assert 4 not in saved(made.base / "full-at-a-writer")
    assert saved(made.base / "full-at-a-writer")[-1] == STEPS
    assert_same_ending(made.base / "full-at-a-writer", made.base / "straight")


def test_a_save_that_is_slower_than_it_is_asked_for_holds_up_nothing(made: Made) -> None:
    """Writing the first one takes two seconds; sixteen steps, each with an evaluation, take less."""
    assert made.ends("slow-disk") == ["0"]
    found = steps(made.base / "slow-disk")
    assert [row["step"] for row in found] == list(range(1, 2 * STEPS + 1))
    postponed = [event["step"] for event in made.events("slow-disk", "checkpoint postponed")]
    assert postponed == [2], "said once, until it is made"
    first, second, *others = [event["step"] for event in made.events("slow-disk", "checkpoint")]
    assert (first, [second, *others][-1]) == (1, 2 * STEPS)
    assert manifest_of(made.base / "slow-disk", second)["due_steps"] == list(range(2, second + 1)), "kept, for step 2"
    evaluated = [row["step"] for row in rows(made.base / "slow-disk/metrics.jsonl") if "val_loss" in row]
    assert evaluated == list(range(1, 2 * STEPS + 1))


def test_the_best_weights_are_waited_for_and_saved_as_they_were_found(made: Made) -> None:
    """Each of the first evaluations finds better ones, and writing those of steps 1 and 2 takes a second."""
    assert made.ends("slow-disk-and-best") == ["0"]
    folder = made.base / "slow-disk-and-best"
    found = {row["step"]: row["val_loss"] for row in rows(folder / "metrics.jsonl") if "val_loss" in row}
    better = [step for step, loss in found.items() if loss == min(list(found.values())[:step])]
    assert better[:3] == [1, 2, 3]
    told = [event["step"] for event in made.events("slow-disk-and-best", "checkpoint")]
    assert told == sorted({*better, STEPS})
    assert not made.events("slow-disk-and-best", "checkpoint postponed")
    assert (folder / "checkpoints/best").read_text().strip() == folder_name(better[-1])
    assert better[-1] == STEPS, "which is saved before it is evaluated"
    noted = rows(folder / "checkpoints/index.jsonl")[-1]
    assert (noted["step"], noted["val_loss"]) == (STEPS, min(found.values()))
    assert manifest_of(folder, better[-2])["val_loss"] == found[better[-2]]


def test_a_last_save_that_takes_longer_than_a_step_may_is_no_hang(made: Made) -> None:
    assert made.ends("slow-last-save") == ["0"]
    assert made.events("slow-last-save", "checkpoint")[-1]["seconds"] > 8
    assert_same_ending(made.base / "slow-last-save", made.base / "straight")


# ---- checkpoints that are not what they were ----


class Evil:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


def test_a_pickle_that_the_manifest_vouches_for_is_refused_and_not_run(made: Made, tmp_path: Path) -> None:
    folder, proof = shutil.copytree(made.base / "straight", tmp_path / "run"), tmp_path / "proof"
    checkpoint = folder / "checkpoints/step-00000008"
    target = next(checkpoint.glob("optimizer-00000*"))
    target.write_bytes(pickle.dumps(Evil(proof)))
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    manifest["files"][target.name] |= {
        "bytes": target.stat().st_size,
        "sha256": sha256_of(target),
    }
    (checkpoint / MANIFEST).write_bytes(mf.seal(manifest))
    end = train_with("", tiny(train__steps=STEPS + 1), folder, Environment(), resume=True)
    assert end.startswith("UserError")
    assert target.name in end
    assert not proof.exists()
    pickle.loads(target.read_bytes())
    assert proof.exists(), "it would have"


def truncate(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def remove(path: Path, _: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    (first, second) = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("damage", [truncate, remove, swap])
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_used(
    made: Made, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    folder = shutil.copytree(made.base / "straight", tmp_path / "run")
    *_, before, _ = saved(folder)
    newest = folder / "checkpoints/step-00000008"
    damage(*sorted(newest.glob("weights-*")))
    assert train_with("", tiny(), folder, Environment(), resume=True) == "0"
    events = rows(folder / "events.jsonl")
    (event,) = [row for row in events if row["event"] == "damaged checkpoint"]
    assert "step-00000008" in event["problem"]
    assert "weights-00000-of-00002.safetensors" in event["problem"]
    assert [row["step"] for row in events if row["event"] == "resume"] == [before]
    assert losses(folder) == pytest.approx(losses(made.base / "straight"), abs=1e-4)
