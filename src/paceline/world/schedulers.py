"""Ranks that a scheduler starts: torchrun's variables from Slurm's and from those of a pod of Kubernetes.

Slurm: each task of a job step (`srun`) is a rank. A batch script has SLURM_PROCID=0 as well; SLURM_STEP_NODELIST is set
in a step only. The other STEP variables are those of this step, which may be a part of the job.

Kubernetes: each pod is a host of the world, with one rank or several. Its place is in the variables that torchrun reads
instead of its options: Kubeflow Trainer sets them, and so does the Job that `paceline kubernetes` prints.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from paceline.base.errors import UserError

_OF_A_STEP = [f"SLURM_{name}" for name in ("STEP_TASKS_PER_NODE", "JOB_ID", "STEP_ID", "PROCID", "LOCALID", "NODEID")]
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below the ports that Linux gives to connections
_PORT = "29400"  # of pods


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for this rank; none if no scheduler has started it as one, or if RANK or WORLD_SIZE
    is set: it may have started torchrun. Raises UserError if some of the scheduler's are missing or wrong."""
    return {**_of_a_task(env), **_of_a_pod(env)}


def _of_a_task(env: Mapping[str, str]) -> dict[str, str]:
    """For a task of a step of several tasks. MASTER_ADDR and MASTER_PORT stay as given."""
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
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's notation: "gpu[07-09,12]-ib,login" begins with gpu07-ib."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


@dataclass(frozen=True)
class Pod:
    """One host of a world whose ranks meet at the first host's address."""

    number: int  # from 0
    num_pods: int
    num_ranks: str  # in each pod; "auto": one per GPU
    master_addr: str
    master_port: int

    @property
    def job(self) -> str:
        """A name that stays when pods are started again."""
        return f"kubernetes {self.master_addr}:{self.master_port}"


def read_pod(env: Mapping[str, str]) -> Pod | None:
    """Returns this pod's place; None outside of one, or if RANK or WORLD_SIZE is set: torchrun reads them, too.
    Raises UserError for a place that is no number."""
    if not env.get("PET_MASTER_ADDR") or not {"RANK", "WORLD_SIZE"}.isdisjoint(env):
        return None
    numbers = {
        "PET_NNODES": env.get("PET_NNODES", ""),
        "PET_NODE_RANK": env.get("PET_NODE_RANK", env.get("JOB_COMPLETION_INDEX", "")),
        "PET_MASTER_PORT": env.get("PET_MASTER_PORT", _PORT),
    }
    for name, value in numbers.items():
        if not value.isdecimal():
            raise UserError(
                f"{name} is '{value}' beside PET_MASTER_ADDR; it must be a whole number (an Indexed Job's "
                "JOB_COMPLETION_INDEX stands for PET_NODE_RANK). Start a world of another kind with torchrun"
            )
    num_pods, number, port = map(int, numbers.values())
    if number >= num_pods:
        raise UserError(f"PET_NODE_RANK is {number} and PET_NNODES {num_pods}; pods count from 0 to PET_NNODES - 1")
    num_ranks = env.get("PET_NPROC_PER_NODE", "1")
    return Pod(number, num_pods, num_ranks if num_ranks.isdecimal() else "auto", env["PET_MASTER_ADDR"], port)


def _of_a_pod(env: Mapping[str, str]) -> dict[str, str]:
    """If this process is the only rank of one of several pods."""
    pod = read_pod(env)
    if pod is None or pod.num_ranks != "1" or pod.num_pods == 1:
        return {}
    return {
        "RANK": str(pod.number),
        "WORLD_SIZE": str(pod.num_pods),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": pod.master_addr,
        "MASTER_PORT": str(pod.master_port),
        "PACELINE_JOB": pod.job,
    }
