"""Flags to a config: names checked by us (so that a typo gets the nearest name), the rest parsed by tyro."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.base.errors import UserError, nearest
from paceline.config import Config, load_file, load_preset
from paceline.data.recipe import Recipe

T = TypeVar("T")
_LISTS = ("--data.mix", "--validation")  # tyro takes none for an empty list


def parse(kind: type[T], default: T, arguments: Sequence[str], verb: str) -> T:
    """Returns an instance of the dataclass `kind` with flags applied over `default`.

    Raises UserError for an unknown flag, naming the nearest. tyro itself refuses values of a wrong type, with exit
    status 2, and answers --help.
    """
    import tyro

    known = _flag_names(default)
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name.startswith("--") and name not in known and name.replace("_", "-") not in known:
            raise UserError(
                f"no option {name}{nearest(name, known)}; `paceline {verb} --help` lists all, with what they do"
            )
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if argument in _LISTS and following.startswith("--"):
            raise UserError(f"{argument} is given without a value")
    return tyro.cli(kind, default=default, args=list(arguments), prog=f"paceline {verb}")


def _flag_names(default: Any) -> set[str]:
    names = {"--help"}

    def visit(value: Any, prefix: str) -> None:
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            name = item.name.replace("_", "-")
            if dataclasses.is_dataclass(inner):
                visit(inner, "" if isinstance(inner, Config | Recipe) else f"{prefix}{name}.")
            else:
                names.add(f"--{prefix}{name}")
                if isinstance(inner, bool):
                    names.add(f"--{prefix}no-{name}")

    visit(default, "")
    return names


def base_config(arguments: Sequence[str]) -> Config:
    """Returns the config that --preset and --config name, before other flags: flags then show them as defaults."""
    config = Config()
    preset, file = _value_of("--preset", arguments), _value_of("--config", arguments)
    if preset:
        config = load_preset(preset, config)
    if file:
        config = load_file(Path(file), config)
    return config


def _value_of(name: str, arguments: Sequence[str]) -> str:
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(name + "="):
            return argument.split("=", 1)[1]
    return ""
