"""paceline verify"""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from paceline.base.errors import UserError
from paceline.cli.flags import base_config, parse
from paceline.cli.start import without
from paceline.config import Config
from paceline.world.env import Environment, check_interface, check_master, check_nodes, check_port, check_size, detect

_STORE_HOST = "127.0.0.1"  # where --nproc has its ranks meet


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
    env = detect()
    num_ranks = _num_ranks(parsed.nproc, env)
    parallel = parsed.settings.parallel
    check_interface(parallel.interface)
    check_size(env.world_size if env.is_distributed else num_ranks, parallel.expect_ranks)
    check_nodes(env)
    check_master(env, parallel.interface)
    if not env.is_distributed:
        check_port(parallel.port, _STORE_HOST)
    from paceline.bench.verify import config_of, verify  # torch from here on: seconds
    from paceline.data.cache import inspect_data
    from paceline.record.console import Console

    config = config_of(parsed.settings)
    config.check()
    inspect_data(config.data, config.model.vocab_size)
    if num_ranks == 1:
        return verify(config, env, Console(env.rank), keep=parsed.keep)
    from paceline.launch.local import start_ranks

    command = (sys.executable, "-m", "paceline", "verify", *without(arguments, "--nproc"))
    with tempfile.TemporaryDirectory(prefix="paceline-") as nothing:  # a launcher looks where its run has come to
        return start_ranks(num_ranks, command, Path(nothing), port=parallel.port, interface=parallel.interface)


def with_preset(arguments: list[str], name: str) -> list[str]:
    """Returns the arguments, with a preset where they name neither one nor a file."""
    named = any(argument.split("=", 1)[0] in ("--preset", "--config") for argument in arguments)
    return arguments if named else ["--preset", name, *arguments]


def _num_ranks(nproc: str, env: Environment) -> int:
    if env.is_distributed:
        if nproc != "1":
            raise UserError(f"--nproc {nproc} inside a world that a launcher made already; give the number to it alone")
        return 1
    if not nproc.isdigit() or not 1 <= int(nproc) <= 1024:
        raise UserError(f"--nproc is '{nproc}'; it must be a number of ranks from 1 to 1024")
    return int(nproc)
