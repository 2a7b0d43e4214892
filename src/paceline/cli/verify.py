"""paceline verify"""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from paceline.cli.flags import base_config, parse, with_preset
from paceline.cli.start import find_world, start_without_run
from paceline.config import Config


@dataclass(frozen=True, kw_only=True)
class VerifyArguments:
    """Prove on these machines, in about a minute, that replicas stay equal, that the curve is one process's, and that a
    resume is exact. Start it as you would start training: --nproc, or torchrun on all hosts. Exit status 1 where
    something does not hold."""

    preset: str = ""
    """The model and data to prove it with (tiny, where neither this nor --config is given); 20 steps, in float32."""
    config: str = ""
    """A TOML file of [section] field = value."""
    nproc: str = "1"
    """Ranks to start on this machine. Under torchrun leave it out."""
    keep: bool = False
    """Keep the folders of the runs also where all passed."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(arguments: list[str]) -> int:
    arguments = with_preset(arguments, "tiny")
    base = base_config(arguments)
    parsed = parse(VerifyArguments, VerifyArguments(settings=base), arguments, "verify")
    env, num_ranks = find_world(parsed.nproc, parsed.settings.parallel)
    from paceline.bench.verify import config_of, verify  # torch from here on: seconds
    from paceline.data.cache import inspect_data
    from paceline.record.console import Console

    config = config_of(parsed.settings)
    config.check()
    inspect_data(config.data, config.model.vocab_size)
    if num_ranks == 1:
        return verify(config, env, Console(env.rank), keep=parsed.keep)
    return start_without_run(num_ranks, ["verify", *arguments], parsed.settings.parallel)
