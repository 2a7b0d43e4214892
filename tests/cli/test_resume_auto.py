"""`train --resume auto`: one command that begins a run, continues it, and finds it complete."""

import tomllib
from pathlib import Path

import pytest
from in_process import here
from program import TINY, losses, rows, run, steps

FLAGS = (*TINY, "--model.n-embd", "32", "--train.device-batch-size", "10", "--train.eval-sequences", "8")
AUTO = ("train", *FLAGS, "--checkpoint.every", "5", "--resume", "auto")


@pytest.mark.long
def test_the_same_command_begins_continues_and_completes_the_run(tmp_path: Path) -> None:
    straight, out = tmp_path / "straight", tmp_path / "run"
    run("train", *FLAGS, "--out", str(straight)).require(0)
    command = (*AUTO, "--out", str(out))
    run(*command, env={"PACELINE_FAULTS": "rank=0 step=3 kind=raise phase=forward"}).require(1)  # nothing is saved yet
    run(*command, "--train.stop-at-step", "12").require(75)
    run(*command, env={"PACELINE_FAULTS": "rank=0 step=18 kind=kill phase=update"}).require(-9)
    run(*command, "--nproc", "2").require(0)
    assert losses(out) == pytest.approx(losses(straight), abs=1e-5)
    before = rows(out / "metrics.jsonl")
    run(*command).require(0)
    assert rows(out / "metrics.jsonl") == before
    begun = [(event["event"], event.get("step")) for event in rows(out / "events.jsonl") if "world_size" in event]
    assert begun == [("start", None), ("start", None), ("resume", 12), ("resume", 15), ("resume", 40)]


def test_a_longer_horizon_continues_a_complete_run_and_other_settings_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = (*AUTO, "--out", str(out))
    here(*command, "--train.steps", "6", "--train.global-batch-size", "10", cwd=tmp_path).require(0)
    here(*command, "--train.steps", "8", "--train.global-batch-size", "10", cwd=tmp_path).require(0)
    assert len(steps(out)) == 8
    refused = here(*command, "--train.steps", "9", "--optim.lr", "1e-4", cwd=tmp_path).require(2).err
    assert "--optim.lr 0.0001 would make it another run" in refused
    assert len(steps(out)) == 8
    assert "--resume auto needs --out" in here(*AUTO, cwd=tmp_path).require(2).err


def test_the_same_command_with_a_batch_in_tokens_continues_and_the_horizon_may_have_another_unit(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    command = (*AUTO, "--out", str(out), "--train.global-batch-tokens", "640", "--train.tokens")
    here(*command, "3840", "--train.stop-at-step", "3", cwd=tmp_path).require(75)
    here(*command, "3840", "--train.stop-at-step", "5", cwd=tmp_path).require(75)
    here(*command[:-1], "--train.steps", "8", cwd=tmp_path).require(0)
    assert len(steps(out)) == 8
    refused = here(*command[:-2], "1280", "--train.steps", "8", cwd=tmp_path).require(2).err
    assert "--train.global-batch-size 20 would make it another run: it was started with 10" in refused


def test_a_fine_tuned_run_continues_without_its_source(tmp_path: Path) -> None:
    """Finds: a scheduler's command that fails for ever, because the run that it began with was moved."""
    here("train", *FLAGS, "--train.steps", "1", "--out", "source", cwd=tmp_path).require(0)
    flags = ("--init-from", "source", "--train.device-batch-size", "10", "--train.eval-sequences", "8")
    command = ("train", *flags, *TINY[2:], "--train.steps", "4", "--train.global-batch-size", "10", "--out", "tuned")
    command = (*command, "--data.tokenizer-vocab", "512", "--data.seq-len", "64", "--resume", "auto")
    here(*command, "--train.stop-at-step", "2", cwd=tmp_path).require(75)
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    here(*command, cwd=tmp_path).require(0)
    assert len(steps(tmp_path / "tuned")) == 4
    (tmp_path / "source").mkdir()  # something else has its name now
    here("resume", "tuned", "--train.steps", "5", cwd=tmp_path).require(0)
    assert len(steps(tmp_path / "tuned")) == 5


def test_a_fine_tuned_run_continues_on_another_machine(tmp_path: Path) -> None:
    """From its address, without the source, which an empty disk lacks; in another folder; not with another source."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    first.mkdir()
    here("train", *FLAGS, "--train.steps", "1", "--out", "source", cwd=first).require(0)
    flags = ("--train.device-batch-size", "10", "--train.eval-sequences", "8", "--train.global-batch-size", "10")
    command = ("train", "--init-from", "source", *flags, *TINY[2:], "--train.steps", "4", "--out", "tuned")
    command = (*command, "--data.tokenizer-vocab", "512", "--data.seq-len", "64", "--resume", "auto")
    command = (*command, "--checkpoint.to", (tmp_path / "bucket/tuned").as_uri())
    here(*command, "--train.stop-at-step", "2", cwd=first).require(75)
    second.mkdir()
    here(*command, "--train.stop-at-step", "3", cwd=second).require(75)
    second.rename(third)
    (third / "source").mkdir()  # something else has its name here
    here(*command, cwd=third).require(0)
    assert len(steps(third / "tuned")) == 4
    refused = here(*command, "--init-from", "another", cwd=third).require(2).err
    assert "another would make it another run" in refused


def test_a_stop_is_of_one_attempt(tmp_path: Path) -> None:
    command = (*AUTO, "--out", str(tmp_path / "run"), "--train.steps", "8")
    fault = {"PACELINE_FAULTS": "rank=0 step=6 kind=kill phase=update"}
    run(*command, "--train.stop-at-step", "7", env=fault).require(-9)
    here(*command, cwd=tmp_path).require(0)
    assert len(steps(tmp_path / "run")) == 8


@pytest.mark.long
def test_a_size_that_was_chosen_stays_in_restarts_and_when_the_same_command_has_another_horizon(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = (*AUTO, "--out", str(out), "--model.size", "auto", "--train.time-budget")
    fault = {"PACELINE_FAULTS": "rank=0 step=2 attempt=0 kind=kill phase=update"}
    run(*command, "60", "--train.stop-at-step", "4", "--max-restarts", "1", env=fault).require(75)
    chosen = tomllib.loads((out / "config.toml").read_text())
    assert chosen["model"]["size"] == "given"
    assert chosen["model"]["n_embd"] == 64 * chosen["model"]["n_layer"] > 64
    run(*command, "1000000", "--train.stop-at-step", "5").require(75)
    again = tomllib.loads((out / "config.toml").read_text())
    assert again["model"] == chosen["model"]
    assert again["train"]["global_batch_size"] == chosen["train"]["global_batch_size"]
    assert len(steps(out)) == 5
