"""paceline slurm"""

import sys
from pathlib import Path

from paceline.base.errors import UserError
from paceline.cli.flags import base_config, parse, without
from paceline.cli.train import TrainArguments
from paceline.tools.jobs.slurm import Slurm, batch_script

_TRAIN_FLAGS = "the options of `paceline train` come after --, with --out: paceline slurm -- --preset demo --out runs/x"


def main(arguments: list[str]) -> int:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parse(Slurm, Slurm(), arguments[:place], "slurm")
    command = train_command(arguments[place + 1 :])
    for name in ("nodes", "tasks_per_node", "save_before_s"):
        if getattr(parsed, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(parsed, name)}; it must be at least 1")
    out = command[command.index("--out") + 1]
    print(batch_script(parsed, Path(out).name, command), end="")
    return 0


def train_command(flags: list[str]) -> list[str]:
    """Returns the command that each task runs: it begins the run or continues it. --out is made absolute. Raises
    UserError for options that `paceline train` refuses."""
    if not flags:
        raise UserError(f"nothing to train: {_TRAIN_FLAGS}")
    parsed = parse(TrainArguments, TrainArguments(settings=base_config(flags)), flags, "train")
    if not parsed.out:
        raise UserError(f"there is no run folder: {_TRAIN_FLAGS}")
    if parsed.nproc != "1" or parsed.hosts:
        raise UserError("Slurm starts the ranks: leave --nproc and --hosts out, and give --tasks-per-node and --nodes")
    rest = without(flags, "--out", "--resume")
    out = str(Path(parsed.out).absolute())
    return [sys.executable, "-m", "paceline", "train", *rest, "--out", out, "--resume", "auto"]
