"""The place of this host's ranks in the world, and the two simple cases: one host, or hosts whose launchers do not know
each other."""

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
    knows_all: bool = True  # this launcher hears how all ranks end, and one of the launchers holds their store

    @property
    def own_ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def judged(self) -> range:
        """The ranks whose ends this launcher hears of."""
        return range(self.world_size) if self.knows_all else self.own_ranks


@dataclass(frozen=True)
class Verdict:
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


class OneOfMany(OneHost):
    """A scheduler starts this command on each host, as in the pods of a job, and starts it again. Rank 0 holds the
    store of all ranks. Launchers know nothing of each other: when one host's ranks end, so do the others'."""

    def __init__(self, num_ranks: int, host: int, num_hosts: int, address: str, port: int):
        super().__init__(num_ranks, port)
        self._first_rank, self._world_size, self._address = host * num_ranks, num_hosts * num_ranks, address

    def meet(self, failures: list[Failure]) -> Place | Verdict:
        place = (self._first_rank, self._num_ranks, self._world_size, self._address, self._port)
        return Place(*place, listener=None, attempt=len(failures), knows_all=False)
