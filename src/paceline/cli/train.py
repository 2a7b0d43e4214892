"""paceline train"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from paceline.cli.flags import base_config, parse
from paceline.cli.start import start, without
from paceline.config import Config, preset_names, supersede
from paceline.train.request import Request


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Train a model. Precedence: defaults, --preset, --config, flags."""

    preset: str = ""
    """A configuration that comes with paceline: PRESETS."""
    config: str = ""
    """A TOML file of [section] field = value."""
    out: str = ""
    """The run folder, new; empty: runs/NAME-DATE-TIME."""
    nproc: str = "1"
    """Ranks to start on this machine, or auto: one a core, at most 4. Under torchrun leave it out."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


TrainArguments.__doc__ = f"{TrainArguments.__doc__} Presets: {', '.join(preset_names())}."


def main(arguments: list[str]) -> int:
    base = base_config(arguments)
    parsed = parse(TrainArguments, TrainArguments(settings=base), arguments, "train")
    config = supersede(base, parsed.settings)
    config.check()
    name = parsed.preset or (Path(parsed.config).stem if parsed.config else config.model.arch)
    request = Request(config, Path(parsed.out) if parsed.out else None, name)
    return start(request, parsed.nproc, ["train", *without(arguments, "--nproc")])
