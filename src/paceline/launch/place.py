"""The place of a host's ranks in the world of one attempt, and how that attempt ended."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.base.process import Status

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
    knows_all: bool = True  # somebody hears how all ranks end, and one of the launchers holds their store

    @property
    def own_ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True)
class Outcome:
    """How the ranks of one attempt ended, on all hosts that a launcher knows."""

    ranks: range  # those that it hears of
    reports: Mapping[int, Status]
    exits: Mapping[int, int]
    lost: tuple[str, ...] = ()  # hosts that left meanwhile
    makes_room: bool = False  # the ranks were asked to save, so that a host can come in
