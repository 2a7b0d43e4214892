"""The ranks of this host among all ranks of an attempt; and the simplest case, that this is the only host."""

import socket
from dataclasses import dataclass
from typing import Literal

from paceline.base.net import listen
from paceline.base.status import Status
from paceline.launch.restarts import Failure

LOOPBACK = "127.0.0.1"

# What an attempt's ranks are to do: "save" and end; "fail": end soon, ranks of another host have failed; "end" at once.
Order = Literal["", "save", "fail", "end"]


@dataclass(frozen=True)
class Place:
    """This host's ranks in one attempt: first_rank, first_rank + 1 ... of the world's."""

    first_rank: int
    num_ranks: int
    world_size: int
    address: str  # of the ranks' store
    port: int
    listener: socket.socket | None  # for the store, on the host that has rank 0
    attempt: int  # from 0; the same on all hosts


@dataclass(frozen=True)
class Verdict:
    """The run has ended."""

    status: int
    message: str = ""  # the error; empty: none, or the ranks have printed it
    stop: str = ""  # the signal that ended it before an attempt


@dataclass(frozen=True)
class Collected:
    """How the ranks of all hosts ended."""

    found: dict[int, Status]
    ends: dict[int, int]
    lost: tuple[str, ...] = ()  # hosts that left meanwhile
    stop: str = ""  # the signal by which a launcher was asked to stop; empty: none
    takes_in: bool = False  # the ranks were asked to save, so that a host can come in


class OneHost:
    """All ranks are on this host; their store is on loopback."""

    def __init__(self, num_ranks: int, port: int):
        self._num_ranks, self._port = num_ranks, port

    def meet(self, failures: list[Failure]) -> Place | Verdict:
        listener = listen(LOOPBACK, self._port)
        number = self._num_ranks
        return Place(0, number, number, LOOPBACK, listener.getsockname()[1], listener, len(failures))

    def order(self) -> Order:
        return ""

    def collect(self, found: dict[int, Status], ends: dict[int, int]) -> Collected | None:
        return Collected(found, ends)

    def host_of(self, rank: int) -> str:
        return socket.gethostname()

    def conclude(self, status: int, message: str = "") -> None: ...

    def close(self) -> None: ...
