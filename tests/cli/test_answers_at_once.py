"""`paceline --help` and a wrong flag answer at once: they import nothing that takes long to import.

On two cores `--help` took 0.1 s and a wrong flag 0.4 s of processor time; torch alone would add more than one second.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("paceline"))
SLOW = {"torch", "numpy", "transformers", "datasets", "tokenizers", "tiktoken", "IPython"}


def imported(arguments: list[str], status: int) -> set[str]:
    """The packages that the command imports, by Python's own list of them."""
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    ended = subprocess.run([COMMAND, *arguments], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--preset", "demo", "--trian.steps", "5"], 2),
        (["frobnicate"], 2),
    ],
    ids=["help", "version", "wrong-flag", "wrong-verb"],
)
def test_an_answer_without_work_imports_nothing_slow(arguments: list[str], status: int) -> None:
    found = imported(arguments, status)
    assert "paceline" in found
    assert not found & SLOW


@pytest.mark.parametrize("module", ["torch", "numpy", "tyro", "rich"])
def test_importing_paceline_imports_nothing_else(module: str) -> None:
    code = f"import sys, paceline, paceline.cli.main; sys.exit('{module}' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_and_python_dash_m_are_the_same() -> None:
    by_module = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, check=True)
    by_name = subprocess.run([COMMAND, "--version"], capture_output=True, check=True)
    assert by_module.stdout == by_name.stdout
