"""Collectives between CPU ranks of one host, in memory that all of them map: no byte passes through a socket.

A tensor of `zeros` is an anonymous file (memfd) of each rank, which the other ranks open through /proc and map. It has
no name, so nothing is left when ranks are killed, and the size of /dev/shm does not limit it.

A collective has two rounds of records, which travel through a pipe for each pair of ranks:

  begin   this rank's tensor holds its data; when all ranks have said so, each adds or copies its part
  end     this rank has read and written what it must; when all have said so, the tensor is complete, and free

A thread of each rank does this, while the rank computes. When a rank dies, the kernel closes its pipes, and the others
notice that at once. Sums are added in the order of ranks, so they always have the same bits.
"""

import contextlib
import os
import select
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from paceline.world.peer import Peer
from paceline.world.verbs import Group

_RECORD = struct.Struct("<BI")  # which, and a checksum of the collective; a pipe writes so few bytes at once or not
_BEGIN, _END, _CLOSE = range(3)
_CHUNK = 1 << 15  # elements: added and copied while they are cached, by one thread


def open_shared_memory(group: Group, peers: Sequence[Peer], is_wanted: bool) -> "SharedMemory | None":
    """Returns what the ranks share; None if they cannot, or one of them does not want it. Collective."""
    me = peers[group.rank]
    is_one_host = len(peers) > 1 and len({(peer.host, peer.boot_id) for peer in peers}) == 1
    is_possible = is_wanted and is_one_host and _has_memfd()
    pipes = [os.pipe() for _ in peers] if is_possible else []
    writable = group.share_integers([pipe[1] for pipe in pipes] or [-1] * len(peers))
    writers: list[int] = []
    with contextlib.suppress(OSError):  # the system hides other processes
        for peer, row in zip(peers, writable, strict=True):
            writers.append(os.open(f"/proc/{peer.pid}/fd/{row[me.rank]}", os.O_WRONLY))
    can_all = all(row[0] == len(peers) for row in group.share_integers([len(writers)]))
    readers = [pipe[0] for pipe in pipes]
    for fd in [pipe[1] for pipe in pipes] + ([] if can_all else readers + writers):
        os.close(fd)
    return SharedMemory(group, [peer.pid for peer in peers], readers, writers) if can_all else None


def _has_memfd() -> bool:
    """Whether this process may make anonymous files: only Linux has them, and a seccomp profile may refuse them."""
    try:
        os.close(os.memfd_create("paceline"))
    except (AttributeError, OSError):
        return False
    return True


class SharedMemory:
    """This rank's end of it."""

    def __init__(self, group: Group, pids: Sequence[int], readers: Sequence[int], writers: Sequence[int]):
        """readers, writers: pipes from and to each rank, this one included. All are closed in the end."""
        self._group, self._pids, self._readers, self._writers = group, pids, readers, writers
        # By tensor of this rank: its number, and all ranks' tensors.
        self._parts: MutableMapping[torch.Tensor, tuple[int, list[torch.Tensor]]] = WeakIdKeyDictionary()
        self._num_made = 0
        self._waiting: deque[tuple[int, Callable[[], None], Future[None]]] = deque()
        self._acted: deque[Future[None]] = deque()
        self._begun, self._ended = ([deque[int]() for _ in readers] for _ in range(2))  # what each rank has said
        self._lost: Exception | None = None
        self._is_closed = False
        self.cpu_s = 0.0  # of the thread
        threading.Thread(target=self._run, name="shared-memory", daemon=True).start()

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
        found = self._parts.get(tensor)
        if found is None:
            return None
        number, parts = found
        future: Future[None] = Future()
        act = partial(_gather if name == "an all-gather" else _add, parts, borders, self._group.rank)
        if name == "an all-reduce":
            act = partial(act, is_for_all=True)
        key = zlib.crc32(f"{name} {number} {borders}".encode())
        if self._is_closed:
            future.set_exception(dist.DistError("the group is closed"))
        else:
            self._waiting.append((key, act, future))
            self._tell(_BEGIN, key)
        return future

    def close(self) -> None:
        """Ends the thread, which closes the pipes."""
        self._is_closed = True
        os.write(self._writers[self._group.rank], _RECORD.pack(_CLOSE, 0))

    def _tell(self, which: int, key: int) -> None:
        for fd in self._writers:
            with contextlib.suppress(BrokenPipeError):  # the thread notices it, too
                os.write(fd, _RECORD.pack(which, key))

    def _run(self) -> None:
        poll = select.poll()
        for fd in self._readers:
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                records = os.read(fd, 1024 * _RECORD.size)
                if not records:
                    poll.unregister(fd)
                    self._lost = self._lost or dist.DistError(f"Connection closed by rank {self._readers.index(fd)}")
                for which, key in _RECORD.iter_unpack(records):
                    if which == _CLOSE:
                        return self._close_pipes()
                    heard = self._begun if which == _BEGIN else self._ended
                    heard[self._readers.index(fd)].append(key)
            self._advance()
            self.cpu_s = time.thread_time()

    def _advance(self) -> None:
        """Does what all ranks are ready for, or fails everything if one is lost."""
        while self._waiting and all(self._begun) and self._lost is None:
            key, act, future = self._waiting.popleft()
            self._acted.append(future)
            if {keys.popleft() for keys in self._begun} != {key}:
                self._lost = dist.DistError("another rank is in another collective")
                break
            try:
                act()
            except Exception as error:  # this rank's caller gets it; the others see this rank end
                self._lost = error
            else:
                self._tell(_END, key)
        while self._acted and all(self._ended):
            for keys in self._ended:
                keys.popleft()
            self._acted.popleft().set_result(None)
        while self._lost is not None and (self._acted or self._waiting):
            failed = self._acted.popleft() if self._acted else self._waiting.popleft()[2]
            failed.set_exception(self._lost)

    def _close_pipes(self) -> None:
        for fd in (*self._readers, *self._writers):
            os.close(fd)


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


def finish(future: "Future[None]", timeout_s: float) -> None:
    """Waits for a collective. Raises a DistError if a rank is lost."""
    try:
        future.result(timeout_s)
    except TimeoutError:
        raise dist.DistError(f"Timed out after {timeout_s:g} s") from None
