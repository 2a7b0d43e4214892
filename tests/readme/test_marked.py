"""What the documents tell people to type is spelled right, also where no test can run it: shells and parsers do."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tyro
from test_readme import _BLOCK, _FAILS, _FILE, DOCUMENTS, commands
from torch.distributed.run import get_args_parser

from paceline.base.errors import UserError
from paceline.cli.flags import base_config
from paceline.cli.main import _find
from paceline.config import Config, supersede

_PACELINE = re.compile(r"(torchrun [^;&|]*?-m paceline|(?<![\w./-])paceline) ([^;&|')]*)")


class Parsed(Exception):
    """What a command line is, instead of what it does."""


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end a verb reads its options and goes no further."""
    tyro_cli = tyro.cli

    def read(*arguments: Any, **options: Any) -> NoReturn:
        raise Parsed(tyro_cli(*arguments, **options))

    monkeypatch.setattr(tyro, "cli", read)
    monkeypatch.setattr("paceline.cli.resume._stored", lambda arguments: (arguments[0], Config()))
    monkeypatch.setenv("PACELINE_DEBUG", "0")


def parse(words: list[str]) -> None:
    """Returns if a command line's options are there, have values of their types, and go together; else raises."""
    if words[0].startswith("--") or words[:2] == ["lab", "clean"] or "--help" in words:
        return
    if words[0] in ("lab", "launch") and "--" in words:
        place = words.index("--")
        if words[place + 1] != "exec":
            parse(words[place + 1 :])
        words = [*words[:place], "--", "exec", "true"]
    run, rest = _find(words)
    with pytest.raises(Parsed) as caught:
        run(rest)
    parsed = caught.value.args[0]
    is_of_script = "--" in words
    if words[0] == "train" and not (is_of_script or parsed.init_from or parsed.config):
        supersede(base_config(words), parsed.settings).check()


def read_torchrun(line: str) -> None:
    """Raises SystemExit for what torchrun would refuse."""
    read = get_args_parser().parse_args(shlex.split(line))
    assert (read.module, read.training_script) == (True, "paceline")


def paceline_commands(document: Path) -> list[tuple[str, str]]:
    """Returns (paceline, or torchrun's words up to it; the words after it) of each command of a document."""
    lines = commands(document) + commands(document, "needs")
    plain = [re.sub(r"\$\(\(.*?\)\)|\$\(.*?\)|\$\w+", "1", line) for line in lines]  # what a shell would put there
    return [found for line in plain for found in _PACELINE.findall(line)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_every_command_is_one_that_the_programs_would_take(
    document: Path, parse_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in _FILE.findall(document.read_text()):
        (tmp_path / name).write_text(text)
    for launcher, rest in paceline_commands(document):
        if launcher != "paceline":
            read_torchrun(launcher.removeprefix("torchrun"))
        parse(shlex.split(rest))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_every_block_of_commands_says_what_it_needs_and_is_a_shells(document: Path) -> None:
    text = document.read_text()
    blocks = _BLOCK.findall(text)
    assert len(blocks) == text.count("\n```sh"), "a block has another info string than sh, or sh title=..."
    for title, block in blocks:
        assert title in ("", _FAILS) or title.startswith("needs "), title
        checked = subprocess.run(("bash", "-n", "-c", block), capture_output=True, text=True, check=False)
        assert not checked.stderr, checked.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_no_command_stands_where_no_test_sees_it(document: Path) -> None:
    """In a block without a language, that is, where a reader takes it for one that works."""
    outside = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    unseen = re.findall(r"^    (?:paceline|torchrun) .*$", outside, re.MULTILINE)
    assert not unseen, 'mark it: ```sh, or ```sh title="needs ..."'


@pytest.mark.usefixtures("parse_only")
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("train --preset gpt2-124m --train.stps 3", UserError),
        ("train --preset gpt2-124n", UserError),
        ("train --preset tiny --optim.lr fast", UserError),
        ("train --preset tiny --parallel.strategy fsdp --parallel.shares auto", UserError),
        ("lab --hosts 2 -- train --preset tiny --train.stps 3", UserError),
    ],
)
def test_a_command_that_is_wrong_is_found(wrong: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        parse(shlex.split(wrong))


def test_torchruns_words_are_read() -> None:
    assert len([launcher for d in DOCUMENTS for launcher, _ in paceline_commands(d) if launcher != "paceline"]) > 10
    with pytest.raises(SystemExit):
        read_torchrun("--nnodes 2 --nproc-pr-node 4 -m paceline")
