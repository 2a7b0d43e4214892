"""Collectives between CPU ranks of one host, in memory that all of them map: only small messages pass through sockets.

A tensor of `zeros` is an anonymous file (memfd) of each rank, which the other ranks open through /proc and map. It has
no name, so nothing is left when ranks are killed, and the size of /dev/shm does not limit it.

A thread of each rank carries out collectives in their order, while the rank computes. Ranks meet before one, when their
tensors hold their data, and after it, when each has read and written what it must. Sums are added in the order of
ranks, so they always have the same bits.
"""

import contextlib
import os
import zlib
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from paceline.world.peer import Peer
from paceline.world.transfer import Background
from paceline.world.verbs import Group

_CHUNK = 1 << 15  # elements: added and copied while they are cached, by one thread


def can_share_memory(group: Group, peers: Sequence[Peer], is_wanted: bool) -> bool:
    """Whether the ranks can share memory, and all of them want it. Collective. Only Linux has anonymous files; a
    seccomp profile may refuse them, and a system may hide other processes."""
    is_one_host = len(peers) > 1 and len({peer.machine for peer in peers}) == 1
    fd = -1
    with contextlib.suppress(AttributeError, OSError):
        fd = os.memfd_create("paceline") if is_wanted and is_one_host else -1
    paths = [f"/proc/{peer.pid}/fd/{row[0]}" for peer, row in zip(peers, group.share_integers([fd]), strict=True)]
    can_open = all(os.access(path, os.R_OK | os.W_OK) for path in paths)
    can_all = all(row[0] for row in group.share_integers([int(can_open)]))
    if fd >= 0:
        os.close(fd)
    return can_all


class SharedMemory:
    """This rank's end of it."""

    def __init__(self, group: Group, pids: Sequence[int], meet: Callable[[int], None]):
        """meet: returns when all ranks have called it, from any thread. Raises if their numbers differ, or one of them
        is lost."""
        self._group, self._pids, self._meet = group, pids, meet
        # By tensor of this rank: its number, and all ranks' tensors.
        self._parts: MutableMapping[torch.Tensor, tuple[int, list[torch.Tensor]]] = WeakIdKeyDictionary()
        self._num_made = 0
        self._thread = Background()

    @property
    def cpu_s(self) -> float:
        """The CPU time of the thread."""
        return self._thread.cpu_s

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a flat tensor that collectives can use. Collective: all ranks ask for the same."""
        fd = os.memfd_create("paceline")
        os.ftruncate(fd, num_elements * dtype.itemsize)
        parts = [
            torch.from_file(f"/proc/{pid}/fd/{row[0]}", shared=True, size=num_elements, dtype=dtype)
            for pid, row in zip(self._pids, self._group.share_integers([fd]), strict=True)
        ]
        self._group.barrier()  # all have opened it
        os.close(fd)
        mine = parts[self._group.rank]
        self._parts[mine] = self._num_made, [part.detach() for part in parts]  # live as long as the tensor
        self._num_made += 1
        return mine

    def start(self, name: str, tensor: torch.Tensor, borders: Sequence[int]) -> "Future[None] | None":
        """Begins a collective of Group's, by its name there; returns None if the tensor is not one of `zeros`."""
        if (known := self._parts.get(tensor)) is None:
            return None
        number, parts = known
        act = partial(_gather if name == "an all-gather" else _add, parts, borders, self._group.rank)
        if name == "an all-reduce":
            act = partial(act, is_for_all=True)
        return self._thread.submit(partial(self._carry_out, zlib.crc32(f"{name} {number} {borders}".encode()), act))

    def _carry_out(self, key: int, act: Callable[[], None]) -> None:
        self._meet(key)
        act()  # if it fails, the others see this rank end
        self._meet(key)

    def close(self) -> None:
        """Ends the thread, after the collectives that have begun. Later ones do not use the memory."""
        self._parts.clear()
        self._thread.close()


def _add(parts: Sequence[torch.Tensor], borders: Sequence[int], rank: int, is_for_all: bool = False) -> None:
    """Adds all ranks' elements borders[rank] .. borders[rank+1]-1, which no other rank reads or writes meanwhile."""
    for start in range(borders[rank], borders[rank + 1], _CHUNK):
        chunk = slice(start, min(start + _CHUNK, borders[rank + 1]))
        first, *more, last = [part[chunk] for part in parts]
        mine = parts[rank][chunk]
        for term in more:
            first.add_(term)
        torch.add(first, last, out=mine)
        for part in parts if is_for_all else ():
            if part is not parts[rank]:
                part[chunk].copy_(mine)


def _gather(parts: Sequence[torch.Tensor], borders: Sequence[int], rank: int) -> None:
    """Copies every other rank's elements from its tensor."""
    for other, part in enumerate(parts):
        if other != rank:
            theirs = slice(borders[other], borders[other + 1])
            parts[rank][theirs].copy_(part[theirs])
