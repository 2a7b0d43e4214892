"""A run that goes on with another config than its checkpoint's: what is taken and said, and what is refused.

Whole runs of a tiny model in this process.
"""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import whole_runs
from program import losses, rows
from whole_runs import BATCH, SEQ_LEN, SHARDS, events, status_of, words

from paceline.base.errors import RunError, UserError
from paceline.base.faults import Injected
from paceline.config import Config, from_toml
from paceline.data.plan import BatchPlan
from paceline.record.folder import RunFolder
from paceline.record.state import read_state
from paceline.train.progress import Progress
from paceline.train.restoring import _restore_shares


def tiny(**changes: Any) -> Config:
    return whole_runs.tiny(**{"train__eval_every": -1, **changes})


def resume(folder: Path, **changes: Any) -> int:
    return status_of(folder, tiny(**changes), resume=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that was stopped after the fourth, in a folder whose name a shell would take apart."""
    folder = tmp_path_factory.mktemp("stopped") / "my run"
    assert status_of(folder, tiny(train__stop_at_step=4)) == 75
    return folder


@pytest.fixture
def run_folder(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "my run")


def test_a_change_that_keeps_the_sequences_is_taken_said_and_noted(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(run_folder, optim__lr=0.002, optim__beta1=0.8, log__every=2) == 0
    (event,) = events(run_folder, "resume")
    before = tiny()
    assert event["changed"] == {
        "optim.lr": [before.optim.lr, 0.002],
        "optim.beta1": [before.optim.beta1, 0.8],
        "log.every": [1, 2],
    }
    said = words(capsys.readouterr().out)
    expected = rf"config\.toml was changed since the checkpoint of step 4: .*optim\.lr {before.optim.lr} -> 0\.002"
    (line,) = re.findall(r"config\.toml was changed since .*? says now", said)
    assert re.search(expected, line)
    assert "log.every" not in line, "a flag can have changed that"
    assert f"paceline sample '{run_folder}'" in said
    assert f"paceline resume '{run_folder}' --train.steps 12" in said


def test_another_end_of_the_run_is_said(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finds: a learning rate that jumps at a resume without a word."""
    before = tiny().train.steps
    assert resume(run_folder, train__steps=before + 2) == 0
    said = words(capsys.readouterr().out)
    assert (
        f"the end of the run was changed since the checkpoint of step 4: train.steps {before} -> {before + 2}." in said
    )


@pytest.mark.parametrize(
    "changes", [{"beta1": 0.5}, {"eps": 1e-3}, {"weight_decay": 5.0}, {"grad_clip": 0.01}], ids=str
)
def test_a_change_of_the_optimizer_has_its_effect(run_folder: Path, stopped: Path, changes: dict[str, float]) -> None:
    unchanged = shutil.copytree(stopped, run_folder.parent / "unchanged")
    assert resume(unchanged) == 0
    assert resume(run_folder, **{f"optim__{name}": value for name, value in changes.items()}) == 0
    (*before, last), (*others, changed) = losses(unchanged), losses(run_folder)
    assert before == others
    assert last != changed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train__seed": 7}, r"train\.seed 1337 -> 7"),
        ({"model__n_layer": 3}, r"model\.n-layer 2 -> 3"),
        ({"model__dropout": 0.5}, r"model\.dropout 0\.0 -> 0\.5"),
        ({"train__global_batch_size": 8}, r"train\.global-batch-size 12 -> 8"),
        ({"data__seq_len": 32}, r"data\.seq-len 16 -> 32"),
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
    with pytest.raises(UserError, match=r"the end of the run \(train\.tokens 384\) comes before"):
        resume(run_folder, train__steps=0, train__tokens=2 * BATCH * SEQ_LEN)
    with pytest.raises(UserError, match=r"train\.time-budget 0\.001"):
        resume(run_folder, train__steps=0, train__time_budget=0.001)
    assert resume(run_folder) == 0
    with pytest.raises(UserError, match="comes before the checkpoint of step 6"):
        resume(run_folder, train__steps=5)
    assert read_state(RunFolder(run_folder)).kind == "ended", "a resume that is refused has changed nothing"
    assert resume(run_folder) == 0, "a run that is complete stays so, and nobody is refused"
    assert len(events(run_folder, "end")) == 3


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(run_folder: Path) -> None:
    """Finds: a silent start at step 0, as where the disk with the checkpoints is not mounted."""
    shutil.rmtree(run_folder / "checkpoints")
    with pytest.raises(RunError, match=r"have been saved, and .*checkpoints has none: is its disk mounted\?"):
        resume(run_folder)
    assert len(rows(run_folder / "metrics.jsonl")) == 4


def test_a_run_that_has_saved_nothing_begins_again_with_the_settings_that_it_gets(tmp_path: Path) -> None:
    """Finds: config.toml and tokenizer.json of the attempt before, which the next resume and `sample` read."""
    folder = tmp_path / "run"
    with pytest.raises(Injected):
        status_of(folder, tiny(), "rank=0 step=2 kind=raise phase=forward")
    assert resume(folder, data__path=str(SHARDS / "bytes"), train__steps=9, train__stop_at_step=1) == 75
    assert from_toml((folder / "config.toml").read_text(), "config.toml", Config()).train.steps == 9
    assert (folder / "tokenizer.json").read_text() == (SHARDS / "bytes/tokenizer.json").read_text()


def test_shares_by_speed_begin_equal_where_a_rank_had_no_sequence() -> None:
    """As with equal shares in few micro-batches: its speed would stay unknown, and the shares as they are."""
    plan = BatchPlan(12, 6, 3, (4, 4, 4))
    setup: Any = SimpleNamespace(
        settings=SimpleNamespace(plan=plan),
        progress=Progress(step=5),
        config=tiny(parallel__shares="auto"),
        loader=SimpleNamespace(change=lambda first, plan: None),
    )
    for saved, expected in (([6, 4, 2], [6, 4, 2]), ([6, 6, 0], [4, 4, 4]), ([8, 4], [4, 4, 4]), (None, [4, 4, 4])):
        assert _restore_shares(setup, saved) == expected


def test_a_command_that_is_advised_is_quoted_for_a_shell(run_folder: Path) -> None:
    with pytest.raises(RunError, match=re.escape(f"continue by `paceline resume '{run_folder}'`")):
        status_of(run_folder, tiny(), "rank=0 step=6 phase=save.write kind=full", resume=True)


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
    assert status_of(folder, tiny(train__steps=3)) == 0
    assert [(name, is_there) for name, _, is_there in found] == [("metrics.jsonl", False), ("events.jsonl", False)]
    assert found[0][1] == 3, "with the row of the step that is saved"


def test_what_a_checkpoint_lacks_is_of_a_later_version(run_folder: Path) -> None:
    from paceline.train.changes import changes

    manifest = json.loads((run_folder / "checkpoints/step-00000004/manifest.json").read_text())
    manifest["config"]["train"].pop("profile")
    manifest["config"].pop("log")
    now = tiny(log__every=3).replace("data", mix=("a",))
    assert changes(manifest["config"], now)["data.mix"] == ([], ["a"])
    assert "log.every" not in changes(manifest["config"], now)


@pytest.mark.parametrize("option", ["data__path", "data__mix"])
def test_a_run_finds_its_data_from_another_folder(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a path that is recorded as it was typed: a resume by cron or in another job began in another folder, and
    found other data there or none."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a=b.txt").write_text(f"a line that is {folder} " * 2000)
    text: dict[str, Any] = {"data__path": "a=b.txt"} if option == "data__path" else {"data__mix": ("./a=b.txt=2",)}
    small: dict[str, Any] = {"data__tokenizer_vocab": 300, "train__eval_every": -1, "train__steps": 3}
    run = tmp_path / "run"
    monkeypatch.chdir(tmp_path / "here")
    assert status_of(run, whole_runs.tiny(**text, **small, train__stop_at_step=2)) == 75
    monkeypatch.chdir(tmp_path / "there")
    recorded = from_toml((run / "config.toml").read_text(), "config.toml", Config())
    assert status_of(run, recorded.replace("train", stop_at_step=0), resume=True) == 0
    assert [each["step"] for each in rows(run / "metrics.jsonl")] == [1, 2, 3]
    assert "changed" not in events(run, "resume")[0]
