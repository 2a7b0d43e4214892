"""The law: `sample` reads whole checkpoints only, so it works while the run goes on, and a seed gives one text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from in_process import here
from program import Program, run, steps

PROMPT = "def main("
SAMPLE = ("--tokens", "24", "--prompt", PROMPT)


@contextmanager
def living_run(folder: Path, every: int, sequences: int) -> Iterator[Program]:
    """A run in mid-training that has a checkpoint."""
    flags = ("--train.steps", "100000", "--checkpoint.every", str(every), "--train.global-batch-size", str(sequences))
    with Program("train", "--preset", "tiny", *flags, "--out", str(folder)) as program:
        program.wait_for((folder / "checkpoints/latest").exists)
        yield program


@pytest.mark.long
def test_sample_works_during_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with living_run(folder, every=5, sequences=96) as program:
        for _ in range(2):
            before = len(steps(folder))
            text = run("sample", str(folder), *SAMPLE).require(0).out
            assert text.startswith(PROMPT)
            assert len(text) > len(PROMPT) + 1
            program.wait_for(lambda before=before: len(steps(folder)) > before)  # the run continues
        # It has one writer: a second one is refused and disturbs nothing.
        refused = run("resume", str(folder)).require(2)
        assert "is being written by another process" in refused.err
        assert str(program.pid) in refused.err
        assert len(refused.err.strip().splitlines()) == 1
        before = len(steps(folder))
        program.wait_for(lambda: len(steps(folder)) > before)
    # The run stands still now: the same seed writes the same text, another one another.
    again = [run("sample", str(folder), *SAMPLE, "--seed", seed).require(0).out for seed in ("7", "7", "8")]
    assert again[0] == again[1] != again[2]


@pytest.mark.long
def test_sample_works_while_checkpoints_come_and_go(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with living_run(folder, every=1, sequences=2):
        for _ in range(3):
            ended = here("sample", str(folder), *SAMPLE, cwd=tmp_path).require(0)
            assert ended.out.startswith(PROMPT)
            assert ended.err == ""
        for words in (("--prompt", "--x"), ("--prompt=--x",)):
            assert here("sample", str(folder), "--tokens", "2", *words, cwd=tmp_path).require(0).out.startswith("--x")
        prompt = ("--prompt", "\x1b[2Jred\x07\n\tx")
        text = here("sample", str(folder), "--tokens", "2", *prompt, cwd=tmp_path).require(0).out
        assert text.startswith("\\x1b[2Jred\\x07\n\tx")
