"""Flags to a config: names checked by us (so that a typo gets the nearest name), the rest parsed by tyro."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.base.errors import UserError, nearest
from paceline.config import Config, load_file, load_preset
from paceline.data.recipe import Recipe

T = TypeVar("T")


def parse(kind: type[T], default: T, arguments: Sequence[str], verb: str) -> T:
    """Returns an instance of the dataclass `kind` with flags applied over `default`.

    Raises UserError for an unknown flag, naming the nearest. tyro itself refuses values of a wrong type, with exit
    status 2, and answers --help.
    """
    import tyro

    known = _flags(default)
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name.startswith("--") and name not in known and name.replace("_", "-") not in known:
            raise UserError(
                f"no option {name}{nearest(name, known)}; `paceline {verb} --help` lists all, with what they do"
            )
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if isinstance(known.get(argument), tuple) and following.startswith("--"):  # to tyro that is an empty list
            raise UserError(f"{argument} is given without a value")
    return tyro.cli(kind, default=default, args=list(arguments), prog=f"paceline {verb}")


def _flags(default: Any) -> dict[str, Any]:
    """The flags that a dataclass's instance makes, with what each is where it is not given."""
    flags: dict[str, Any] = {"--help": False}

    def visit(value: Any, prefix: str) -> None:
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            name = item.name.replace("_", "-")
            if dataclasses.is_dataclass(inner):
                visit(inner, "" if isinstance(inner, Config | Recipe) else f"{prefix}{name}.")
            else:
                flags[f"--{prefix}{name}"] = inner
                if isinstance(inner, bool):
                    flags[f"--{prefix}no-{name}"] = not inner

    visit(default, "")
    return flags


def base_config(arguments: Sequence[str]) -> Config:
    """Returns the config that --preset and --config name, before other flags: flags then show them as defaults."""
    config = Config()
    preset, file = _value_of("--preset", arguments), _value_of("--config", arguments)
    if preset:
        config = load_preset(preset, config)
    if file:
        config = load_file(Path(file), config)
    return config


def with_preset(arguments: Sequence[str], name: str) -> list[str]:
    """Returns the arguments, with this preset where they name neither one nor a file."""
    named = any(argument.split("=", 1)[0] in ("--preset", "--config") for argument in arguments)
    return [*arguments] if named else ["--preset", name, *arguments]


def _value_of(name: str, arguments: Sequence[str]) -> str:
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(name + "="):
            return argument.split("=", 1)[1]
    return ""
