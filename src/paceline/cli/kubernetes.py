"""paceline kubernetes"""

import re
from pathlib import PurePosixPath

from paceline.base.errors import UserError
from paceline.cli.flags import parse
from paceline.cli.scheduled import divided, require_positive, train_command
from paceline.tools.jobs.kubernetes import Kubernetes, manifest

_SAVE_S = 60  # that a launcher gives its ranks


def main(arguments: list[str]) -> int:
    options, flags = divided(arguments)
    parsed = parse(Kubernetes, Kubernetes(), options, "kubernetes")
    command = train_command("kubernetes", flags, "starts the pods: give --nodes and --nproc")
    require_positive(parsed, "nodes")
    if parsed.grace_s <= _SAVE_S:
        raise UserError(f"--grace-s is {parsed.grace_s}; ranks have {_SAVE_S} s to save, so give more")
    out = PurePosixPath(command[command.index("--out") + 1])
    _check_volumes(parsed.volumes, out)
    print(manifest(parsed, _name(parsed, out), ["paceline", *command]), end="")
    return 0


def _name(job: Kubernetes, out: PurePosixPath) -> str:
    """Returns the job's name. Raises UserError if Kubernetes would refuse it, or a pod's name made of it."""
    name = job.name or re.sub(r"[^a-z0-9]+", "-", out.name.lower()).strip("-")
    longest = 63 - len(f"-{job.nodes - 1}")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        raise UserError(
            f"the job would be named '{name}'; a name has small letters, digits and '-', begins with a letter, and has "
            f"at most {longest} characters: give one by --name"
        )
    return name


def _check_volumes(text: str, out: PurePosixPath) -> None:
    """Raises UserError for volumes that are not CLAIM:/PATH, or if none of them holds the run folder."""
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
