"""paceline verify"""

from dataclasses import dataclass

from paceline.cli.flags import ModelFlags, base_config, parse, with_preset
from paceline.cli.start import find_world, start_without_run
from paceline.record.console import Console


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(ModelFlags):
    """Prove on these machines, in about a minute, that replicas stay equal, that the loss curve is that of one process,
    and that resume is exact. It trains 20 steps in float32; without a preset or file the model is that of the preset
    tiny. Start it like training: --nproc, or torchrun on all hosts. Exit status 1 if something fails."""

    nproc: str = "1"
    """Ranks to start on this machine. Under torchrun leave it out."""
    keep: bool = False
    """Keep the folders of the runs even if all passed."""


def main(arguments: list[str]) -> int:
    arguments = with_preset(arguments, "tiny")
    parsed = parse(VerifyArguments, VerifyArguments(settings=base_config(arguments)), arguments, "verify")
    env, num_ranks = find_world(parsed.nproc, parsed.settings.parallel)
    from paceline.data.cache import inspect_data
    from paceline.tools.bench.verify import config_of, verify  # imports torch: seconds

    config = config_of(parsed.settings)
    config.check()
    inspect_data(config.data, config.model.vocab_size)
    if num_ranks == 1:
        return verify(config, env, Console(env.rank), keep=parsed.keep)
    return start_without_run(num_ranks, ["verify", *arguments], parsed.settings.parallel)
