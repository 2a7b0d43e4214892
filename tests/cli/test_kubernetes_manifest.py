"""`paceline kubernetes` prints what a strict reading of Kubernetes' schemas takes, and refuses what a cluster would."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process import here

from paceline.cli.flags import base_config, parse
from paceline.cli.train import TrainArguments

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
TRAIN = ("--", "--preset", "tiny", "--train.sample-prompt", "$(date) $$(x) 🚀", "--out", "/runs/on")
FLAGS = ("--nodes", "2", "--gpus", "8", "--memory", "64Gi", "--volumes", "runs:/runs,corpora:/data")


def printed(*flags: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(here("kubernetes", *FLAGS, *flags, *TRAIN, cwd=Path.cwd()).require(0).out))


def pod(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


def test_the_job_is_valid_and_repeats_one_command() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job = printed()
    for document in (service, job):
        validate(document, "1.37", strict=True)
    container = pod(job)["containers"][0]
    command = [
        "--preset",
        "tiny",
        "--train.sample-prompt",
        "$$(date) $$$$(x) 🚀",
        "--out",
        "/runs/on",
        "--resume",
        "auto",
    ]
    assert container["command"] == ["paceline", "train", *command]
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env == {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "on-0.on"}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}}
    assert service["metadata"]["name"] == job["metadata"]["name"] == pod(job)["subdomain"] == "on"


@pytest.mark.parametrize(
    ("own", "trains", "seconds"),
    [((), (), 130), ((), ("--checkpoint.grace-s", "600"), 610), (("--grace-s", "700"), (), 700)],
)
def test_a_pod_is_killed_after_its_ranks(own: tuple[str, ...], trains: tuple[str, ...], seconds: int) -> None:
    out = here("kubernetes", *FLAGS, *own, *TRAIN, *trains, cwd=Path.cwd()).require(0).out
    assert pod(list(yaml.safe_load_all(out))[1])["terminationGracePeriodSeconds"] == seconds


def test_the_trainjob_has_the_same_command() -> None:
    (job,) = printed("--kind", "trainjob")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == pod(printed()[1])["containers"][0]["command"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)


def test_the_jobset_of_the_examples_has_a_valid_job() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    (inner,) = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    validate({"apiVersion": "batch/v1", "kind": "Job", "spec": inner["template"]["spec"]}, "1.37", strict=True)
    printed_env, env = (pod(job["template"])["containers"][0]["env"] for job in ({"template": printed()[1]}, inner))
    assert [item["name"] for item in env] == [item["name"] for item in printed_env]


@pytest.mark.parametrize("example", sorted(EXAMPLES.iterdir()), ids=lambda path: path.stem)
def test_the_examples_train_and_continue(example: Path) -> None:
    (command,) = re.findall(r"\[?paceline, train, (.*)\]|exec paceline train (.*)", example.read_text())
    flags = "".join(command).replace(",", "").split()
    parse(TrainArguments, TrainArguments(settings=base_config(flags)), flags, "train")
    assert flags[-2:] == ["--resume", "auto"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "completions"), "two"),
        (("spec", "backofLimit"), 3),
        (("spec", "template"), None),
        (("spec", "podFailurePolicy", "rules", 0, "onExitCodes", "values"), "75"),
        (("spec", "podFailurePolicy", "rules", 1, "action"), None),
        (("spec", "podFailurePolicy", "rules", 2, "onPodConditions", 0, "type"), None),
        (("spec", "template", "spec", "containers"), None),
        (("spec", "template", "spec", "subDomain"), "x"),
        (("spec", "template", "spec", "terminationGracePeriodSeconds"), "2m"),
        (("spec", "template", "spec", "containers", 0, "command"), "paceline train"),
        (("spec", "template", "spec", "containers", 0, "env", 0, "value"), 2),
        (("spec", "template", "spec", "volumes", 0, "persistentVolumeClaim", "claimName"), None),
    ],
    ids=lambda part: part[-1] if isinstance(part, tuple) else "",
)
def test_a_wrong_job_is_found(path: tuple[str | int, ...], value: object) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    job = printed()[1]
    *way, last = path
    inner: Any = job
    for step in way:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(validator.ValidationError):
        validator.validate(job, "1.37", strict=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to train"),
        (("--", "--preset", "tiny"), "there is no run folder"),
        (("--", "--preset", "tiny", "--out", "/tmp/x"), "--out is /tmp/x, which is on none of the volumes"),
        (("--", "--preset", "tiny", "--out", "/runs/x", "--nproc", "2"), "Kubernetes starts the pods"),
        (("--volumes", "runs", *TRAIN), "--volumes has 'runs'"),
        (("--name", "x_1", *TRAIN), "the job would be named 'x_1'"),
        (("--grace-s", "129", *TRAIN), "--grace-s is 129, and ranks have 120 s to save (checkpoint.grace-s)"),
        (("--grace-s", "300", *TRAIN, "--checkpoint.grace-s", "600"), "give at least 610"),
        (("--grace-s", "-5", *TRAIN), "--grace-s is -5"),
        (("--nodes", "0", *TRAIN), "--nodes is 0"),
        (("--nproc", "-3", *TRAIN), "--nproc is -3"),
        (("--gpus", "-2", *TRAIN), "--gpus is -2"),
        (("--failures", "-1", *TRAIN), "--failures is -1"),
    ],
)
def test_what_cannot_train_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in here("kubernetes", *arguments, cwd=tmp_path).require(2).err
