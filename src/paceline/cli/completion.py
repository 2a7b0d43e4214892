"""paceline completion"""

import contextlib
import dataclasses
import io
import typing
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import tyro

from paceline.base.errors import EXIT_DONE, UserError
from paceline.cli.flags import TELL_KNOWN, Known, run_verb
from paceline.cli.verbs import VERBS, find_verb

_USAGE = """paceline completion bash|zsh: what makes a shell complete verbs, options and values. Where it looks:

  paceline completion bash > ~/.local/share/bash-completion/completions/paceline
  paceline completion zsh > ~/.zfunc/_paceline            # after fpath+=~/.zfunc in ~/.zshrc, before compinit
"""
_SHELLS = ("bash", "zsh")


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] not in ("-h", "--help"):
        raise UserError(f"paceline completion takes the name of a shell, and {arguments[1]} comes after it")
    return run_verb("completion", {shell: partial(_print, shell) for shell in _SHELLS}, arguments, _USAGE)


def _print(shell: str, _: list[str]) -> int:
    with contextlib.suppress(SystemExit):  # tyro's end, when it has printed
        tyro.cli(commands(), prog="paceline", args=["--tyro-print-completion", shell])
    return EXIT_DONE


def commands() -> Any:
    """Returns the whole command line as tyro takes it: the union of what each verb parses."""
    return _union({verb: _command(find_verb(verb)) for verb in VERBS if verb != "completion"})


def _command(main: Callable[[list[str]], int]) -> tuple[Any, Any]:
    """Returns the type of a verb's arguments and their defaults; of a verb of verbs, a dataclass that has one."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--help", TELL_KNOWN])
    except Known as known:
        if not known.verbs:
            return known.kind, known.default
        union = _union({verb: _command(find) for verb, find in known.verbs.items()})
        return dataclasses.make_dataclass("Verbs", [("verb", Annotated[union, tyro.conf.arg(name="")])]), None
    raise AssertionError(f"{main.__module__} ran")


def _union(kinds: dict[str, tuple[Any, Any]]) -> Any:
    named = []
    for verb, (kind, default) in kinds.items():
        has_default = {} if default is None else {"default": default}
        named.append(Annotated[kind, tyro.conf.subcommand(verb, **has_default)])
    return typing.Union[tuple(named)]  # noqa: UP007
