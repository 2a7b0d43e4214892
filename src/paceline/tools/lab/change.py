"""Changes a running lab: another rate, a cut cable, a slower processor, a host without power."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from paceline.base.cores import physical_cores
from paceline.base.errors import UserError, nearest
from paceline.tools.lab.hosts import read_rate, read_share
from paceline.tools.lab.network import set_link, set_rate
from paceline.tools.lab.processors import set_share
from paceline.tools.lab.state import Living, State, running_lab


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change the running lab, at once. The change ends with the lab."""

    host: str = ""
    """The host's name: a, b, c ..."""
    rate: str = ""
    """New rate of its link, as for `paceline lab`."""
    link: Literal["", "up", "down"] = ""
    """down: pull its cable out; up: put it back."""
    cpu: str = ""
    """New share of the processors, as for `paceline lab`."""
    kill: bool = False
    """Cut its power: the link goes down, and its processes are killed."""


def change_lab(change: Change) -> None:
    """Makes the change and returns when it is in force. Raises UserError, before any change, if it is impossible."""
    rate, share = read_rate(change.rate), read_share(change.cpu, len(physical_cores()))
    state = running_lab()
    living = _host(state, change.host)
    if change.cpu:
        _check_share(change.host, living, share)
    if change.rate:
        set_rate(state.switch, change.host, living.pid, rate)
    if change.cpu:
        set_share(Path(living.group), share)
    if change.link:
        set_link(state.switch, change.host, is_up=change.link == "up")
    if change.kill:
        # The cable first, since a host without power sends nothing, but a dying process's sockets would.
        set_link(state.switch, change.host, is_up=False)
        # Its parent ends it; the other way round, `unshare` would print an error.
        os.kill(psutil.Process(living.pid).ppid(), signal.SIGKILL)


def _check_share(name: str, living: Living, share: float | None) -> None:
    if not living.group:
        raise UserError("this lab was started on a machine without the cgroup controller `cpu`; no share can be given")
    cores = sorted(os.sched_getaffinity(living.pid))
    if share is not None and share > len(cores):  # the kernel would accept it without effect
        raise UserError(
            f"host {name} cannot have {share:g} of the processors: it was made with {len(cores)} (core"
            f"{'s'[: len(cores) != 1]} {', '.join(map(str, cores))}); give it at most {len(cores)}, or make the lab "
            "anew with a larger --cpu"
        )


def _host(state: State, name: str) -> Living:
    if name not in state.hosts:
        raise UserError(
            f"the lab (pid {state.pid}) has no host '{name}'{nearest(name, state.hosts)}; "
            f"it has: {', '.join(state.hosts)}"
        )
    living = state.hosts[name]
    if not Path(f"/proc/{living.pid}/ns/net").exists():  # also missing if the process is dead but not waited for
        raise UserError(f"host {name} is gone; the next lab has it again")
    return living
