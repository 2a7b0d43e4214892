"""`paceline completion` knows every verb, and bash completes by it."""

import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from in_process import here

from paceline.cli.completion import commands
from paceline.cli.verbs import VERBS


def test_every_verb_tells_what_it_takes_without_torch() -> None:
    named = [kind.__metadata__[0].name for kind in typing.get_args(commands())]
    assert named == [verb for verb in VERBS if verb != "completion"]
    code = "import sys; from paceline.cli.completion import commands as c; c(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("dat", "data"),
        ("train --optim.mom", "--optim.momentum"),
        ("train --optim.name mu", "muon"),
        ("train --train.compile --optim.mom", "--optim.momentum"),
        ("data pre", "prepare"),
        ("data prepare --wor", "--workers"),
        ("slurm --tas", "--tasks-per-node"),
        ("train --out ru", ""),  # a file's name, which bash finds
    ],
)
def test_bash_completes(line: str, completed: str, script: str, tmp_path: Path) -> None:
    asked = 'COMP_WORDS=(paceline "$@"); COMP_CWORD=$#; _tyro_paceline; echo "${COMPREPLY[*]}"'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the script asks Python
    ended = subprocess.run(
        ["bash", "-s", "--", *line.split(" ")],
        input=f"{script}\n{asked}\n",
        env={**os.environ, "PATH": path},
        cwd=tmp_path,  # where no file is
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == completed


@pytest.fixture(scope="module")
def script() -> str:
    return here("completion", "bash", cwd=Path.cwd()).require(0).out


def test_zsh_can_read_its_own() -> None:
    text = here("completion", "zsh", cwd=Path.cwd()).require(0).out
    assert "optim.momentum" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=text, text=True, check=True)
