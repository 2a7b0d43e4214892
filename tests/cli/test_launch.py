"""`paceline launch` refuses what no host could run, before it asks any."""

import os
import sys
from pathlib import Path

import pytest
from in_process import here
from program import run

from paceline.cli.launch import _job

TRAIN = ("train", "--preset", "tiny", "--out", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--", *TRAIN), "which hosts"),
        (("--hosts", "a:2"), "comes after `--`, train or resume"),
        (("--hosts", "a:2", "--", "verify"), "comes after `--`, train or resume"),
        (("--hosts", "a:2", "--", "train.py"), "launch --hosts a:2,b:2 -- train --out runs/x -- train.py"),
        (("--hosts", "a:2", "--", "train", "--", "train.py"), "give --out, the folder of paceline.Run in train.py"),
        (("--hosts", "a:2", "--", *TRAIN, "--nproc", "2"), "--nproc after `--`: `launch` gives each host"),
        (("--hosts", "a:2", "--", *TRAIN[:3]), "there is no run folder"),
        (("--hosts", "a:2", "--", *TRAIN, "--train.step", "3"), "did you mean '--train.steps'"),
        (("--hosts", "a:2", "--min-hosts", "2", "--", *TRAIN), "--min-hosts is 2, and 1 host listed"),
        (
            ("--hosts", "a,b", "--min-hosts", "1", "--", *TRAIN, "--parallel.shares", "6,6"),
            "use --parallel.shares auto",
        ),
        (("--hosts", "a,b", "--", "resume", "x", "--step", "3"), "--step on several hosts"),
        (("--hosts", "a:2", "--ssh", "ssh -o 'x", "--", *TRAIN), "ssh -o 'x (No closing quotation)"),
        (("--hosts", "a:2", "--", *TRAIN, "--model.n-head", "3"), "not a multiple of model.n-head (3)"),
        (("--hosts", "a:2", "--ssh", "/nonexistent/ssh", "--", *TRAIN), "cannot run /nonexistent/ssh"),
    ],
)
def test_what_no_host_could_run_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in here("launch", *arguments, cwd=tmp_path).require(2).err


def test_ranks_that_resume_an_address_write_the_folder_to_which_it_is_brought() -> None:
    assert _job(["resume", "s3://b/x"], 1, 1).run == Path("runs/x")


def test_an_interpreter_that_is_named_from_the_login_folder_runs_the_command_elsewhere(tmp_path: Path) -> None:
    """ssh is a shell here, which starts in this test's folder."""
    (tmp_path / "below").mkdir()
    ssh = """sh -c 'for last; do :; done; exec sh -c "$last"'"""
    python = os.path.relpath(sys.executable, tmp_path)
    flags = ("--hosts", "a:1", "--ssh", ssh, "--python", python, "--chdir", str(tmp_path / "below"))
    env = {"SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22"}
    ended = run("launch", *flags, "--", "resume", "nowhere", env=env, cwd=tmp_path).require(2)
    assert "a: error: nowhere does not exist" in ended.err
