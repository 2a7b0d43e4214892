"""paceline lab"""

import contextlib
import io
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.base.errors import UserError, nearest
from paceline.cli.flags import parse

if TYPE_CHECKING:
    from paceline.lab.hosts import Layout

_USAGE = """paceline lab [--hosts N] [options] -- VERB ...   several hosts on this machine, VERB run as all their ranks
paceline lab [options] -- exec PROGRAM ...       the same with any program, one process a host
paceline lab set --host b --rate 100mbit         a lab that runs: another rate, a cut link, a share, a dead host
paceline lab clean                               remove what a killed lab left; the next one does it, too

  paceline lab --hosts 2 --rate 1gbit -- train --preset demo
  paceline lab --hosts 2 --cpu 1.0,0.35 -- train --preset demo

Linux, as root. `paceline lab --help` and `paceline lab set --help` show the options.
"""


@dataclass(frozen=True, kw_only=True)
class LabArguments:
    """Make hosts on this machine, run on all of them what comes after `--`, as torchrun would, and remove them.

    That is a verb of paceline with its options, or `exec` and any program, once a host. `paceline lab set` changes a
    lab that runs, `paceline lab clean` removes what a killed one left."""

    hosts: int = 2
    """Hosts, called a, b, c ...; each with its own network, name, and processes. Files are shared."""
    nproc: int = 1
    """Ranks a host."""
    rate: str = "unlimited"
    """Of each host's link, in each direction: 1gbit, 2.5gbit, 100mbit, 500kbit, unlimited; one for all, or one a host:
    1gbit,100mbit. It counts Ethernet frames, of which TCP's payload is 95.6%."""
    cpu: str = "unlimited"
    """Share of the processors: 1.0 is the time of one core, 0.35 a third of it, or unlimited; one for all, or one a
    host: 1.0,0.35."""


@dataclass(frozen=True, kw_only=True)
class SetArguments:
    """Change the lab that runs. Takes force at once, and ends with the lab."""

    host: str = ""
    """Which one: a, b, c ..."""
    rate: str = ""
    """Its link's rate from now on, as for `paceline lab`."""
    link: Literal["", "up", "down"] = ""
    """down: pull its cable out; up: put it back."""
    cpu: str = ""
    """Its share of the processors from now on, as for `paceline lab`."""
    kill: bool = False
    """Cut its power: the link goes down, and no process of it says goodbye."""


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
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:place], arguments[place + 1 :]
    verb = next((word for word in own if word in (*_verbs(), "exec")), "")  # no option of a lab has such a value
    if verb:
        raise UserError(f"what the hosts are to run comes after `--`: paceline lab ... -- {verb} ...")
    parsed = parse(LabArguments, LabArguments(), own, "lab")
    if not command:
        raise UserError(f"nothing to run on the hosts; it comes after `--`\n\n{_USAGE}")
    line = _command(command)
    if command[0] != "exec" and not {"-h", "--help"}.isdisjoint(command):
        from paceline.cli.main import main as paceline

        return paceline(command)  # here: every rank would say it, and it takes no lab
    if "RANK" in os.environ:
        raise UserError("a lab inside a world that a launcher made already; start it from a plain shell")
    from paceline.lab.hosts import lay_out
    from paceline.lab.system import check_machine

    check_machine()
    num_ranks = 1 if command[0] == "exec" else parsed.nproc
    if num_ranks != parsed.nproc:
        raise UserError(f"--nproc is {parsed.nproc}, and exec runs one process a host; leave it out")
    layout = lay_out(parsed.hosts, num_ranks, parsed.rate, parsed.cpu)
    from paceline.lab.running import run_lab
    from paceline.launch.signals import Asked

    with Asked() as asked:
        return run_lab(layout, line, asked, lambda: _announce(layout))


def _verbs() -> list[str]:
    from paceline.cli.main import _VERBS

    return [verb for verb in _VERBS if verb != "lab"]


def _command(words: list[str]) -> list[str]:
    """What a rank runs. Raises UserError where that cannot be."""
    if words[0] != "exec":
        if words[0] not in _verbs():
            raise UserError(
                f"the hosts of a lab run a verb of paceline, or `exec` and a program; '{words[0]}' is none"
                f"{nearest(words[0], [*_verbs(), 'exec'])}"
            )
        return [sys.executable, "-m", "paceline", *words]
    if not words[1:]:
        raise UserError("exec without a program; as in: paceline lab -- exec hostname")
    if shutil.which(words[1]) is None:
        raise UserError(f"there is no program '{words[1]}' to run on the hosts")
    return words[1:]


def _announce(layout: "Layout") -> None:
    """Says what was made; on standard error, since standard output is rank 0's. One that was closed ends no lab."""
    from rich.console import Console

    from paceline.lab.hosts import rate_text
    from paceline.record.console import table

    rows = [
        [
            host.name,
            host.address,
            rate_text(host.rate),
            f"{'all' if host.share is None else f'{host.share:.0%}'} of {_cores_text(host.cores)}",
            f"{host.ranks[0]}-{host.ranks[-1]}" if len(host.ranks) > 1 else f"{host.ranks[0]}",
        ]
        for host in layout.hosts
    ]
    said, is_terminal = io.StringIO(), os.isatty(2)  # written by us: where its reader is gone, rich ends the process
    console = Console(file=said, force_terminal=is_terminal, highlight=False, width=None if is_terminal else 120)
    console.print(table("The lab", ["host", "address", "rate", "processors", "ranks"], rows))
    if layout.is_crowded:
        cores = f"{layout.num_cores} core{'s' if layout.num_cores > 1 else ''}"
        console.print(
            f"{len(layout.hosts)} hosts share {cores}: none is as fast as it would be alone\n", style="yellow"
        )
    with contextlib.suppress(OSError):
        os.write(2, said.getvalue().encode())


def _cores_text(cores: tuple[int, ...]) -> str:
    return f"core {cores[0]}" if len(cores) == 1 else f"cores {', '.join(map(str, cores))}"


def _set(arguments: list[str]) -> int:
    parsed = parse(SetArguments, SetArguments(), arguments, "lab set")
    if not parsed.host:
        raise UserError("which host? as in: paceline lab set --host b --rate 100mbit")
    if not (parsed.rate or parsed.link or parsed.cpu or parsed.kill):
        raise UserError(f"nothing to change on host {parsed.host}; give --rate, --link, --cpu or --kill")
    from paceline.lab.change import Change, change_lab
    from paceline.lab.system import check_machine

    check_machine()
    change_lab(Change(host=parsed.host, rate=parsed.rate, link=parsed.link, cpu=parsed.cpu, kill=parsed.kill))
    return 0


def _clean(arguments: list[str]) -> int:
    if arguments:
        raise UserError(f"paceline lab clean takes no options, and '{arguments[0]}' is one")
    from paceline.lab.state import clean_up
    from paceline.lab.system import check_machine

    check_machine()
    removed = clean_up()
    print(f"removed {', '.join(map(str, removed))}" if removed else "nothing was left of a lab")
    return 0
