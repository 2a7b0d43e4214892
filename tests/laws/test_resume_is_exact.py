"""The law: stop at any step, go on, and it is as if the run had never stopped."""

import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from program import TINY, Program, digest, losses, rows, run, steps

TOLERANCE = 1e-4  # between world sizes; at one world size nothing differs
TOLERANCE_BFLOAT16 = 1e-2  # there a last bit is larger
MUON = ("--optim.name", "muon")
# The model's weights are rounded, the checkpoint's are not; then gradients are rounded, too.
ROUNDED = ("--parallel.strategy", "zero", "--train.dtype", "bfloat16")


def resume(folder: Path, nproc: int, *flags: str, status: int = 0):
    return run("resume", str(folder), "--nproc", str(nproc), *flags).require(status)


def assert_near(a: Path, b: Path, tolerance: float = TOLERANCE) -> None:
    first, second = losses(a), losses(b)
    assert len(first) == len(second) == 40
    assert max(abs(x - y) for x, y in zip(first, second, strict=True)) <= tolerance


def fingerprint(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of each file under a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.long
def test_after_kill_9_of_everything_the_weights_are_the_same(runs, tmp_path: Path) -> None:
    straight, folder = runs.get(2), tmp_path / "run"
    wanted = random.randint(20, 30)
    with Program("train", *TINY, "--nproc", "2", "--out", str(folder), "--checkpoint.every", "20") as program:
        program.wait_for(lambda: len(steps(folder)) >= 2)
        pids = program.pids()
        assert len(pids) == 3, "a launcher and two ranks"
        program.wait_for(lambda: any(row["event"] == "checkpoint" for row in rows(folder / "events.jsonl")))
        program.wait_for(lambda: len(steps(folder)) >= wanted)
        time.sleep(random.uniform(0, 0.03))  # anywhere in a step
        program.kill_all(pids)
    reached = len(steps(folder))
    assert not any(row["event"] == "end" for row in rows(folder / "events.jsonl")), "killed too late to show anything"
    resume(folder, 2)
    assert digest(folder) == digest(straight), f"killed at step {reached}"
    assert losses(folder) == losses(straight)  # bit for bit; each step once
    found = [row for row in rows(folder / "events.jsonl") if "straggler" not in row["event"]]  # machines are shared
    events = [(row["event"], row.get("step")) for row in found]
    wanted = [("start", None), ("checkpoint", 20), ("resume", 20), ("checkpoint", 40), ("end", 40)]
    assert list(dict.fromkeys(events)) == wanted


def test_a_checkpoint_is_made_and_told_once(runs) -> None:
    folder = runs.get(1, "--checkpoint.every", "20")
    saved = [row["step"] for row in rows(folder / "events.jsonl") if row["event"] == "checkpoint"]
    assert saved == [20, 40]


def test_all_of_a_run_is_its_users_alone(runs) -> None:
    found = [path for path in runs.get(2).rglob("*") if path.stat().st_mode & 0o077]
    assert found == []


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [MUON, (*ROUNDED, "--parallel.wire", "int4")],
    ids=["muon", "rounded-int4"],
)
def test_worlds_of_2_then_3_then_1(runs, copy_of, flags: tuple[str, ...]) -> None:
    straight = runs.get(2, *flags)
    stopped = runs.get(2, *flags, "--train.stop-at-step", "13", status=75)
    assert len(steps(stopped)) == 13
    assert all((row["codec_ms"] > 0) == ("int4" in flags) for row in steps(straight))
    same_world, other_worlds = copy_of(stopped), copy_of(stopped)
    resume(same_world, 2)
    assert digest(same_world) == digest(straight)
    assert losses(same_world) == losses(straight)
    resume(other_worlds, 3, "--train.stop-at-step", "27", status=75)
    resume(other_worlds, 1)
    assert_near(other_worlds, straight, TOLERANCE_BFLOAT16 if "bfloat16" in flags else TOLERANCE)
    world_sizes = [row["world_size"] for row in steps(other_worlds)]
    assert world_sizes == 13 * [2] + 14 * [3] + 13 * [1]


