"""paceline resume"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from paceline.base.errors import UserError
from paceline.cli.flags import parse
from paceline.cli.start import start, without
from paceline.config import Config, flatten, from_toml, supersede
from paceline.record import folder as run_folder
from paceline.train.request import Request

# What may change between the parts of a run: how it is computed and how long, not what is computed.
_CHANGEABLE_SECTIONS = ("parallel.", "checkpoint.", "log.")
_CHANGEABLE = (
    "data.path",
    "data.mix",
    *(
        f"train.{name}"
        for name in (
            *("steps", "tokens", "tokens-per-param", "time-budget", "device-batch-size", "dtype", "compile"),
            *(
                "activation-checkpoint",
                "eval-every",
                "eval-sequences",
                "sample-tokens",
                "sample-prompt",
                "stop-at-step",
                "stop-after",
                "max-skips",
            ),
        )
    ),
)


@dataclass(frozen=True, kw_only=True)
class ResumeArguments:
    """Go on with a run from its newest whole checkpoint, on any number of ranks."""

    run: tyro.conf.Positional[str]
    """The run folder."""
    step: int = -1
    """The checkpoint of this step; -1: the newest whole one."""
    nproc: str = "1"
    """Ranks to start on this machine, or auto: one a core, at most 4. Under torchrun leave it out."""
    max_restarts: int = 0
    """How often to start the ranks again, from the newest checkpoint, after one of them failed."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(arguments: list[str]) -> int:
    folder, stored = _stored(arguments)
    default = ResumeArguments(run=folder, settings=stored)
    parsed = parse(ResumeArguments, default, arguments, "resume")
    config = supersede(stored, parsed.settings)
    _refuse_other_run(stored, config)
    config.check()
    request = Request(config, Path(parsed.run), resume=True, resume_step=parsed.step if parsed.step >= 0 else None)
    rest = without(arguments, "--nproc", "--max-restarts")
    return start(request, parsed.nproc, parsed.max_restarts, ["resume", *rest])


def _stored(arguments: list[str]) -> tuple[str, Config]:
    """The run folder, which is the first argument, and its config; a stop that was asked for then is over."""
    if any(argument in ("-h", "--help") for argument in arguments):
        return "RUN", Config()
    if not arguments or arguments[0].startswith("-"):
        raise UserError("the run folder comes first: paceline resume RUN [options]")
    found = run_folder.find(Path(arguments[0]))
    stored = from_toml(found.config.read_text(encoding="utf-8"), str(found.config), Config())
    if not any((stored.train.steps, stored.train.tokens, stored.train.tokens_per_param, stored.train.time_budget)):
        raise UserError(
            f"{found.path} was imported, not trained, so there is nothing to resume; "
            f"fine-tune it: paceline train --init-from {arguments[0]}"
        )
    return arguments[0], stored.replace("train", stop_at_step=0, stop_after=0.0)


def _refuse_other_run(stored: Config, config: Config) -> None:
    before = flatten(stored)
    for name, value in flatten(config).items():
        if value != before[name] and not name.startswith(_CHANGEABLE_SECTIONS) and name not in _CHANGEABLE:
            raise UserError(
                f"--{name} {value} would make it another run: it was started with {before[name]!r}; "
                "leave it out, or start a new run with `paceline train`"
            )
