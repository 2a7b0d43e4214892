"""From the variables of a pod to a world: of a pod with one rank; of others the launcher reads them."""

import pytest

from paceline.base.errors import UserError
from paceline.world.env import Environment, detect
from paceline.world.schedulers import Pod, read_pod

JOB = {"PET_MASTER_ADDR": "x-0.x", "PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "PET_NPROC_PER_NODE": "1"}
TRAINJOB = {**JOB, "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400", "PET_NPROC_PER_NODE": "8"}


def test_a_pod_of_one_rank_is_that_rank() -> None:
    job = "kubernetes x-0.x:29400"
    place = Environment(rank=1, world_size=2, master_addr="x-0.x", master_port=29400, job=job)
    assert detect(JOB) == place
    assert detect({**JOB, "PET_NNODES": "1", "JOB_COMPLETION_INDEX": "0"}) == Environment()
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert detect({**TRAINJOB, **torchrun}).rank == 3


def test_the_ranks_of_others_are_started_by_a_launcher() -> None:
    assert read_pod(TRAINJOB) == Pod(1, 2, "8", "x-0.x", 29400)
    with pytest.raises(UserError, match="PET_NPROC_PER_NODE is 8"):
        detect(TRAINJOB)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        ({"PET_NNODES": "²"}, "PET_NNODES is '²'"),
        ({"JOB_COMPLETION_INDEX": "2"}, "PET_NODE_RANK is 2"),
    ],
)
def test_a_place_that_cannot_be_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        detect({**JOB, **env})
