"""A run that goes on with another config than its checkpoint's: what is taken and said, and what is refused.

Whole runs of a tiny model in this process.
"""

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from program import rows

from paceline.base.errors import RunError, UserError
from paceline.config import Config, load_preset
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.env import Environment


def tiny(**changes: Any) -> Config:
    """The preset `tiny` for six steps; changes: `section__field=value`."""
    config = load_preset("tiny", Config()).replace("parallel", threads=1)
    config = config.replace("train", steps=6, sample_tokens=0, eval_every=-1)
    for name, value in changes.items():
        section, field = name.split("__")
        config = config.replace(section, **{field: value})
    return config


def resume(folder: Path, **changes: Any) -> int:
    return train(Request(tiny(**changes), folder, resume=True), Environment())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that was stopped after the fourth, in a folder whose name a shell would take apart."""
    folder = tmp_path_factory.mktemp("stopped") / "my run"
    assert train(Request(tiny(train__stop_at_step=4), folder), Environment()) == 75
    return folder


@pytest.fixture
def run_folder(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "my run")


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows(folder / "events.jsonl") if row["event"] == kind]


def test_a_change_that_keeps_the_sequences_is_taken_said_and_noted(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(run_folder, optim__lr=0.002, optim__beta1=0.8, log__every=2) == 0
    (event,) = of_kind(run_folder, "resume")
    before = tiny()
    assert event["changed"] == {
        "optim.lr": [before.optim.lr, 0.002],
        "optim.beta1": [before.optim.beta1, 0.8],
        "log.every": [1, 2],
    }
    said = " ".join(capsys.readouterr().out.split())
    expected = rf"config\.toml was changed since the checkpoint of step 4: .*optim\.lr {before.optim.lr} -> 0\.002"
    (line,) = re.findall(r"config\.toml was changed since .*? says now", said)
    assert re.search(expected, line)
    assert "log.every" not in line, "a flag can have changed that"
    assert f"paceline sample '{run_folder}'" in said
    assert f"paceline resume '{run_folder}' --train.steps 12" in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train__seed": 7}, r"train\.seed 1337 -> 7"),
        ({"model__n_layer": 3}, r"model\.n-layer 2 -> 3"),
        ({"model__dropout": 0.5}, r"model\.dropout 0\.0 -> 0\.5"),
        ({"train__global_batch_size": 8}, r"train\.global-batch-size 12 -> 8"),
        ({"data__seq_len": 32}, r"data\.seq-len 64 -> 32"),
    ],
    ids=str,
)
def test_a_change_that_would_make_another_run_is_refused_and_changes_nothing(
    run_folder: Path, changes: dict[str, Any], says: str
) -> None:
    before = (run_folder / "config.toml").read_text()
    with pytest.raises(UserError, match=rf"is not that of the checkpoint of step 4: .*{says}"):
        resume(run_folder, **changes)
    assert (run_folder / "config.toml").read_text() == before
    assert len(rows(run_folder / "metrics.jsonl")) == 4


def test_an_end_that_is_behind_is_refused_however_it_is_given(run_folder: Path) -> None:
    with pytest.raises(UserError, match=r"the end of the run \(train\.tokens 1536\) is behind"):
        resume(run_folder, train__steps=0, train__tokens=2 * 12 * 64)
    with pytest.raises(UserError, match=r"train\.time-budget 0\.001"):
        resume(run_folder, train__steps=0, train__time_budget=0.001)
    assert resume(run_folder) == 0
    assert resume(run_folder) == 0, "a run that is complete stays so, and nobody is refused"
    assert len(of_kind(run_folder, "end")) == 3


def test_records_are_on_the_disk_before_the_checkpoint_that_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves what was synced: after it, a checkpoint must not be without the rows that led to it."""
    folder, found = tmp_path / "run", []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.parent == folder and path.name.endswith(".jsonl"):
            is_there = (folder / "checkpoints/step-00000003").exists()
            found.append((path.name, len(rows(path)), is_there))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert train(Request(tiny(train__steps=3), folder), Environment()) == 0
    assert [(name, is_there) for name, _, is_there in found] == [("metrics.jsonl", False), ("events.jsonl", False)]
    assert found[0][1] == 3, "with the row of the step that is saved"


def test_a_run_whose_folder_is_removed_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def remove() -> None:
        while len(rows(folder / "metrics.jsonl")) < 2:
            time.sleep(0.005)
        folder.rename(tmp_path / "removed")
        shutil.rmtree(tmp_path / "removed")

    monkeypatch.setenv("PACELINE_FAULTS", "rank=0 step=3 phase=data kind=sleep seconds=1")
    thread = threading.Thread(target=remove)
    thread.start()
    gone = f"{folder}: the run folder is gone"
    with pytest.raises(RunError, match=f"reached step 6, and its last checkpoint could not be saved: {gone}"):
        train(Request(tiny(checkpoint__every=3), folder), Environment())
    thread.join()
    assert not folder.exists()
    said = " ".join(capsys.readouterr().out.split())
    assert "metrics.jsonl cannot be written (No such file or directory); training goes on" in said
    assert f"the checkpoint of step 3 could not be saved: {gone}" in said


def test_what_a_checkpoint_lacks_is_of_a_later_version(run_folder: Path) -> None:
    from paceline.train.changes import changes

    manifest = json.loads((run_folder / "checkpoints/step-00000004/manifest.json").read_text())
    manifest["config"]["train"].pop("profile")
    manifest["config"].pop("log")
    assert changes(manifest["config"], tiny(log__every=3, data__mix=("a",)))["data.mix"] == ([], ["a"])
    assert "log.every" not in changes(manifest["config"], tiny(log__every=3))
