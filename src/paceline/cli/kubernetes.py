"""paceline kubernetes"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from paceline.base.errors import UserError, require_at_least
from paceline.cli.flags import divided, parse
from paceline.cli.scheduled import filled, train_command


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """Print a job for Kubernetes that trains with the options after `--`: each pod is one host, starts its ranks, and
    saves when it is asked to stop; the cluster starts pods again until the run is done.
    `paceline kubernetes ... | kubectl apply -f -`"""

    kind: Literal["job", "trainjob"] = "job"
    """job: an Indexed Job and its headless service. trainjob: a TrainJob of Kubeflow Trainer 2.3."""
    name: str = ""
    """Name of the job, its service and its pods; empty: that of the run folder."""
    image: str = "paceline:latest"
    """Image of the containers; the Dockerfile makes one."""
    nodes: int = 1
    """Number of pods, one for each node."""
    nproc: int = 0
    """Ranks in each pod; 0: one for each GPU, one without GPUs."""
    gpus: int = 0
    """GPUs of each pod."""
    cpus: str = ""
    """Cores of each pod, as Kubernetes writes them; empty: no limit."""
    memory: str = ""
    """Memory of each pod, such as 64Gi; empty: no limit."""
    volumes: str = "runs:/runs"
    """Volume claims and where they are mounted: runs:/runs,corpora:/data. One holds the run folder; with several
    nodes it is one that all of them can write to (ReadWriteMany)."""
    grace_s: int = 0
    """Seconds between a pod's SIGTERM and its SIGKILL; 0: checkpoint.grace-s and 10."""
    failures: int = 20
    """With kind job: failed pods after which the job is given up. A lost node costs one for each pod."""


def manifest(job: Kubernetes, name: str, command: Sequence[str]) -> str:
    """Returns the template of this kind, filled in.

    A pod fails with 1 when another one is lost, and counts against backoffLimit; one that was evicted, or that has
    saved and stopped (75), does not count. After 2 a new start would fail again. The names of pods are known before
    they are ready, because their ranks wait for each other. A TrainJob gets its variables from Kubeflow; how often it
    starts pods again is the runtime's.
    """
    limits = {"nvidia.com/gpu": job.gpus, "cpu": job.cpus, "memory": job.memory}
    claims = [(claim, path) for claim, _, path in (volume.partition(":") for volume in job.volumes.split(","))]
    mounts = [{"name": claim, "mountPath": path} for claim, path in claims]
    volumes = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in dict(claims)]
    memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # else 64 MiB; NCCL needs more
    written = {
        "name": name,
        "master": f"{name}-0.{name}",
        "image": job.image,
        "command": [word.replace("$", "$$") for word in command],  # in Kubernetes $(NAME) is a variable, and $$ is $
        "resources": {"limits": {resource: limit for resource, limit in limits.items() if limit}},
        "mounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
        "volumes": [*volumes, memory],
    }
    numbers = {"nodes": job.nodes, "ranks": job.nproc or max(1, job.gpus), "grace_s": job.grace_s}
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in written.items()}  # JSON is YAML
    return filled(f"{job.kind}.yaml", failures=job.failures, **numbers, **texts)


_END_S = 10  # for a pod to end, when its ranks have had checkpoint.grace-s to save


def main(arguments: list[str]) -> int:
    options, flags = divided(arguments)
    parsed = parse(Kubernetes, Kubernetes(), options, "kubernetes")
    command, folder, ranks_grace_s = train_command("kubernetes", flags, "starts the pods: give --nodes and --nproc")
    require_at_least(parsed, "--", nodes=1, nproc=0, gpus=0, grace_s=0, failures=0)
    save_s = math.ceil(ranks_grace_s)
    needed_s = save_s + _END_S
    if 0 < parsed.grace_s < needed_s:
        raise UserError(
            f"--grace-s is {parsed.grace_s}, and ranks have {save_s} s to save (checkpoint.grace-s): give at least "
            f"{needed_s}, or a smaller --checkpoint.grace-s after --"
        )
    parsed = dataclasses.replace(parsed, grace_s=parsed.grace_s or needed_s)
    out = PurePosixPath(folder)
    _check_volumes(parsed.volumes, out)
    print(manifest(parsed, _name(parsed, out), ["paceline", *command]), end="")
    return 0


def _name(job: Kubernetes, out: PurePosixPath) -> str:
    name = job.name or re.sub(r"[^a-z0-9]+", "-", out.name.lower()).strip("-")
    longest = 63 - len(f"-{job.nodes - 1}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        raise UserError(
            f"the job would be named '{name}'; a name has small letters, digits and '-', begins with a letter, and has "
            f"at most {longest} characters: give one by --name"
        )
    return name


def _check_volumes(text: str, out: PurePosixPath) -> None:
    paths = []
    for volume in text.split(","):
        claim, _, path = volume.partition(":")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", claim) or not re.fullmatch(r"/[^:]+", path):
            raise UserError(f"--volumes has '{volume}'; write each as CLAIM:/PATH: --volumes runs:/runs,corpora:/data")
        paths.append(PurePosixPath(path))
    if not any(path in out.parents for path in paths):
        raise UserError(
            f"--out is {out}, which is on none of the volumes ({text}), so it would end with its pod; give a folder on "
            f"one, such as {paths[0]}/{out.name}"
        )
