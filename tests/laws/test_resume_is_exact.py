"""The law: stop at any step, go on, and it is as if the run had never stopped.

test_one_curve.py has resumes with another strategy and on another number of ranks.
"""

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
from whole_runs import STEPS, status_of, tiny, words

from paceline.base.errors import RunError


def fingerprint(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of each file under a folder, but for those in which a resume says what it found."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not (name := str(path.relative_to(folder))).startswith(("ranks/", "events.jsonl", "lock", "job"))
    }


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.long
def test_after_kill_9_of_everything_the_weights_are_the_same(runs, tmp_path: Path) -> None:
    straight, folder = runs.get(2), tmp_path / "run"
    wanted = random.randint(20, 30)
    with Program("train", *runs.flags, "--nproc", "2", "--out", str(folder), "--checkpoint.every", "20") as program:
        program.wait_for(lambda: len(steps(folder)) >= 2)
        pids = program.pids()
        assert len(pids) == 3, "a launcher and two ranks"
        program.wait_for(lambda: any(row["event"] == "checkpoint" for row in rows(folder / "events.jsonl")))
        program.wait_for(lambda: len(steps(folder)) >= wanted)
        time.sleep(random.uniform(0, 0.03))  # anywhere in a step
        program.kill_all(pids)
    reached = len(steps(folder))
    assert not any(row["event"] == "end" for row in rows(folder / "events.jsonl")), "killed too late to show anything"
    run("resume", str(folder), "--nproc", "2").require()
    assert digest(folder) == digest(straight), f"killed at step {reached}"
    assert losses(folder) == losses(straight)  # bit for bit; each step once
    found = [row for row in rows(folder / "events.jsonl") if "straggler" not in row["event"]]  # machines are shared
    events = [(row["event"], row.get("step")) for row in found]
    wanted = [("start", None), ("checkpoint", 20), ("resume", 20), ("checkpoint", 40), ("end", 40)]
    assert list(dict.fromkeys(events)) == wanted


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
    folder = tmp_path / "run"
    with Program("train", *runs.flags, "--nproc", str(nproc), "--out", str(folder)) as program:
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
        run("resume", str(folder), "--nproc", str(nproc)).require()
        assert digest(folder) == digest(runs.get(nproc))
        assert losses(folder) == losses(runs.get(nproc))


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


# ---- what is wrong with a checkpoint ----


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert status_of(folder, tiny(checkpoint__every=STEPS // 2)) == 0
    return folder


@pytest.fixture
def folder(saved_twice: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return shutil.copytree(saved_twice, tmp_path / "run")


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    folder: Path, saved_twice: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(folder / "checkpoints/step-00000006/weights-00000-of-00001.safetensors")
    assert status_of(folder, tiny(), resume=True) == 0
    said = words(capsys.readouterr().out)
    assert re.search(r"damaged checkpoint.*step-00000006.*weights-00000-of-00001", said)
    assert "resumed at step 3" in said
    assert digest(folder) == digest(saved_twice)
    assert losses(folder) == losses(saved_twice)


def damage_all(folder: Path) -> None:
    flip_a_byte(next((folder / "checkpoints/step-00000006").glob("optimizer-00000-of-*.safetensors")))
    (folder / "checkpoints/step-00000003/manifest.json").write_text("{")


def test_where_all_checkpoints_are_damaged_nothing_is_changed(folder: Path) -> None:
    damage_all(folder)
    before = fingerprint(folder)
    with pytest.raises(RunError, match=r"(?s)step-00000006.*step-00000003"):
        status_of(folder, tiny(), resume=True)
    assert fingerprint(folder) == before


@pytest.mark.long
def test_where_all_checkpoints_are_damaged_two_ranks_say_it_once(folder: Path) -> None:
    damage_all(folder)
    before = fingerprint(folder)
    ended = run("resume", str(folder), "--nproc", "2").require(1)
    assert fingerprint(folder) == before
    assert ended.err.count("error:") == 1


def test_what_kill_left_of_a_checkpoint_counts_for_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A save that was cut short leaves a folder aside; a resume passes over it without a word of damage."""
    aside = folder / "checkpoints/.step-00000026.0123abcd-1.unfinished"
    aside.mkdir()
    shutil.copy(folder / "checkpoints/step-00000006/weights-00000-of-00001.safetensors", aside)
    assert status_of(folder, tiny(train__steps=STEPS + 1), resume=True) == 0
    said = words(capsys.readouterr().out)
    assert "resumed at step 6" in said
    assert "damaged" not in said
    assert not aside.exists()
