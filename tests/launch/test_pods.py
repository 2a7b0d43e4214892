"""The Job that `paceline kubernetes` prints, its pods started by hand: two namespaces, a name that comes late."""

import os
import signal
from pathlib import Path

import pytest
import yaml
from namespaces import Host
from program import TINY, Ended, Program, losses, rows, run, steps

pytestmark = [pytest.mark.lab, pytest.mark.long]

SLOW = "rank=0 step=1 phase=data kind=sleep seconds=0.1 times=1000 attempt=any"  # so that there is time to disturb it
FLAGS = (*TINY, "--checkpoint.every", "5", "--train.steps", "24")


def start(job: dict, number: int, host: Host) -> Program:
    """What the kubelet does: the container's command with the container's variables."""
    container = job["spec"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item["value"] for item in container["env"]} | {"JOB_COMPLETION_INDEX": str(number)}
    program, *arguments = container["command"]
    assert program == "paceline"
    return Program(*arguments, env={**env, "PACELINE_FAULTS": SLOW}, host=host)


def end_of(pods: list[Program]) -> list[Ended]:
    ends = [pod.wait() for pod in pods]
    for pod in pods:
        pod.wait_until_gone()
    return ends


def test_pods_are_killed_drained_started_again_and_end_with_the_undisturbed_curve(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    straight, out = tmp_path / "straight", tmp_path / "run"
    run("train", *FLAGS, "--out", str(straight)).require(0)

    def begin(nproc: str) -> list[Program]:
        options = ("--nodes", "2", "--nproc", nproc, "--volumes", f"runs:{tmp_path}")
        printed = run("kubernetes", *options, "--", *FLAGS, "--out", str(out)).require(0).out
        job = list(yaml.safe_load_all(printed))[1]
        return [start(job, number, host) for number, host in enumerate(two_hosts)]

    pods = begin("2")
    pods[1].wait_for(lambda: "run-0.run does not resolve yet" in pods[1]._said())
    for host in two_hosts:
        with Path(f"/etc/netns/{host.name}/hosts").open("a") as names:
            names.write(f"{two_hosts[0].address} run-0.run\n")
    pods[0].wait_for(lambda: len(steps(out)) >= 7)
    pods[1].kill_all()  # its node is lost
    lost = end_of(pods)
    assert lost[0].require(1).err.count("error:") == 1, lost[0].err
    pods = begin("1")
    pods[0].wait_for(lambda: len(steps(out)) >= 12)
    os.kill(pods[1].pid, signal.SIGTERM)  # its node is drained: all ranks save and stop
    for ended in end_of(pods):
        ended.require(75)
    saved = steps(out)[-1]["step"]
    for ended in end_of(begin("1")):
        ended.require(0)
    assert losses(out) == pytest.approx(losses(straight), abs=1e-5)
    begun = [(event["event"], event.get("step")) for event in rows(out / "events.jsonl") if "world_size" in event]
    assert begun == [("start", None), ("resume", 5), ("resume", saved)]
