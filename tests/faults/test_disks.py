"""Disks that are full, and folders that are removed, while a run trains or ends."""

import contextlib
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from program import TINY, Program, digest, losses
from whole_runs import STEPS, events, saved, status_of, tiny, words

from paceline.base import faults
from paceline.base.errors import RunError
from paceline.train import saves


@contextlib.contextmanager
def meanwhile(what: Callable[[], None]) -> Iterator[None]:
    """Does it in a thread, while what is inside runs."""
    thread = threading.Thread(target=what)
    thread.start()
    yield
    thread.join()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """RUN/checkpoints on a disk of its own, which one checkpoint (0.6 MB) fits, but not two."""
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def grow(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)


def test_on_a_full_disk_training_continues_and_with_room_it_saves_again(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk.parent
    seen: list[list[int]] = []

    def make_room() -> None:
        deadline = time.monotonic() + 120
        while not events(folder, "checkpoint failed") and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.append(saved(folder))
        grow(small_disk)

    slow = "; ".join(f"rank=0 step={step} phase=data kind=sleep seconds=1" for step in (3, 4, 5))
    with meanwhile(make_room):
        assert status_of(folder, tiny(checkpoint__every=2, checkpoint__retry_s=60.0), slow) == 0
    found = [(event["event"], event["step"]) for event in events(folder) if "checkpoint" in event["event"]]
    assert found[0] == ("checkpoint", 2)
    assert "checkpoint failed" in dict(found)
    assert found[-1] == ("checkpoint", STEPS)
    assert seen == [[2]], "the older one stays"
    assert len(losses(folder)) == STEPS
    said = words(capsys.readouterr().out)
    assert re.search(r"the checkpoint of step \d could not be saved: .*: No space left on device", said)


def test_a_full_disk_at_the_end_is_tried_again_until_there_is_room(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A9. What to do is said, with the newest checkpoint; nothing is lost where room is made in time."""
    folder, straight = small_disk.parent, tmp_path / "straight"
    assert status_of(straight, tiny()) == 0
    assert status_of(folder, tiny(train__stop_at_step=2)) == 75

    def make_room() -> None:
        deadline = time.monotonic() + 120
        while not events(folder, "checkpoint failed") and time.monotonic() < deadline:
            time.sleep(0.01)
        grow(small_disk)

    monkeypatch.setattr(saves, "_RETRY_EVERY_S", 1.0)
    with meanwhile(make_room):
        assert status_of(folder, tiny(checkpoint__retry_s=60.0), resume=True) == 0
    assert digest(folder) == digest(straight)
    assert saved(folder) == [2, STEPS]
    said = words(capsys.readouterr().out)
    assert f"the checkpoint of step {STEPS} could not be saved: " in said
    assert "The newest checkpoint is of step 2. Make room: it is tried again every 1 s, for " in said
    assert len(events(folder, "checkpoint failed")) == 1


def test_a_disk_that_stays_full_ends_with_what_to_do(small_disk: Path, tmp_path: Path) -> None:
    """A9. After the stated time."""
    folder = small_disk.parent
    assert status_of(folder, tiny(train__stop_at_step=2)) == 75
    with pytest.raises(RunError) as told:
        status_of(folder, tiny(checkpoint__retry_s=0.5), resume=True)
    assert f"training reached step {STEPS}, and its last checkpoint could not be saved: " in str(told.value)
    assert "No space left on device. The newest checkpoint is of step 2. " in str(told.value)
    assert f"Make room and continue by `paceline resume {folder}`" in str(told.value)
    assert saved(folder) == [2]


@pytest.mark.long
def test_a_checkpoints_folder_that_is_removed_is_said(tmp_path: Path) -> None:
    """A11. Once; two ranks write, and either may make the folder again."""
    folder = tmp_path / "run"
    reached = tmp_path / "reached"
    slow = f"rank=0 step=4 phase=data kind=sleep seconds=5 mark={reached}"
    flags = ("--checkpoint.every", "2", "--train.steps", "8", "--nproc", "2", "--out", str(folder))
    with Program("train", *TINY, *flags, env={"PACELINE_FAULTS": slow}) as program:
        program.wait_for(lambda: events(folder, "checkpoint") and reached.exists())
        shutil.rmtree(folder / "checkpoints")
        ended = program.wait().require()
    gone = f"{folder}/checkpoints was removed while training: the checkpoints in it are gone"
    assert [event["remark"] for event in events(folder, "checkpoints gone")] == [gone]
    assert words(gone) in words(ended.out)
    assert saved(folder)[-1] == 8


def test_a_run_whose_folder_is_removed_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, strike = tmp_path / "run", faults.strike

    def remove(phase: str, step: int) -> str | None:
        if (phase, step) == ("data", 3):
            shutil.rmtree(folder)
        return strike(phase, step)

    monkeypatch.setattr(faults, "strike", remove)
    gone = f"{folder}: the run folder is gone"
    failed = f"reached step 6, and its last checkpoint could not be saved: {gone}"
    with pytest.raises(RunError, match=failed):
        status_of(folder, tiny(checkpoint__every=3))
    assert not folder.exists()
    said = words(capsys.readouterr().out)
    assert "metrics.jsonl cannot be written (No such file or directory); training continues" in said
    assert f"the checkpoint of step 3 could not be saved: {gone}" in said
