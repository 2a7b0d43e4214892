"""paceline slurm"""

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.base.errors import UserError, require_at_least
from paceline.cli.flags import divided, parse, shell_words
from paceline.cli.scheduled import filled, train_command


@dataclass(frozen=True, kw_only=True)
class Slurm:
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
    """Save and stop N seconds before the time limit; Slurm may be up to 60 s early."""
    sbatch: str = ""
    """Further options of sbatch: --sbatch="--partition=gpu --account=mine"."""


def batch_script(job: Slurm, name: str, command: Sequence[str]) -> str:
    """Returns the template, filled in. In it SIGTERM goes to the tasks by scancel: srun itself answers one by killing
    them. A signal to the script ends its `wait`, so it waits again. A step ends with the highest status of its tasks:
    75 if all have saved and stopped. Since Slurm 22.05 a step has the job's cores of a task only if srun is told."""
    resources = f" --cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else ""
    resources += f" --gpus-per-task={job.gpus_per_task}" if job.gpus_per_task else ""
    resources += "".join(f"\n#SBATCH {shlex.quote(option)}" for option in shell_words(job.sbatch))
    numbers = {"nodes": job.nodes, "tasks_per_node": job.tasks_per_node, "save_before_s": job.save_before_s}
    words = {"name": shlex.quote(name), "resources": resources, "time": job.time, "command": shlex.join(command)}
    return filled("slurm.sh", **numbers, **words)


def main(arguments: list[str]) -> int:
    options, flags = divided(arguments)
    parsed = parse(Slurm, Slurm(), options, "slurm")
    command, out, grace_s = train_command("slurm", flags, "starts the ranks: give --nodes and --tasks-per-node")
    require_at_least(parsed, "--", nodes=1, tasks_per_node=1, gpus_per_task=0, cpus_per_task=0, save_before_s=1)
    if parsed.save_before_s < grace_s:
        raise UserError(
            f"--save-before-s is {parsed.save_before_s}, and ranks have {grace_s:g} s to save (checkpoint.grace-s): "
            "give at least that, or a smaller --checkpoint.grace-s after --"
        )
    if _limit_s(parsed.time) <= parsed.save_before_s:
        raise UserError(
            f"--time is {parsed.time}, and the job stops {parsed.save_before_s} s before that (--save-before-s): it "
            "would be queued again for ever, without a step; give a longer --time or a smaller --save-before-s"
        )
    print(batch_script(parsed, out.name, [sys.executable, "-m", "paceline", *command]), end="")
    return 0


def _limit_s(time: str) -> float:
    """Returns the seconds of a time limit in Slurm's forms M, M:S, H:M:S, D-H, D-H:M and D-H:M:S; infinity of 0, which
    is no limit, and of another text."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", time)
    if match is None:
        return math.inf
    days, *parts = match.groups(default="")
    numbers = [int(part) for part in parts if part]
    if not days and len(numbers) < 3:
        numbers.insert(0, 0)  # hours
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return (24 * int(days or 0) + hours) * 3600 + 60 * minutes + seconds or math.inf
