"""Pods of Kubernetes: each is a host of the world, with one rank or several.

Their place is in the variables that torchrun reads instead of its options: Kubeflow Trainer sets them, and so does the
Job that `paceline kubernetes` prints.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base.errors import UserError

_PORT = "29400"


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


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables if this process is the only rank of one of several pods; else none."""
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
