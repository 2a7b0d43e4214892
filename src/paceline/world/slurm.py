"""Slurm's job steps: each task of `srun` is a rank.

A batch script has SLURM_PROCID=0 as well; SLURM_STEP_NODELIST is set in a step only. The other STEP variables are those
of this step, which may be a part of the job.
"""

import re
from collections.abc import Mapping
from zlib import crc32

from paceline.base.errors import UserError

_OF_A_STEP = [f"SLURM_{name}" for name in ("STEP_TASKS_PER_NODE", "JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID")]
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below the ports that Linux gives to connections


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for this task of a step of several tasks; none outside of one, or if RANK or
    WORLD_SIZE is set: the task may have started torchrun. MASTER_ADDR and MASTER_PORT stay as given. Raises UserError
    if some of Slurm's are missing."""
    num_tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_NODELIST" not in env or num_tasks == "1" or not {"RANK", "WORLD_SIZE"}.isdisjoint(env):
        return {}
    if missing := [name for name in _OF_A_STEP if name not in env]:
        raise UserError(
            f"SLURM_STEP_NODELIST is set, and {', '.join(missing)} missing: pass all of Slurm's variables on to ranks "
            "in a container, or start them with torchrun"
        )
    tasks = tasks_by_node(env["SLURM_STEP_TASKS_PER_NODE"])
    step = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"  # several steps of a job may share their first node
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(env["SLURM_NODEID"])]),
        "MASTER_ADDR": env.get("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": env.get("MASTER_PORT", str(_FIRST_PORT + crc32(step.encode()) % _NUM_PORTS)),
        "PACELINE_JOB": f"slurm {env['SLURM_JOB_ID']}",  # stays when the job is queued again
    }


def tasks_by_node(text: str) -> list[int]:
    """Returns the number of tasks on each node from Slurm's notation: "2(x3),1" is 2, 2, 2, 1."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's notation: "gpu[07-09,12]-ib,login" begins with gpu07-ib."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
