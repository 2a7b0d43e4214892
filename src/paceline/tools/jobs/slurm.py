"""A batch script for Slurm that trains, saves before its time is over, and queues itself again until the run is
done."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

# SIGTERM goes to the tasks by scancel: srun itself answers one by killing them. A signal to the script ends its `wait`,
# so it waits again. A step ends with the highest status of its tasks: 75 if all have saved and stopped.
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes} --ntasks-per-node={tasks_per_node}{resources}
#SBATCH --time={time} --signal=B:USR1@{save_before_s}
#SBATCH --requeue --open-mode=append --output=%x-%j.out

asked=
trap 'asked=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1   # {save_before_s} s before the end: save and stop
srun --kill-on-bad-exit=0 \\
    {command} &
step=$!
wait $step; status=$?
if [ "$asked" ]; then wait $step; status=$?; fi
if [ $status = 75 ]; then   # saved, not done
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60   # until Slurm ends this script
fi
exit $status
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What to ask Slurm for."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_task: int
    cpus_per_task: int
    time: str
    save_before_s: int
    options: Sequence[str]  # further lines of sbatch's options


def batch_script(job: Slurm, command: Sequence[str]) -> str:
    """Returns the script for `sbatch`, whose tasks run the command."""
    resources = f" --cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else ""
    resources += f" --gpus-per-task={job.gpus_per_task}" if job.gpus_per_task else ""
    resources += "".join(f"\n#SBATCH {option}" for option in job.options)
    return _SCRIPT.format(
        name=shlex.quote(job.name),
        nodes=job.nodes,
        tasks_per_node=job.tasks_per_node,
        resources=resources,
        time=job.time,
        save_before_s=job.save_before_s,
        command=shlex.join(command),
    )
