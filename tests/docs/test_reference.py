"""The reference in the repository is what the code says, each public name has an example, and the examples run."""

import sys
from pathlib import Path

import pytest
from program import TORCHRUN, Program

import paceline

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
sys.path.insert(0, str(ROOT / "docs"))

import generate  # noqa: E402


@pytest.mark.parametrize("name", ["configuration", "presets", "python"])
def test_a_page_is_what_the_code_says(name: str) -> None:
    """Finds a field, a docstring or a preset that was changed without `python docs/generate.py`."""
    page = REFERENCE / f"{name}.md"
    assert page.read_text() == generate.made(page), "run `python docs/generate.py`"


@pytest.mark.long
def test_the_commands_page_is_what_help_prints() -> None:
    page = REFERENCE / "cli.md"
    assert page.read_text() == generate.made(page), "run `python docs/generate.py`"


def test_each_public_name_has_an_example_that_uses_it() -> None:
    examples = generate.example_of_each()
    assert list(examples) == list(paceline._PUBLIC)
    assert all(example for example in examples.values())


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_examples_run(num_ranks: int, tmp_path: Path) -> None:
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", str(num_ranks), str(REFERENCE / "examples.py"))
    with Program(command=command, cwd=tmp_path) as program:
        program.wait().require(0)
