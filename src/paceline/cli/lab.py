"""paceline lab"""

import os
import shutil
import sys
from dataclasses import dataclass

from paceline.base import units
from paceline.base.errors import UserError, nearest
from paceline.base.process import say
from paceline.cli.flags import divided, parse
from paceline.cli.verbs import VERBS, find_verb
from paceline.launch.signals import StopSignals
from paceline.record.console import plain, table
from paceline.tools.lab.change import Change, change_lab
from paceline.tools.lab.hosts import Layout, lay_out, rate_text
from paceline.tools.lab.running import run_lab
from paceline.tools.lab.state import clean_up
from paceline.tools.lab.system import check_machine

_USAGE = """paceline lab [--hosts N] [options] -- VERB ...   several hosts on this machine, VERB run as all their ranks
paceline lab [options] -- exec PROGRAM ...       the same with any program, one process a host
paceline lab set --host b --rate 100mbit         a lab that runs: another rate, a cut link
paceline lab clean                               remove what a killed lab left; the next one does it, too

  paceline lab --hosts 2 --rate 1gbit -- train --preset demo
  paceline lab --hosts 2 --cpu 1.0,0.35 -- train --preset demo

Linux, as root. `paceline lab --help` and `paceline lab set --help` show the options.
"""


@dataclass(frozen=True, kw_only=True)
class LabArguments:
    """Make hosts on this machine, run the command after `--` on all of them, as torchrun would, and remove them.

    The command is a verb of paceline with its options, or `exec` and any program, once per host. `paceline lab set`
    changes a running lab; `paceline lab clean` removes what a killed one left."""

    hosts: int = 2
    """Number of hosts, called a, b, c ...; each has its own network, name and processes. Files are shared."""
    nproc: int = 1
    """Ranks per host."""
    rate: str = "unlimited"
    """Rate of each host's link, in each direction: 1gbit, 2.5gbit, 100mbit, 500kbit, unlimited; one for all, or one per
    host: 1gbit,100mbit. It counts Ethernet frames, of which 95.6% is TCP payload."""
    cpu: str = "unlimited"
    """Share of the processors: 1.0 is the time of one core, 0.35 a third of it, or unlimited; one for all, or one per
    host: 1.0,0.35."""


def main(arguments: list[str]) -> int:
    if not arguments or arguments == ["help"]:
        print(_USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "set":
        return _set(arguments[1:])
    if arguments[0] == "clean":
        return _clean(arguments[1:])
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    verbs = [*(verb for verb in VERBS if verb != "lab"), "exec"]
    of_lab, command = divided(arguments)
    if verb := next((word for word in of_lab if word in verbs), ""):  # no option of a lab has such a value
        raise UserError(f"what the hosts are to run comes after `--`: paceline lab ... -- {verb} ...")
    parsed = parse(LabArguments, LabArguments(), of_lab, "lab")
    if not command:
        raise UserError(f"nothing to run on the hosts; it comes after `--`\n\n{_USAGE}")
    line = _command(command, verbs)
    is_program = command[0] == "exec"
    if not is_program and not {"-h", "--help"}.isdisjoint(divided(command)[0]):
        return find_verb(command[0])(command[1:])  # here, because every rank would print it, and it needs no lab
    if "RANK" in os.environ:
        raise UserError("a lab inside a world that a launcher made already; start it from a plain shell")
    check_machine()
    if is_program and parsed.nproc != 1:
        raise UserError(f"--nproc is {parsed.nproc}, and exec runs one process a host; leave it out")
    layout = lay_out(parsed.hosts, parsed.nproc, parsed.rate, parsed.cpu)
    with StopSignals() as signals:
        return run_lab(layout, line, signals, lambda: _announce(layout))


def _command(words: list[str], verbs: list[str]) -> list[str]:
    if words[0] not in verbs:
        raise UserError(
            f"the hosts of a lab run a verb of paceline, or `exec` and a program; '{words[0]}' is neither"
            f"{nearest(words[0], verbs)}"
        )
    if words[0] != "exec":
        return [sys.executable, "-m", "paceline", *words]
    if not words[1:]:
        raise UserError("exec without a program; as in: paceline lab -- exec hostname")
    if shutil.which(words[1]) is None:
        raise UserError(f"there is no program '{words[1]}' to run on the hosts")
    return words[1:]


def _announce(layout: Layout) -> None:
    """Prints the hosts on standard error; standard output is rank 0's."""
    rows = [
        [
            host.name,
            host.address,
            rate_text(host.rate),
            f"{'all' if host.share is None else f'{host.share:.0%}'} of core{'s'[: len(host.cores) > 1]} "
            f"{', '.join(map(str, host.cores))}",
            f"{host.ranks[0]}-{host.ranks[-1]}" if len(host.ranks) > 1 else f"{host.ranks[0]}",
        ]
        for host in layout.hosts
    ]
    say(plain(table("The lab", ["host", "address", "rate", "processors", "ranks"], rows)).removesuffix("\n"))
    if layout.is_crowded:
        cores = units.plural(layout.num_cores, "core")
        say(f"{len(layout.hosts)} hosts share {cores}: none is as fast as it would be alone\n")


def _set(arguments: list[str]) -> int:
    change = parse(Change, Change(), arguments, "lab set")
    if not change.host:
        raise UserError("which host? as in: paceline lab set --host b --rate 100mbit")
    if not (change.rate or change.link):
        raise UserError(f"nothing to change on host {change.host}; give --rate or --link")
    check_machine()
    change_lab(change)
    return 0


def _clean(arguments: list[str]) -> int:
    if arguments:
        raise UserError(f"paceline lab clean takes no options, and '{arguments[0]}' is one")
    check_machine()
    removed = clean_up()
    print(f"removed {', '.join(map(str, removed))}" if removed else "nothing was left of a lab")
    return 0
