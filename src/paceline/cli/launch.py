"""paceline launch"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.errors import UserError
from paceline.base.units import plural
from paceline.cli.flags import divided, flag_of, parse, shell_words
from paceline.cli.resume import ResumeArguments, folder_of
from paceline.cli.train import checked_arguments
from paceline.launch.coordinator import Job, launch
from paceline.launch.options import read_names
from paceline.launch.ssh import Ssh

_EXAMPLE = "paceline launch --hosts a:2,b:2 -- train --preset demo --out runs/x"


@dataclass(frozen=True, kw_only=True)
class LaunchArguments:
    """Run the command after `--`, `train` or `resume`, on several hosts by ssh, from one terminal.

    The hosts must let you in without a question (keys, known_hosts, ~/.ssh/config). If this command ends in any way,
    the ranks on all hosts save and end. Use a private network: between ranks there is no authentication."""

    hosts: str = ""
    """NAME:RANKS,NAME:RANKS: hosts by the names that ssh knows, and the number of ranks of each: 1 if it is left out,
    or auto as for `train --nproc`."""
    hostfile: str = ""
    """A file with the hosts instead, one on each line: NAME, NAME:RANKS, or NAME slots=RANKS as for mpirun."""
    chdir: str = ""
    """The folder on each host in which the command runs; empty: the path of the current folder."""
    python: str = ""
    """The Python interpreter on each host that has paceline; empty: the path of this one."""
    min_hosts: int = 0
    """Train as long as so many of the hosts are there: one that is lost leaves the others training from the newest
    checkpoint, and is taken in when it answers again; 0: all of them."""
    ssh: str = "ssh"
    """The ssh command, for instance: ssh -F cluster.conf"""


def main(arguments: list[str]) -> int:
    ours, command = divided(arguments)
    parsed = parse(LaunchArguments, LaunchArguments(), ours, "launch")
    hosts = read_names(parsed.hosts, parsed.hostfile)
    shell_words(parsed.ssh)
    if not 0 <= parsed.min_hosts <= len(hosts):
        raise UserError(f"--min-hosts is {parsed.min_hosts}, and {plural(len(hosts), 'host')} listed; 0 means all")
    job = _job(command, parsed.min_hosts or len(hosts), len(hosts))
    if "RANK" in os.environ:
        raise UserError("launch inside a world that a launcher made already; start it from a plain shell")
    return launch(hosts, job, Ssh(parsed.ssh, parsed.python or sys.executable, parsed.chdir or os.getcwd()))


def _job(command: list[str], least: int, num_hosts: int) -> Job:
    """Returns what the hosts are to run. Raises UserError for a command that cannot be started on other hosts."""
    if command[:1] not in (["train"], ["resume"]):
        raise UserError(
            f"what the hosts are to run comes after `--`, train or resume: {_EXAMPLE}; or a script of yours: "
            "paceline launch --hosts a:2,b:2 -- train --out runs/x -- train.py"
        )
    if "--nproc" in map(flag_of, divided(command)[0]):
        raise UserError("--nproc after `--`: `launch` gives each host its number of ranks, as in --hosts a:2,b:2")
    if command[0] == "train":
        parsed: Any = checked_arguments(command[1:])
        run, step = Path(parsed.out), None
        if not parsed.out:
            raise UserError(f"there is no run folder: give --out, as in: {_EXAMPLE}")
    else:
        # The run's config is on the hosts: times that are longer than the defaults are given again.
        parsed = parse(ResumeArguments, ResumeArguments(folder=""), command[1:], "resume")
        run, step = folder_of(parsed.folder), parsed.step if parsed.step >= 0 else None
    parallel = parsed.settings.parallel
    if parallel.fixed_shares() and least < num_hosts:
        raise UserError(
            f"parallel.shares {parallel.shares} has one number for each rank, and with --min-hosts {least} their "
            "number may change; use --parallel.shares auto"
        )
    if step is not None and num_hosts > 1:
        raise UserError(
            "--step on several hosts: the newest checkpoint of all hosts counts. Resume from that step on one host, "
            "and remove the run folder on the others"
        )
    return Job(
        command=command,
        run=run,
        least=least,
        max_restarts=parsed.max_restarts,
        grace_s=parsed.settings.checkpoint.grace_s,
        timeout_s=parallel.timeout_s,
    )
