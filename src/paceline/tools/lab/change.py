"""Changes a running lab: another rate, a cut cable."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.base.errors import UserError, nearest
from paceline.tools.lab.hosts import read_rate
from paceline.tools.lab.network import set_link, set_rate
from paceline.tools.lab.state import State, running_lab


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change the running lab, at once. The change ends with the lab."""

    host: str = ""
    """The host's name: a, b, c ..."""
    rate: str = ""
    """New rate of its link, as for `paceline lab`."""
    link: Literal["", "up", "down"] = ""
    """down: pull its cable out; up: put it back."""


def change_lab(change: Change) -> None:
    """Makes the change and returns when it is in force. Raises UserError, before any change, if it is impossible."""
    rate, state = read_rate(change.rate), running_lab()
    pid = _first_process(state, change.host)
    if change.rate:
        set_rate(state.switch, change.host, pid, rate)
    if change.link:
        set_link(state.switch, change.host, is_up=change.link == "up")


def _first_process(state: State, name: str) -> int:
    if name not in state.hosts:
        raise UserError(
            f"the lab (pid {state.pid}) has no host '{name}'{nearest(name, state.hosts)}; "
            f"it has: {', '.join(state.hosts)}"
        )
    pid = state.hosts[name]
    if not Path(f"/proc/{pid}/ns/net").exists():  # also missing if the process is dead but not waited for
        raise UserError(f"host {name} is gone; the next lab has it again")
    return pid
