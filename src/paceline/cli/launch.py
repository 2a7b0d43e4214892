"""paceline launch"""

import os
import sys
from dataclasses import dataclass

from paceline.base.errors import UserError
from paceline.cli.flags import divided, flag_of, parse, shell_words
from paceline.launch.options import DEFAULT_PORT, read_names

_EXAMPLE = "paceline launch --hosts a:2,b:2 -- train --preset demo --out runs/x"
_OURS = ("--nproc", "--hosts", "--min-hosts", "--node-rank")


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
    port: int = DEFAULT_PORT
    """The port on each host at which its launcher answers the others."""
    ssh: str = "ssh"
    """The ssh command, for instance: ssh -F cluster.conf"""


def main(arguments: list[str]) -> int:
    own, command = divided(arguments)
    parsed = parse(LaunchArguments, LaunchArguments(), own, "launch")
    hosts = read_names(parsed.hosts, parsed.hostfile)
    grace_s = _checked(command)
    shell_words(parsed.ssh)
    if not 1 <= parsed.port < 1 << 16:
        raise UserError(f"--port is {parsed.port}; it must be from 1 to {(1 << 16) - 1}")
    if "RANK" in os.environ:
        raise UserError("launch inside a world that a launcher made already; start it from a plain shell")
    from paceline.launch.ssh import Ssh, launch

    ssh = Ssh(parsed.ssh, parsed.python or sys.executable, parsed.chdir or os.getcwd(), parsed.port, grace_s)
    return launch(hosts, command, ssh)


def _checked(command: list[str]) -> float:
    """Returns the run's checkpoint.grace-s. Raises UserError for a command that cannot be started on other hosts."""
    if command[:1] not in (["train"], ["resume"]):
        raise UserError(f"what the hosts are to run comes after `--`, train or resume: {_EXAMPLE}")
    if found := [flag for flag in map(flag_of, command) if flag in _OURS]:
        raise UserError(f"{found[0]} is for a command that is started on each host by hand; `launch` gives it itself")
    if command[0] == "train":
        from paceline.cli.train import checked_arguments

        train = checked_arguments(command[1:])
        if not train.out:
            raise UserError(f"there is no run folder: give --out, as in: {_EXAMPLE}")
        return train.settings.checkpoint.grace_s
    from paceline.cli.resume import ResumeArguments

    # The run's config is on the hosts: a longer time than the default is given again.
    resume = parse(ResumeArguments, ResumeArguments(run=""), command[1:], "resume")
    return resume.settings.checkpoint.grace_s
