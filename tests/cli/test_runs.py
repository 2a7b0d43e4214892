"""`paceline runs`: a line for each run, and the settings in which they differ."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from in_process import here
from whole_runs import status_of, tiny

from paceline.base import units
from paceline.record.folder import COMPLETE, RunFolder, create
from paceline.record.state import read_state


def made(path: Path, lr: float, **end: object) -> None:
    folder = create(path)
    folder.config.write_text(f'[train]\nsteps = 30\n[optim]\nlr = {lr}\nname = "adamw"\n')
    folder.append_event("start")
    folder.append_metrics({"step": 20, "loss": 2.5, "tokens_per_s": 12_345.0, "step_ms": 10.0})
    folder.append_metrics({"step": 20, "val_loss": 2.75})
    if end:
        folder.append_event("end", **end)
    folder.close()


def test_each_run_has_a_line_with_its_state_and_what_sets_it_apart(tmp_path: Path) -> None:
    made(tmp_path / "a", 0.1, step=30, reason=COMPLETE)
    made(tmp_path / "b[1]", 0.2, step=20, reason="SIGTERM on rank 0")
    made(tmp_path / "c", 0.1)
    (tmp_path / "no run").mkdir()
    lines = here("runs", str(tmp_path), cwd=tmp_path).require().out.splitlines()
    found = {line.split()[0]: line for line in lines if line.strip()}
    assert " ".join(found["a"].split()[:8]) == "a ended 30 of 30 2.5000 2.7500 12.3k"
    assert "stopped" in found["b[1]"]
    assert "b[1]: SIGTERM on rank 0, optim.lr 0.2" in lines
    unended = "c: no end is recorded, and its process is gone or silent"
    assert unended in lines
    assert unended in here("runs", ".", cwd=tmp_path / "c").require().out.splitlines()
    runs = json.loads(here("runs", str(tmp_path), "--json", cwd=tmp_path).require().out)
    assert {Path(run["run"]).name: run["kind"] for run in runs} == {"a": "ended", "b[1]": "stopped", "c": "stale"}
    assert [run["settings"] for run in runs if run["val_loss"] == 2.75 and run["step"] == 30] == [{"optim.lr": 0.1}]


def test_a_run_among_many_is_described_by_what_most_do_not_have(tmp_path: Path) -> None:
    """Finds every differing setting on each line, a wall of text, and a line break out of a setting."""
    for number in range(9):
        made(tmp_path / f"run{number}", 0.1, step=30, reason=COMPLETE)
        names = [f"field{place} = {number if number < 3 else 0}" for place in range(30)]
        prompt = "sample_prompt = 'one\\ntwo'".replace("'", '"') if number == 8 else ""
        with (tmp_path / f"run{number}/config.toml").open("a") as file:
            file.write("\n".join(["[more]", *names, prompt]))
    lines = here("runs", str(tmp_path), cwd=tmp_path).require().out.splitlines()
    described = {line.partition(":")[0]: line for line in lines if ": " in line}
    assert described["run8"] == "run8: more.sample-prompt one\\ntwo"
    assert set(described) == {"run1", "run2", "run8"}
    assert described["run1"].endswith("more.field11 1, 18 more settings (--json)")


def test_a_long_name_is_whole_in_a_pipe_and_a_value_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    name = "gpt2-124m-modern-" * 5
    made(tmp_path / name, 0.1, step=30, reason=COMPLETE)
    with (tmp_path / name / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": NaN, "tokens_per_s": NaN}\n')
    lines = here("runs", str(tmp_path), cwd=tmp_path).require().out.splitlines()
    assert [line.split()[:-1] for line in lines if name in line] == [
        [name, "ended", "30", "of", "30", "2.7500", "12.3k"]
    ]
    (run,) = json.loads(here("runs", str(tmp_path), "--json", cwd=tmp_path).require().out)
    assert (run["loss"], run["tokens_per_s"]) == (None, 12_345.0)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    assert "holds no run" in here("runs", str(tmp_path), cwd=tmp_path).require(2).err
    assert "cannot read" in here("runs", "nowhere", cwd=tmp_path).require(2).err


def test_a_config_that_cannot_be_read_is_said_not_listed_as_none(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        made(tmp_path / name, 0.1)
    (tmp_path / "c" / "config.toml").write_bytes(b"\xff[[")
    said = here("runs", str(tmp_path), cwd=tmp_path).require().out
    assert next(line.partition(": ")[2] for line in said.splitlines() if line.startswith("c: ")).endswith(
        "its config.toml could not be read"
    )
    assert "None" not in said


def test_a_run_that_only_its_user_may_look_into_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "theirs"):
        made(tmp_path / name, 0.1)
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if f"{os.sep}theirs{os.sep}" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    (run,) = json.loads(here("runs", str(tmp_path), "--json", cwd=tmp_path).require().out)
    assert Path(run["run"]).name == "mine"


def test_the_end_of_train_and_runs_show_the_same_rate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They differed by a tenth: the mean of all steps, and the last row."""
    assert status_of(tmp_path / "run", tiny(train__eval_every=-1)) == 0
    rate = read_state(RunFolder(tmp_path / "run")).rate
    assert rate is not None
    assert rate.num_rows == 5
    shown = units.count(rate.tokens_per_s)
    assert f"\n{shown} tokens/s" in capfd.readouterr().out
    assert f"  {shown}  " in here("runs", str(tmp_path), cwd=tmp_path).require().out
