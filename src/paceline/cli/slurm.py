"""paceline slurm"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import UserError
from paceline.cli.flags import base_config, parse, without
from paceline.cli.train import TrainArguments
from paceline.tools.jobs.slurm import Slurm, batch_script

_TRAIN_FLAGS = "the options of `paceline train` come after --, with --out: paceline slurm -- --preset demo --out runs/x"


@dataclass(frozen=True, kw_only=True)
class SlurmArguments:
    """Print a batch script for Slurm that trains with the options after `--`: it saves before its time is over or when
    it is preempted, and queues itself again until the run is done. `paceline slurm ... > job.sh; sbatch job.sh`"""

    nodes: int = 1
    """Number of nodes."""
    tasks_per_node: int = 1
    """Ranks on each node: one per GPU, or one per group of cores."""
    gpus_per_task: int = 0
    """GPUs of a rank: 1, or 0 on CPUs."""
    cpus_per_task: int = 0
    """Cores of a rank; 0: Slurm's default."""
    time: str = "04:00:00"
    """Time limit of one start of the job."""
    save_before_s: int = 300
    """Save and stop so many seconds before the time limit; Slurm may be up to 60 s early."""
    sbatch: str = ""
    """Further options of sbatch: --sbatch="--partition=gpu --account=mine"."""


def main(arguments: list[str]) -> int:
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parse(SlurmArguments, SlurmArguments(), arguments[:place], "slurm")
    command = train_command(arguments[place + 1 :])
    for name in ("nodes", "tasks_per_node", "save_before_s"):
        if getattr(parsed, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(parsed, name)}; it must be at least 1")
    out = command[command.index("--out") + 1]
    job = Slurm(
        name=Path(out).name,
        nodes=parsed.nodes,
        tasks_per_node=parsed.tasks_per_node,
        gpus_per_task=parsed.gpus_per_task,
        cpus_per_task=parsed.cpus_per_task,
        time=parsed.time,
        save_before_s=parsed.save_before_s,
        options=shlex.split(parsed.sbatch),
    )
    print(batch_script(job, command), end="")
    return 0


def train_command(flags: list[str]) -> list[str]:
    """Returns the command that each task runs, with absolute paths: it begins the run or continues it. Raises UserError
    for options that `paceline train` refuses."""
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