# What a service manager, a batch system and a person at a terminal do.
@pytest.mark.long
@pytest.mark.parametrize(
    ("nproc", "number", "to"),
    [
        (2, signal.SIGTERM, "launcher"),
        (2, signal.SIGUSR1, "rank 1"),
        (2, signal.SIGINT, "group"),
        (1, signal.SIGINT, "group"),
    ],
    ids=[
        "sigterm-to-launcher",
        "sigusr1-to-one-rank",
        "ctrl-c-of-ranks",
        "ctrl-c-of-one-process",
    ],
)
def test_a_signal_saves_and_status_75_says_so(
    runs, tmp_path: Path, nproc: int, number: signal.Signals, to: str
) -> None:
    straight, folder = runs.get(nproc), tmp_path / "run"
    with Program("train", *TINY, "--nproc", str(nproc), "--out", str(folder)) as program:
        program.wait_for(lambda: len(steps(folder)) >= 5)
        if to == "group":
            os.killpg(program.pid, number)
        else:
            os.kill(program.pid if to == "launcher" else program.ranks()[1], number)
        ended = program.wait().require(75)
        program.wait_until_gone()
    stopped_at = len(steps(folder))
    assert stopped_at < 40
    assert (folder / "checkpoints/latest").read_text().strip() == f"step-{stopped_at:08d}"
    assert f"stopped at step {stopped_at} (" in ended.out
    assert f"paceline resume {folder}" in ended.out
    assert "Traceback" not in ended.out + ended.err
    if number == signal.SIGUSR1:
        resume(folder, nproc)
        assert digest(folder) == digest(straight)
        assert losses(folder) == losses(straight)


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stuck = tmp_path / "stuck"
    fault = {"PACELINE_FAULTS": f"rank=0 step=5 phase=data kind=sleep seconds=60 mark={stuck}"}
    with Program("train", *TINY, "--nproc", "2", "--out", str(folder), env=fault) as program:
        program.wait_for(stuck.exists)
        os.killpg(program.pid, signal.SIGINT)
        time.sleep(0.5)
        assert program.process.poll() is None, "it stops after the step"
        while program.ranks():  # signals that come together count as one
            os.killpg(program.pid, signal.SIGINT)
            with contextlib.suppress(AssertionError):
                program.wait_for(lambda: not program.ranks())
        ended = program.wait()
        program.wait_until_gone()
    assert ended.status not in (0, 75)
    assert not list((folder / "checkpoints").iterdir())
    assert "Traceback" not in ended.out + ended.err


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(runs, copy_of) -> None:
    straight = runs.get(1, "--checkpoint.every", "20")
    folder = copy_of(straight)
    flip_a_byte(folder / "checkpoints/step-00000040/weights-00000-of-00001.safetensors")
    ended = resume(folder, 1)
    assert re.search(r"damaged checkpoint.*step-00000040.*weights-00000-of-00001", ended.out.replace("\n", " "))
    assert "resumed at step 20" in ended.out
    assert digest(folder) == digest(straight)
    assert losses(folder) == losses(straight)


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2])
def test_where_all_checkpoints_are_damaged_nothing_is_changed(runs, copy_of, nproc: int) -> None:
    folder = copy_of(runs.get(1, "--checkpoint.every", "20"))
    flip_a_byte(folder / "checkpoints/step-00000040/optimizer-00000-of-00001.safetensors")
    (folder / "checkpoints/step-00000020/manifest.json").write_text("{")
    before = fingerprint(folder)
    ended = resume(folder, nproc, status=1)
    after = fingerprint(folder)
    said_of_it = {name for name in after if name.startswith(("ranks/", "events.jsonl", "lock", "job"))}
    assert {n: h for n, h in before.items() if n not in said_of_it} == {
        n: h for n, h in after.items() if n not in said_of_it
    }
    assert "step-00000040" in ended.err
    assert "step-00000020" in ended.err
    assert ended.err.count("error:") == 1


@pytest.mark.long
def test_what_kill_left_of_a_checkpoint_counts_for_nothing(runs, copy_of) -> None:
    """A save that was cut short leaves a folder aside; a resume passes over it without a word of damage."""
    stopped = runs.get(2, "--train.stop-at-step", "13", status=75)
    folder = copy_of(stopped)
    aside = folder / "checkpoints/.step-00000026.0123abcd-1.unfinished"
    aside.mkdir()
    shutil.copy(folder / "checkpoints/step-00000013/weights-00000-of-00002.safetensors", aside)
    ended = resume(folder, 1, "--train.stop-at-step", "14", status=75)
    assert "resumed at step 13" in ended.out
    assert "damaged" not in ended.out
    assert not aside.exists()
