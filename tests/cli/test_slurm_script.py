"""`paceline slurm` prints a script that a shell reads, and refuses what Slurm or training would."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import here

from paceline.cli.slurm import _limit_s


def test_the_script_is_a_shells_and_repeats_one_command(tmp_path: Path) -> None:
    flags = ["--preset", "tiny", "--train.sample-prompt", "it's", "--out", "runs/my run"]
    sbatch = "--sbatch=--partition=gpu --comment='two words'"
    resources = ("--nodes", "2", "--tasks-per-node", "8", "--gpus-per-task", "1", sbatch)
    script = here("slurm", *resources, "--", *flags, cwd=tmp_path).require(0).out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-task=1\n" in script
    assert "#SBATCH --partition=gpu\n#SBATCH '--comment=two words'\n" in script
    command = next(line for line in script.splitlines() if sys.executable in line).removesuffix("&")
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    arguments = ["--preset", "tiny", "--train.sample-prompt", "it's", "--out", str(tmp_path / "runs/my run")]
    assert words.stdout.splitlines() == [
        *(sys.executable, "-m", "paceline", "train"),
        *(*arguments, "--resume", "auto"),
    ]


def test_a_script_of_ones_own_comes_after_the_options_of_its_launcher(tmp_path: Path) -> None:
    """Mutation: --out of the script is taken for that of its launcher."""
    script = here("slurm", "--", "--out", "run", "--", "train.py", "--out", "run", cwd=tmp_path).require(0).out
    command = f"train --out {tmp_path / 'run'} --resume auto -- train.py --out run &"
    assert f"{sys.executable} -m paceline {command}" in script


@pytest.mark.parametrize(("status", "cores"), [(0, ""), (1, "4"), (75, "4")])
def test_a_job_is_queued_again_when_its_ranks_have_saved(tmp_path: Path, status: int, cores: str) -> None:
    """With commands of the same names in the place of Slurm's. Finds: a job that failed queued again for ever, one that
    saved not at all, and ranks with one of their cores, since srun does not read the job's number."""
    script = here("slurm", "--", "--preset", "tiny", "--out", "run", cwd=tmp_path).require(0).out
    for name, body in (
        ("srun", f'echo "$2" > {tmp_path}/second; exit {status}'),
        ("scontrol", f'echo "$@" > {tmp_path}/said'),
        ("sleep", "exit"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": cores}
    ended = subprocess.run(["bash"], input=script, text=True, env=environ, capture_output=True)
    assert ended.returncode == status, ended.stderr
    assert (tmp_path / "second").read_text().strip() == (f"--cpus-per-task={cores}" if cores else sys.executable)
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else "") == ("requeue 7\n" if status == 75 else "")


def test_a_time_limit_is_read_as_slurm_reads_it() -> None:
    """The forms of --time in sbatch's manual; 0 is no limit."""
    forms = {"5": 300, "5:30": 330, "1:00:00": 3600, "1-2": 93_600, "0-0:5": 300, "1-00:00:01": 86_401}
    assert {time: _limit_s(time) for time in forms} == forms
    assert {_limit_s(time) for time in ("0", "00:00:00", "UNLIMITED", "1:2:3:4", "")} == {math.inf}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to train"),
        (("--", "--preset", "tiny"), "there is no run folder"),
        (("--", "--preset", "tiny", "--out", "x", "--nproc", "2"), "Slurm starts the ranks"),
        (("--", "train.py"), "a script of yours comes after `--`"),
        (("--", "--out", "x", "--train.steps", "3", "--", "train.py"), "--train.steps: no effect on a script"),
        (("--", "--preset", "tiny", "--out", "x", "--train.stop-at-step", "9"), "go on past that step"),
        (("--", "--preset", "tinny", "--out", "x"), "no preset is named 'tinny'"),
        (("--nodes", "0", "--", "--preset", "tiny", "--out", "x"), "--nodes is 0"),
        (
            ("--", "--preset", "tiny", "--out", "x", "--checkpoint.grace-s", "400"),
            "--save-before-s is 300, and ranks have 400 s to save (checkpoint.grace-s)",
        ),
        (
            ("--time", "00:05:00", "--", "--preset", "tiny", "--out", "x"),
            "--time is 00:05:00, and the job stops 300 s before that",
        ),
        (("--gpus-per-task", "-1", "--", "--preset", "tiny", "--out", "x"), "--gpus-per-task is -1"),
        (
            ("--sbatch=--comment=don't", "--", "--preset", "tiny", "--out", "x"),
            "--comment=don't (No closing quotation)",
        ),
        (("--", "--preset", "tiny", "--model.n-head", "3", "--out", "x"), "not a multiple of model.n-head (3)"),
        (("--", "--out", "x"), "the horizon of training is given by nothing"),
    ],
)
def test_what_cannot_train_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in here("slurm", *arguments, cwd=tmp_path).require(2).err
