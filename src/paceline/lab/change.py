"""What happens to a lab that runs: another rate, a cable pulled out, a busier processor, a host without power."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from paceline.base.errors import UserError, nearest
from paceline.lab.hosts import own_cores, read_rate, read_share
from paceline.lab.network import set_link, set_rate
from paceline.lab.processors import set_share
from paceline.lab.state import Living, State, running_lab


@dataclass(frozen=True, kw_only=True)
class Change:
    """What to do to one host; an empty text: leave it as it is."""

    host: str
    rate: str = ""
    link: Literal["", "up", "down"] = ""
    cpu: str = ""
    kill: bool = False


def change_lab(change: Change) -> None:
    """Does it, and returns when it is in force. Raises UserError for what cannot be, before anything is done."""
    rate, share = read_rate(change.rate), read_share(change.cpu, len(own_cores()))
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
        # The cable first: a dying process's sockets would say goodbye, and a host without power says nothing.
        set_link(state.switch, change.host, is_up=False)
        # Its parent takes it along; the other way round, `unshare` complains about it on the terminal.
        os.kill(psutil.Process(living.pid).ppid(), signal.SIGKILL)


def _check_share(name: str, living: Living, share: float | None) -> None:
    if not living.group:
        raise UserError("this lab was started on a machine without the cgroup controller `cpu`; no share can be given")
    cores = sorted(os.sched_getaffinity(living.pid))
    if share is not None and share > len(cores):  # the kernel would take it, and it would change nothing
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
    if not Path(f"/proc/{living.pid}/ns/net").exists():  # of a dead process that nobody has waited for, neither
        raise UserError(f"host {name} is gone; the next lab has it again")
    return living
