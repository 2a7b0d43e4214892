"""Collectives between CPU ranks of one host, in memory that all of them map: no byte passes through a socket.

A tensor of `zeros` is an anonymous file (memfd) of each rank, which the other ranks open through /proc and map. It has
no name, so nothing is left when ranks are killed, and the size of /dev/shm does not limit it.

A thread of each rank carries out collectives in their order, while the rank computes. Ranks meet before one, when their
tensors hold their data, and after it, when each has read and written what it must: a record in a pipe for each pair of
ranks, since Gloo's threads need three times as long where all cores compute. When a rank dies, the kernel closes its
pipes, and the others notice that at once. Sums are added in the order of ranks, so they always have the same bits.
"""

import contextlib
import os
import select
import struct
import zlib
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from paceline.world.peer import Peer
from paceline.world.transfer import Background
from paceline.world.verbs import Group

_RECORD = struct.Struct("<I")  # a pipe writes so few bytes at once, or none
_CHUNK = 1 << 15  # elements: added and copied while they are cached, by one thread


def open_shared_memory(group: Group, peers: Sequence[Peer], is_wanted: bool) -> "SharedMemory | None":
    """Returns what the ranks share; None if they cannot, or one of them does not want it. Collective."""
    is_one_host = len(peers) > 1 and len({peer.machine for peer in peers}) == 1
    pipes = [os.pipe() for _ in peers] if is_wanted and is_one_host and _has_memfd() else []
    ends = group.share_integers([end for _, end in pipes] or [-1] * len(peers))
    writers: list[int] = []
    with contextlib.suppress(OSError):  # the system hides other processes
        for peer, row in zip(peers, ends, strict=True):
            writers.append(os.open(f"/proc/{peer.pid}/fd/{row[group.rank]}", os.O_WRONLY))
    can_all = all(row[0] == len(peers) for row in group.share_integers([len(writers)]))
    readers = [reader for reader, _ in pipes]
    for fd in [end for _, end in pipes] + ([] if can_all else readers + writers):
        os.close(fd)
    return SharedMemory(group, [peer.pid for peer in peers], Pipes(readers, writers)) if can_all else None


def _has_memfd() -> bool:
    """Whether this process may make anonymous files: only Linux has them, and a seccomp profile may refuse them."""
    try:
        os.close(os.memfd_create("paceline"))
    except (AttributeError, OSError):
        return False
    return True


class Pipes:
    """A pipe from each rank to each, itself included."""

    def __init__(self, readers: Sequence[int], writers: Sequence[int]):
        """readers, writers: from and to each rank."""
        self._readers, self._writers = readers, writers

    def meet(self, number: int) -> None:
        """Returns when all ranks have called it. Raises a DistError if their numbers differ, or a rank is gone."""
        for fd in self._writers:
            with contextlib.suppress(BrokenPipeError):  # the reader finds it, too
                os.write(fd, _RECORD.pack(number))
        waiting = select.poll()
        for fd in self._readers:
            waiting.register(fd, select.POLLIN)
        num_missing = len(self._readers)
        while num_missing:
            for fd, _ in waiting.poll():
                if not (record := os.read(fd, _RECORD.size)):
                    raise dist.DistError(f"Connection closed by rank {self._readers.index(fd)}")
                if _RECORD.unpack(record) != (number,):
                    raise dist.DistError("another rank is in another collective")
                waiting.unregister(fd)
                num_missing -= 1

    def close(self) -> None:
        """Closes all of them."""
        for fd in (*self._readers, *self._writers):
            os.close(fd)


class SharedMemory:
    """This rank's end of it."""

    def __init__(self, group: Group, pids: Sequence[int], pipes: Pipes):
        self._group, self._pids, self._pipes = group, pids, pipes
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
        part_here = parts[self._group.rank]
        self._parts[part_here] = self._num_made, [part.detach() for part in parts]  # live as long as the tensor
        self._num_made += 1
        return part_here

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
        self._pipes.meet(key)
        act()  # if it fails, the others see this rank end
        self._pipes.meet(key)

    def close(self) -> None:
        """Ends the thread, after the collectives that have begun. Later ones do not use the memory."""
        self._parts.clear()
        self._thread.submit(self._pipes.close)
        self._thread.close()


def _add(parts: Sequence[torch.Tensor], borders: Sequence[int], rank: int, is_for_all: bool = False) -> None:
    """Adds all ranks' elements borders[rank] .. borders[rank+1]-1, which no other rank reads or writes meanwhile."""
    for start in range(borders[rank], borders[rank + 1], _CHUNK):
        chunk = slice(start, min(start + _CHUNK, borders[rank + 1]))
        first, *more, last = [part[chunk] for part in parts]
        sum_here = parts[rank][chunk]
        for term in more:
            first.add_(term)
        torch.add(first, last, out=sum_here)
        for part in parts if is_for_all else ():
            if part is not parts[rank]:
                part[chunk].copy_(sum_here)


def _gather(parts: Sequence[torch.Tensor], borders: Sequence[int], rank: int) -> None:
    """Copies every other rank's elements from its tensor."""
    for other, part in enumerate(parts):
        if other != rank:
            theirs = slice(borders[other], borders[other + 1])
            parts[rank][theirs].copy_(part[theirs])
