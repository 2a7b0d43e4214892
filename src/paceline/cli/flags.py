"""Flags to a config: names and values are checked here, so that an error is one line; tyro parses the rest."""

import contextlib
import dataclasses
import io
import itertools
import os
import shlex
import sys
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from paceline.base.errors import EXIT_DONE, EXIT_USER, UserError, nearest
from paceline.cli.former import FORMER
from paceline.cli.help import help_text, options_of
from paceline.config import ALTERNATIVES, SIZE_FIELDS, Config, checked, load_file, load_preset, supersede

T = TypeVar("T")
TELL_KNOWN = "--tell-known"  # for completion: a verb raises Known instead of running


class Known(Exception):
    """What a verb takes: the dataclass of its arguments with their defaults, or the verbs that may follow it."""

    def __init__(
        self, kind: Any = None, default: Any = None, verbs: Mapping[str, Callable[[list[str]], int]] | None = None
    ):
        self.kind, self.default, self.verbs = kind, default, verbs or {}


def parse(kind: type[T], default: T, arguments: Sequence[str], verb: str) -> T:
    """Returns an instance of the dataclass `kind` with flags applied over `default`. In its `settings`, a given flag
    replaces the default's alternatives. Ends the process where --help is asked for. Raises UserError for an unknown
    flag, naming the nearest, for a missing value or one of a wrong type, and for alternatives that are given
    together."""
    known = _flags(default)
    if TELL_KNOWN in arguments:
        raise Known(kind, default)
    words = _tied(arguments, known, verb)
    if (wanted := asked_help(words)) is not None:
        print(help_text(default, verb, wanted))
        sys.exit(EXIT_DONE)
    settings, over, printed = getattr(default, "settings", None), typing.cast(Any, default), io.StringIO()
    if isinstance(settings, Config):
        flags = set(map(flag_of, words))
        _require_one_way(flags)
        if any(flag.rpartition(".")[2].replace("-", "_") in SIZE_FIELDS for flag in flags):
            over = dataclasses.replace(over, settings=settings.replace("model", size="given"))
    try:
        with contextlib.redirect_stderr(printed):
            parsed: Any = tyro.cli(kind, default=over, args=words, prog=f"paceline {verb}")
    except SystemExit as left:
        if left.code != EXIT_USER:
            raise
        text = _without_box(printed.getvalue())
        raise UserError(f"{text}; `paceline {verb} --help all` lists all options") from None
    if isinstance(settings, Config):
        parsed = dataclasses.replace(parsed, settings=supersede(settings, parsed.settings))
    return typing.cast(T, parsed)


def run_verb(verb: str, verbs: Mapping[str, Callable[[list[str]], int]], arguments: list[str], usage: str) -> int:
    """Runs the subcommand that the first argument names, with the rest; returns the exit status. Without one, or with
    --help, prints the usage. Raises UserError for an unknown one, naming the nearest."""
    if arguments == ["--help", TELL_KNOWN]:
        raise Known(verbs=verbs)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage, end="")
        return EXIT_DONE if arguments else EXIT_USER
    word, *rest = arguments
    if instead := FORMER.get(f"{verb} {word}"):
        raise UserError(f"`paceline {verb} {word}` was a verb of earlier versions; {instead}")
    if word not in verbs:
        raise UserError(f"there is no `paceline {verb} {word}`{nearest(word, verbs)}; there are: {', '.join(verbs)}")
    return verbs[word](rest)


def _tied(arguments: Sequence[str], flags: dict[str, Any], verb: str) -> list[str]:
    """Joins each value to its flag by `=`, so that a value, such as a prompt, may begin with dashes."""
    tied: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag = flag_of(word)
        if not word.startswith("--"):
            tied.append(word)
            continue
        if flag not in flags:
            raise _unknown(verb, word.split("=", 1)[0], flags)
        hint = flags[flag]
        if hint is not bool and "=" not in word:
            is_list = typing.get_origin(hint) is tuple  # may have many values, which tyro parses
            if not rest or flag_of(rest[0]) in flags or (is_list and rest[0].startswith("--")):
                raise _without_value(flag)
            if not is_list:
                word = f"{word}={rest.pop(0)}"
        if hint in (int, float) or typing.get_origin(hint) is typing.Literal:
            value: Any = word.split("=", 1)[1]
            if hint in (int, float):
                with contextlib.suppress(ValueError):
                    value = hint(value)
            checked(flag, hint, value)
        tied.append(word)
    return tied


def _without_value(flag: str) -> UserError:
    return UserError(f"{flag} is given without a value; give it as {flag}=VALUE where it begins with --")


