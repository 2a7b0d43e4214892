"""From the variables of a step of Slurm to a world; those of a batch script are none."""

import pytest

from paceline.base.errors import UserError
from paceline.world.env import Environment, detect
from paceline.world.schedulers import first_host, tasks_by_node, variables

JOB = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "3"}
STEP = {  # `srun -N2 -n3 -m cyclic`, its last task
    **JOB,
    **{"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_ID": "4"},
    **{"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "n[1-2]"},
}


def test_a_task_of_a_step_is_a_rank() -> None:
    found = detect(STEP)
    port = found.master_port
    assert 20000 <= port < 30000
    assert found == Environment(
        rank=2,
        local_rank=1,
        world_size=3,
        local_world_size=2,
        master_addr="n1",
        master_port=port,
        job="slurm 7",
    )
    assert detect({**STEP, "SLURM_STEP_ID": "5"}).master_port != port
    given = detect({**STEP, "MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (given.master_addr, given.master_port) == ("other", 1234)


@pytest.mark.parametrize(
    "env",
    [JOB, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**STEP, "RANK": "0"}, {}],
    ids=["script", "one", "torchrun", "none"],
)
def test_nothing_else_is(env: dict[str, str]) -> None:
    assert variables(env) == {}


def test_half_a_step_is_refused_naming_what_is_missing() -> None:
    half = {name: value for name, value in STEP.items() if name not in ("SLURM_STEP_ID", "SLURM_NODEID")}
    with pytest.raises(UserError, match=r"^SLURM_STEP_NODELIST is set, and SLURM_STEP_ID, SLURM_NODEID missing: "):
        detect(half)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[07-09,12]-ib,login", "gpu07-ib"),
        ("login,gpu[1-2]", "login"),
        ("rack[0-1]node[3,5]", "rack0node3"),
    ],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_by_node() -> None:
    assert tasks_by_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_by_node("4") == [4]
