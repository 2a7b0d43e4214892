"""Shared by the verbs that print a job for a scheduler: what it is to run."""

import string
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.base.errors import UserError
from paceline.cli.flags import divided, without
from paceline.cli.train import checked_arguments


class _Template(string.Template):
    delimiter = "@"  # shells and Kubernetes use $


def filled(template: str, **values: Any) -> str:
    """Returns the template of this file name with its @{words} filled in."""
    text = (resources.files("paceline") / "cli" / "templates" / template).read_text(encoding="utf-8")
    return _Template(text).substitute(values)


def train_command(verb: str, flags: list[str], ranks: str) -> list[str]:
    """Returns the words after `paceline` that begin the run of these flags, or continue it; --out is absolute. ranks:
    for the message, how the verb takes their number. Raises UserError for flags that `paceline train` refuses."""
    hint = f"the options of `paceline train` come after --, with --out: paceline {verb} -- --preset demo --out runs/x"
    if not flags:
        raise UserError(f"nothing to train: {hint}")
    parsed = checked_arguments(flags)
    options, script = divided(flags)
    if not parsed.out:
        raise UserError(f"there is no run folder: {hint}")
    if parsed.nproc != "1" or parsed.max_restarts:
        raise UserError(f"--nproc and --max-restarts after --: {verb.capitalize()} {ranks}")
    rest = without(options, "--out", "--resume")
    whole = ["train", *rest, "--out", str(Path(parsed.out).absolute()), "--resume", "auto"]
    return [*whole, "--", *script] if script else whole