def _unknown(verb: str, word: str, flags: Iterable[str]) -> UserError:
    """Returns the error for an option that the verb does not have: what to do instead, or the nearest one."""
    if instead := FORMER.get(f"{verb} {flag_of(word)}"):
        return UserError(f"{word} was an option of earlier versions; {instead}")
    return UserError(
        f"no option {word}{nearest(flag_of(word), flags)}; `paceline {verb} --help all` lists all, with what they do"
    )


def flag_of(word: str) -> str:
    """Returns an argument's flag as --help writes it."""
    return word.split("=", 1)[0].replace("_", "-")


def _without_box(text: str) -> str:
    """Returns tyro's error message in one line, without the box's title, ruler and advice."""
    lines = (line.strip("│|╭╮╰╯─+- ") for line in text.splitlines()[1:])
    body = itertools.dropwhile(lambda line: not line, lines)
    return " ".join(itertools.takewhile(bool, body)).removesuffix(".")


def _flags(default: Any) -> dict[str, Any]:
    """Returns each flag of a verb with its type."""
    flags: dict[str, Any] = {"--help": bool}
    for option in options_of(default):
        if option.is_positional:
            continue
        flags[option.flag] = float if option.kind == float | None else option.kind
        if option.kind is bool:
            section, dot, name = option.flag.removeprefix("--").rpartition(".")
            flags[f"--{section}{dot}no-{name}"] = bool
    return flags


def asked_help(arguments: Sequence[str]) -> list[str] | None:
    """Returns the words after --help or -h, its parts; None if help is not asked for."""
    for place, word in enumerate(arguments):
        if word in ("-h", "--help"):
            return list(arguments[place + 1 :])
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of the verbs that need the config of a run."""

    preset: str = ""
    """A configuration that comes with paceline: model, data and batch."""
    config: str = ""
    """A TOML file of [section] field = value."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Config)


def base_config(arguments: Sequence[str]) -> Config:
    """Returns the config that --preset and --config name, before other flags: --help shows it as defaults."""
    config = Config()
    if preset := value_of("--preset", arguments):
        config = load_preset(preset, config)
    if file := value_of("--config", arguments):
        config = load_file(Path(file), config)
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fields:
    settings: Annotated[Config, tyro.conf.arg(name="")]


def variant(text: str, config: Config, verb: str) -> Config:
    """Returns the config with the fields of one variant: 'parallel.strategy=zero train.seed=1'. Raises UserError."""
    words = [f"--{word}" for word in shell_words(text)]
    changed = parse(_Fields, _Fields(settings=config), words, verb).settings
    changed.check()
    return changed


def shell_words(text: str) -> list[str]:
    """Returns the words of a text as a shell reads them. Raises UserError if a quotation has no end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"not valid shell syntax: {text} ({error}); quote as in a shell") from None


def check_files(**paths: str) -> None:
    """Raises UserError if a file of these flags could not be written."""
    for name, text in paths.items():
        path = Path(text).absolute()
        may_write = os.access(path if path.exists() else path.parent, os.W_OK)
        if text and (path.is_dir() or not path.parent.is_dir() or not may_write):
            raise UserError(f"--{name} is {text}; name a file in a folder that exists, and that may be written")


def _require_one_way(words: Container[str]) -> None:
    """Raises UserError if two flags say the same thing in two ways."""
    for names in ALTERNATIVES:
        flags = [flag for name in names if (flag := f"--train.{name.replace('_', '-')}") in words]
        if len(flags) > 1:
            raise UserError(f"{' and '.join(flags)} are given together; give exactly one")


def with_preset(arguments: Sequence[str], name: str, flag: str = "--preset") -> list[str]:
    """Returns the arguments, with this preset (or file) if they name neither a preset nor a file."""
    is_named = not {"--preset", "--config"}.isdisjoint(map(flag_of, arguments))
    return [*arguments] if is_named else [flag, name, *arguments]


def divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--` and those after it."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def without(arguments: Sequence[str], *names: str) -> list[str]:
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if flag_of(word) not in names:
            kept.append(word)
        elif "=" not in word:
            next(rest, None)
    return kept


def value_of(name: str, arguments: Sequence[str]) -> str:
    """Returns the flag's last value, which is the one that counts; empty if it is not given. Raises UserError if
    another flag stands in the place of the value."""
    value, words = "", iter(arguments)
    for word in words:
        if flag_of(word) == name:
            value = word.split("=", 1)[1] if "=" in word else next(words, "")
            if "=" not in word and value.startswith("--"):
                raise _without_value(name)
    return value
