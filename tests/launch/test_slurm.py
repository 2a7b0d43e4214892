"""On a real Slurm of two nodes: a job is stopped, preempted, loses a node, and ends with the undisturbed curve."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from program import TINY, losses, rows, run, steps
from slurm_cluster import Cluster, wait_for

pytestmark = [pytest.mark.group("slurm"), pytest.mark.long]

STEPS = 40
SLOW = "rank=0 step=1 phase=data kind=sleep seconds=0.1 times=1000 attempt=any"  # so that there is time to disturb it
FLAGS = (*TINY, "--checkpoint.every", "5")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as made:
            yield made
    except slurm_cluster.Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("straight") / "run"
    run("train", *FLAGS, "--nproc", "2", "--out", str(folder)).require(0)
    return losses(folder)


def submit(cluster: Cluster, out: Path, *options: str, flags: tuple[str, ...] = ()) -> str:
    """Returns the id of a job on both nodes; its script is what `paceline slurm` prints."""
    command = ("slurm", "--nodes", "2", *flags, "--", *FLAGS, "--out", str(out))
    script = run(*command).require(0).out.replace("-TASK", "-$SLURM_ARRAY_TASK_ID")  # as the guide says
    return cluster.submit(script, f"--export=ALL,PACELINE_FAULTS={SLOW}", *options)


def until(cluster: Cluster, job: str, out: Path, num_steps: int) -> None:
    wait_for(lambda: len(steps(out)) >= num_steps, f"step {num_steps} of job {job}: {cluster.said(job)}")


def completes(cluster: Cluster, job: str) -> None:
    wait_for(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), f"the end of job {job}")
    assert cluster.state(job) == "COMPLETED", cluster.said(job)


def test_a_job_that_is_asked_to_stop_saves_is_queued_again_and_ends_with_the_undisturbed_curve(
    cluster: Cluster, undisturbed: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = submit(cluster, out)
    until(cluster, job, out, 8)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    cluster.start_again(job)
    completes(cluster, job)
    assert losses(out) == undisturbed
    ends = [event["reason"] for event in rows(out / "events.jsonl") if event["event"] == "end"]
    assert ends[0].startswith("SIGTERM")
    assert len(ends) == 2
    assert [event["hosts"] for event in rows(out / "events.jsonl") if event["event"] == "start"] == [["n1", "n2"]]


def test_a_preempted_job_continues_after_the_other(cluster: Cluster, undisturbed: list[float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = submit(cluster, out, "--exclusive")
    until(cluster, job, out, 8)
    urgent = "#!/bin/bash\n#SBATCH --partition=high --nodes=2 --exclusive\nsrun sleep 1\n"
    other = cluster.submit(urgent)
    cluster.start_again(job)
    completes(cluster, other)
    completes(cluster, job)
    assert losses(out) == undisturbed


def test_a_lost_node_costs_the_steps_since_the_last_save(
    cluster: Cluster, undisturbed: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    job = submit(cluster, out)
    until(cluster, job, out, 8)
    cluster.lose("n2")
    wait_for(lambda: cluster.state(job) == "PENDING", f"job {job} is queued again")
    cluster.start_node("n2")
    cluster.wait_until_idle()
    cluster.start_again(job)
    completes(cluster, job)
    assert losses(out) == undisturbed


def test_of_an_array_of_two_jobs_one_is_stopped_and_queued_again(
    cluster: Cluster, undisturbed: list[float], tmp_path: Path
) -> None:
    flags = ("--gpus-per-task", "1")  # each task sees one device, which no CPU build of torch takes
    array = submit(cluster, tmp_path / "run-TASK", "--array=0-1", flags=flags)
    until(cluster, f"{array}_1", tmp_path / "run-1", 8)
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_1")  # to Slurm, its number is the array's
    cluster.start_again(f"{array}_1")
    for i in range(2):
        completes(cluster, f"{array}_{i}")
        assert losses(tmp_path / f"run-{i}") == undisturbed
        assert [event["event"] for event in rows(tmp_path / f"run-{i}" / "events.jsonl")].count("end") == 1 + i


def test_a_job_of_a_script_is_queued_again_when_its_ranks_have_saved(cluster: Cluster, tmp_path: Path) -> None:
    """A rank asks to stop in step 6. Mutation: a task of a script ends with 0 though it only saved."""
    out, script = tmp_path / "run", Path(__file__).parents[1] / "replica" / "run_script.py"
    command = ("slurm", "--nodes", "2", "--", "--out", str(out), "--", str(script), str(out), "stop")
    job = cluster.submit(run(*command).require(0).out, "--export=ALL")
    until(cluster, job, out, 7)
    cluster.start_again(job)
    completes(cluster, job)
    assert len(losses(out)) == 12
    ends = [event["reason"] for event in rows(out / "events.jsonl") if event["event"] == "end"]
    assert ends == ["SIGTERM on rank 1", "horizon reached"]


def srun(cluster: Cluster, out: Path, *options: str, check: bool = True) -> None:
    """Runs the command that `paceline slurm` prints, as a step of its own."""
    command = run("slurm", "--", *FLAGS, "--out", str(out)).require(0).out.split("srun")[1]
    words = command.split("\\\n")[1].removesuffix(" &\n").split(" &\n")[0].split()
    cluster.run("srun", "-N2", "--kill-on-bad-exit=1", *options, *words, check=check)


def test_tasks_that_are_spread_unevenly_are_one_world(cluster: Cluster, tmp_path: Path) -> None:
    for spread in ("block", "cyclic"):
        out = tmp_path / spread
        srun(cluster, out, "-n3", "-m", spread)
        start = rows(out / "events.jsonl")[0]
        assert start["world_size"] == 3
        assert sorted(start["hosts"]) == ["n1", "n1", "n2"]
        assert len(losses(out)) == STEPS


def test_a_task_that_is_killed_ends_the_step(cluster: Cluster, tmp_path: Path) -> None:
    fault = "PACELINE_FAULTS=rank=1 step=5 phase=forward kind=kill"
    srun(cluster, tmp_path / "run", "-n2", f"--export=ALL,{fault}", check=False)
    assert len(losses(tmp_path / "run")) == 4
    cluster.wait_until_idle()
