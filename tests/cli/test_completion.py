"""`paceline completion` knows every verb, and bash completes by it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import here

from paceline.cli.completion import known_words
from paceline.cli.main import _VERBS


def test_every_verb_tells_what_it_takes_without_torch() -> None:
    known = known_words()
    assert set(_VERBS) <= known.keys()
    assert all(known.values()), [words for words, takes in known.items() if not takes]
    code = "import sys; from paceline.cli.completion import known_words as k; k(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("dat", "data"),
        ("train --optim.mom", "--optim.momentum"),
        ("train --optim.name mu", "muon"),
        ("train --preset ti", "tiny"),
        ("train --parallel.repair --optim.mom", "--optim.momentum"),
        ("data pre", "prepare"),
        ("data prepare --wor", "--workers"),
        ("slurm --tas", "--tasks-per-node"),
        ("slurm --nodes 2 -- --optim.mom", "--optim.momentum"),
        ("lab --hosts 2 -- train --optim.mom", "--optim.momentum"),
        ("train --out ru", ""),  # a file's name, which bash finds
    ],
)
def test_bash_completes(line: str, completed: str, script: str) -> None:
    asked = 'COMP_WORDS=(paceline "$@"); COMP_CWORD=$#; _paceline; echo "${COMPREPLY[*]}"'
    command = ["bash", "-c", f"{script}\n{asked}", "bash", *line.split(" ")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == completed


@pytest.fixture(scope="module")
def script() -> str:
    return here("completion", "bash", cwd=Path.cwd()).require(0).out


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_others_can_read_theirs(shell: str) -> None:
    text = here("completion", shell, cwd=Path.cwd()).require(0).out
    assert "--optim.momentum" in text or "-l optim.momentum" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
