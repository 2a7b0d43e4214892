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


def train_command(verb: str, flags: list[str], ranks: str) -> tuple[list[str], Path, float]:
    """Returns the words after `paceline` that begin the run of these flags, or continue it; its folder, which is
    absolute; and the seconds that ranks have to save. ranks: for the message, how the verb takes their number. Raises
    UserError for flags that `paceline train` refuses."""
    hint = f"the options of `paceline train` come after --, with --out: paceline {verb} -- --preset demo --out runs/x"
    if not flags:
        raise UserError(f"nothing to train: {hint}")
    parsed = checked_arguments(flags)
    options, script = divided(flags)
    if not parsed.out:
        raise UserError(f"there is no run folder: {hint}")
    if parsed.nproc != "1" or parsed.max_restarts:
        raise UserError(f"--nproc and --max-restarts after --: {verb.capitalize()} {ranks}")
    if parsed.settings.train.stop_at_step:
        raise UserError(
            "--train.stop-at-step after --: the scheduler would start the job again, and it would go on past that "
            "step; leave it out, or give --train.steps"
        )
    rest = without(options, "--out", "--resume")
    out = Path(parsed.out).absolute()
    command = ["train", *rest, "--out", str(out), "--resume", "auto", *(["--", *script] if script else [])]
    return command, out, parsed.settings.checkpoint.grace_s
