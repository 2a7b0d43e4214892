"""The examples, run as a reader runs them: each alone, and under torchrun on two and three ranks.

What the guide shows of them is compared with the files, so it cannot drift: its diffs are theirs.
"""

import contextlib
import difflib
import re
import sys
from pathlib import Path

import pytest
import torch
from program import TORCHRUN, Ended, Program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, README, GUIDE = ROOT / "examples", ROOT / "README.md", ROOT / "docs" / "guide" / "your-model.md"
MOST_LINES = {"toy": 8, "gpt": 10}  # that after.py has and before.py has not, or the other way round
PAIRS = list(MOST_LINES)


def start(script: Path, *arguments: str, ranks: int = 0, cwd: Path, **env: str) -> Program:
    """Starts a script; with `ranks` under torchrun."""
    python = (*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)) if ranks else (sys.executable,)
    cwd.mkdir(exist_ok=True)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
    return Program(str(script), *arguments, command=python, cwd=cwd, env={**env, **hidden})


def together(folder: Path, *runs: tuple[Path, int], **env: str) -> list[Ended]:
    """Returns how scripts ended that ran at once, each in a folder of its own."""
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(start(script, ranks=ranks, cwd=folder / f"{script.stem}-{ranks}", **env))
            for script, ranks in runs
        ]
        return [program.wait().require() for program in programs]


def numbers(ended: Ended, *names: str) -> list[float]:
    """Returns the numbers that follow these words in what the script prints, in the order of the output; not in what
    paceline.Run says of a step meanwhile."""
    said = re.sub(r"^step \d+(/\d+)?(  |:).*$", "", ended.out, flags=re.MULTILINE)
    return [float(number) for number in re.findall(rf"(?:{'|'.join(names)}) ([\d.]+)", said, re.MULTILINE)]


def source(name: str, which: str) -> list[str]:
    return (EXAMPLES / name / f"{which}.py").read_text().splitlines()


# ---- what is said of them ----


@pytest.mark.parametrize("name", PAIRS)
def test_what_it_takes_is_a_few_lines(name: str) -> None:
    before, after = ([line for line in source(name, which) if line.strip()] for which in ("before", "after"))
    changes = [line[0] for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert 0 < changes.count("-") <= MOST_LINES[name]
    assert 0 < changes.count("+") <= MOST_LINES[name]


def shown(name: str) -> str:
    """Returns the diff of an example as the guide shows it."""
    lines = difflib.unified_diff(source(name, "before"), source(name, "after"), n=1, lineterm="")
    return "\n".join(re.sub("^@@ .*", "@@", line) for line in list(lines)[2:])


@pytest.mark.parametrize(("name", "document"), [("toy", README), ("toy", GUIDE), ("gpt", GUIDE)])
def test_documents_show_the_diff_of_the_files(name: str, document: Path) -> None:
    blocks = re.findall(rf"```diff title=\"examples/{name}\"\n(.*?)\n```", document.read_text(), flags=re.DOTALL)
    assert blocks == [shown(name)], f"it is now\n{shown(name)}"


# ---- the same curve ----


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words", "env", "num_losses"),
    [("toy", ["loss"], {}, 100), ("gpt", ["training", "validation"], {"STEPS": "8", "EVAL_EVERY": "2"}, 8)],
    ids=PAIRS,
)
def test_the_script_of_before_and_any_number_of_ranks_give_one_curve(
    name: str, words: list[str], env: dict[str, str], num_losses: int, tmp_path: Path
) -> None:
    before, after = EXAMPLES / name / "before.py", EXAMPLES / name / "after.py"
    ended = together(tmp_path, (before, 0), (after, 0), (after, 2), (after, 3), **env)
    alone, one, two, three = (numbers(each, *words) for each in ended)
    assert len(alone) == num_losses
    assert alone[-1] < 0.85 * alone[0]  # it learns
    assert one == pytest.approx(alone, abs=1e-5)
    assert two == pytest.approx(alone, abs=1e-4)
    assert three == pytest.approx(alone, abs=1e-4)


@pytest.mark.long
def test_a_time_budget_ends_all_ranks_at_one_step_and_another_number_of_them_goes_on(tmp_path: Path) -> None:
    script, text = EXAMPLES / "gpt" / "after.py", tmp_path / "text"
    text.write_text("to be or not to be " * 500)
    with start(script, str(text), ranks=2, cwd=tmp_path, TIME_BUDGET="1.5", EVAL_EVERY="1000") as program:
        steps = numbers(program.wait().require(), "^step")
    assert len(steps) == 1
    with start(script, str(text), cwd=tmp_path, TIME_BUDGET="1.5", EVAL_EVERY="1000") as program:
        ended = program.wait().require()
    assert f"restored step {steps[0]:.0f} " in ended.out
    assert not numbers(ended, "^step")  # the time was over


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "words", "count"),
    [
        ("images", ("--no-augment", "--images", "600", "--batch-size", "20", "--epochs", "1"), ["loss", "accuracy"], 4),
        ("gan", ("--steps", "40"), ["discriminator", "generator"], 8),
        ("finetune", ("--steps", "8", "--out", "tuned"), ["loss"], 8),
    ],
    ids=["images", "gan", "finetune"],
)
def test_two_ranks_learn_as_one_process_does(
    name: str, arguments: tuple[str, ...], words: list[str], count: int, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(start(EXAMPLES / name / "train.py", *arguments, ranks=ranks, cwd=tmp_path / f"{ranks}"))
            for ranks in (0, 2)
        ]
        ended = [program.wait().require() for program in programs]
    one, two = (numbers(each, *words) for each in ended)
    assert len(one) == count
    assert two == pytest.approx(one, abs=1e-4)
    assert "warning" not in (ended[0].err + ended[1].err).lower().replace("warnings.warn", "")
    if name == "finetune":
        can_be_loaded(tmp_path / "2" / "tuned" / "model", tmp_path / "0" / "tuned" / "model")


def can_be_loaded(folder: Path, of_one_process: Path) -> None:
    """transformers takes what two ranks saved, with the weights of one process."""
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel

    weights, wanted = (load_file(path / "model.safetensors") for path in (folder, of_one_process))
    assert weights.keys() == wanted.keys()
    assert all(torch.allclose(weights[name], wanted[name], atol=1e-4) for name in wanted)
    model = GPT2LMHeadModel.from_pretrained(folder)
    assert torch.equal(model.transformer.wte.weight, weights["transformer.wte.weight"])
    assert model.lm_head.weight is model.transformer.wte.weight
