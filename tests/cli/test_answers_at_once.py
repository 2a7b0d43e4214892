"""The law: `paceline --help` and a wrong flag answer in under half a second, of a core: machines are shared."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("paceline"))


def seconds(arguments: list[str], status: int) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run([COMMAND, *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.returncode == status, ended.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
def test_answers_in_under_half_a_second(arguments: list[str], status: int, record_property) -> None:
    took = [seconds(arguments, status) for _ in range(5)]
    record_property("least_s", min(took))
    assert min(took) < 0.5


@pytest.mark.parametrize("module", ["torch", "numpy", "tyro", "rich"])
def test_importing_paceline_imports_nothing_else(module: str) -> None:
    code = f"import sys, paceline, paceline.cli.main; sys.exit('{module}' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("verb", ["train", "resume", "sample"])
def test_help_of_a_verb_names_every_field(verb: str) -> None:
    ended = subprocess.run([COMMAND, verb, "--help"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    fields = ["--prompt", "--tokens", "--temperature", "--top-k", "--seed"]
    if verb != "sample":
        fields = ["--model.n-layer", "--train.global-batch-size", "--optim.lr", "--parallel.interface", "--nproc"]
    assert all(field in ended.stdout for field in fields)


def test_the_command_and_python_dash_m_are_the_same() -> None:
    by_module = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, check=True)
    by_name = subprocess.run([COMMAND, "--version"], capture_output=True, check=True)
    assert by_module.stdout == by_name.stdout
