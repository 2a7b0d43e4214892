"""`--help` is a screen for who begins, and complete for who asks for all; the options are a list that is looked at."""

import re
import shlex
from pathlib import Path

import pytest
from in_process import here

from paceline.cli.help import EXAMPLES, OFTEN_USED, options_of
from paceline.cli.resume import ResumeArguments
from paceline.cli.train import TrainArguments
from paceline.cli.verbs import GROUPS, VERBS
from paceline.config import Config, load_preset

OPTIONS = options_of(TrainArguments())
FROZEN = Path(__file__).with_name("options.txt")


def printed(*words: str, status: int = 0) -> str:
    return here(*words, cwd=Path.cwd()).require(status).out


@pytest.mark.parametrize("words", [(), ("--help",), ("train",), ("train", "--help")], ids=" ".join)
def test_one_screen_for_who_begins(words: tuple[str, ...]) -> None:
    """Mutation: the help that lists all options, 379 lines."""
    lines = printed(*words, status=0 if "--help" in words else 2).splitlines()
    assert len(lines) <= 44
    assert max(map(len, lines)) <= 120


def test_what_the_screen_names_is_there() -> None:
    """Mutation: an option is renamed, and the screen keeps the former name."""
    flags = {option.flag for option in OPTIONS}
    text = " ".join([*OFTEN_USED, *OFTEN_USED.values()])
    assert set(re.findall(r"--[a-z.-]+", text)) <= flags
    for command in EXAMPLES:
        words = shlex.split(command)
        load_preset(words[words.index("--preset") + 1], Config())


def test_each_verb_is_in_one_group() -> None:
    assert sorted(verb for verbs in GROUPS.values() for verb in verbs) == sorted(VERBS)


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_all_is_every_option_with_its_whole_text(verb: str) -> None:
    """Mutation: texts that are wrapped twice, so that a search for a sentence does not find it."""
    text = " ".join(printed(verb, "--help", "all").split())
    for option in OPTIONS:
        if verb == "train" or option.section:
            assert option.flag in text.replace("--[no-]", "--")
            assert option.text
            assert option.text in text


def test_a_narrow_terminal_gets_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: texts of one letter a line."""
    monkeypatch.setenv("COLUMNS", "20")
    assert all(len(line.strip()) != 1 for line in printed("sample", "--help").splitlines())


def test_a_part_is_the_options_of_a_section() -> None:
    text = printed("train", "--help", "optim")
    listed = set(re.findall(r"^  (--[a-z0-9.-]+)", text, re.MULTILINE))
    assert listed == {option.flag for option in OPTIONS if option.section == "optim"}


def test_a_part_that_is_not_there_is_refused_with_the_nearest() -> None:
    ended = here("train", "--help", "optin", cwd=Path.cwd()).require(2)
    assert "has no part 'optin' (did you mean 'optim'?); it has all, model, data" in ended.err


def test_a_new_option_is_a_decision() -> None:
    """options.txt lists the options of `train`, and what `resume` has besides. Who adds one adds its line there, and
    says in the CHANGELOG who asked for it (an issue, a guide). Who removes one says what to use instead."""
    flags = [option.flag for option in OPTIONS]
    others = [option.flag for option in options_of(ResumeArguments(folder="")) if option.flag not in flags]
    assert FROZEN.read_text().splitlines() == [*flags, *(f"resume {flag}" for flag in others if flag != "RUN")]
