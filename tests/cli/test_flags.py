"""The law: a value is what follows its flag, whatever it reads like; what is wrong is told in one line."""

import io
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
import tyro

from paceline.base.errors import UserError
from paceline.cli.flags import base_config, parse, variant
from paceline.config import Config


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Some of each kind."""

    run: tyro.conf.Positional[str] = ""
    prompt: str = ""
    tokens: int = 1
    delay: float | None = None
    kind: Literal["strong", "weak"] = "weak"
    open: bool = False
    sources: tuple[str, ...] = ()
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def parsed(*words: str) -> Arguments:
    return parse(Arguments, Arguments(), words, "verb")


@pytest.mark.parametrize("prompt", ["--x", "--", "-1", "--x=y", "-h", "a b", "=", "--tokens"])
def test_a_prompt_may_begin_with_dashes(prompt: str) -> None:
    assert parsed("run", f"--prompt={prompt}", "--tokens", "3") == Arguments(run="run", prompt=prompt, tokens=3)
    if prompt != "--tokens":  # the name of an option: the value was forgotten
        assert parsed("run", "--prompt", prompt, "--tokens", "3") == Arguments(run="run", prompt=prompt, tokens=3)


def test_values_of_all_kinds_are_taken() -> None:
    given = parsed("--delay", "-1.5", "--sources", "a", "b", "--open", "--kind=strong", "--train.max_skips", "4")
    assert (given.delay, given.sources, given.open, given.kind) == (-1.5, ("a", "b"), True, "strong")
    assert given.settings.train.max_skips == 4


def over_demo(*words: str) -> Config:
    return parse(Arguments, Arguments(settings=base_config(["--preset", "demo"])), words, "verb").settings


def test_a_flag_replaces_the_presets_alternatives_for_every_verb_and_variant() -> None:
    for found in (over_demo("--train.steps", "7"), variant("train.steps=7", over_demo(), "verb")):
        assert (found.train.steps, found.train.time_budget) == (7, 0)
    found = over_demo("--train.global_batch-tokens=4096")
    assert (found.train.global_batch_tokens, found.train.global_batch_size) == (4096, 0)
    assert over_demo().model.size == "auto"
    for found in (over_demo("--model.n_layer", "9"), variant("model.n-layer=9", over_demo(), "verb")):
        assert (found.model.size, found.model.n_layer) == ("given", 9)


def test_of_a_flag_that_is_given_twice_the_last_counts() -> None:
    assert base_config(["--preset", "demo", "--preset=tiny"]) == base_config(["--preset", "tiny"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tokens", "many"), "--tokens is 'many'; it must be of type int"),
        (("--tokens=3.5",), "--tokens is '3.5'; it must be of type int"),
        (("--delay", "x"), "--delay is 'x'; it must be of type float"),
        (("--kind", "week"), "--kind is 'week' (did you mean 'weak'?); it must be one of strong, weak"),
        (("--train.dtype", "int8"), "--train.dtype is 'int8'"),
        (("--prompt",), "--prompt is given without a value; give it as --prompt=VALUE where it begins with --"),
        (("--prompt", "--tokens", "3"), "--prompt is given without a value"),
        (("--sources", "--open"), "--sources is given without a value"),
        (("--promt", "x"), "no option --promt (did you mean '--prompt'?)"),
        (("run", "stray"), "stray; `paceline verb --help all` lists all options"),
        (("--open", "yes", "stray"), "stray; `paceline verb --help all` lists all options"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_is_wrong_is_told_in_one_line(
    words: tuple[str, ...],
    says: str,
    encoding: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)  # tyro draws its boxes by its encoding
    with pytest.raises(UserError) as refused:
        parsed(*words)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (capsys.readouterr().err, out.tell()) == ("", 0)
