"""Transfers under way, messages between pairs of ranks, and threads that finish exchanges."""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.world.device_clock import DeviceClock, Stamp

_MOST_KEPT = 1 << 15

Messages = Mapping[int, torch.Tensor]  # by the other rank's number


class Transfer:
    """A collective under way. The group sets `finish`."""

    def __init__(self, clock: DeviceClock):
        self.start: Stamp = clock.stamp()
        self.end: Stamp | None = None
        self.finish: Callable[[], None] = lambda: None  # returns when the result may be used
        self._clock = clock

    @property
    def is_over(self) -> bool:
        """Whether `start` and `end` may be compared."""
        return self.end is not None and self._clock.has_passed(self.end)

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun on the device, and has not ended there."""
        return self._clock.has_passed(self.start) and not self.is_over

    def wait(self) -> None:
        """Returns when the result may be used; raises PeerLost."""
        self.finish()
        self.record_end()

    def record_end(self) -> None:
        """Sets `end` to now, the first time it is called."""
        if self.end is None:
            self.end = self._clock.stamp()


# ---- a rank on a GPU over Gloo, which sends no GPU's memory: tensors pass through host memory ----


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory."""
    return tensor.detach().to("cpu", copy=True)


def through_host(tensors: Sequence[torch.Tensor], begin: Callable[..., Transfer]) -> Transfer:
    """Begins a transfer of copies in host memory; its end copies them back, once."""
    copies = [on_host(tensor) for tensor in tensors]
    transfer, left = begin(*copies), [*zip(tensors, copies, strict=True)]
    finish = transfer.finish

    def finish_and_copy() -> None:
        finish()
        while left:
            tensor, copy = left.pop()
            tensor.data.copy_(copy)  # .data: keeps the version that autograd checks

    transfer.finish = finish_and_copy
    return transfer


# ---- what is under way, and what was ----


class Queued:
    """The collectives in a GPU's streams, by name. The host only queues them; later it waits in some read of a result,
    where only the GPU's events tell which collective it waits for."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[str, Transfer]] = deque()

    def add(self, name: str, transfer: Transfer) -> None:
        """Adds one whose `end` is set; drops those that are over."""
        while self._transfers and self._transfers[0][1].is_over:
            self._transfers.popleft()
        self._transfers.append((name, transfer))

    def under_way(self) -> str | None:
        """Returns the name of the first one that the GPU has begun and not ended. For another thread."""
        with contextlib.suppress(RuntimeError):  # the GPU failed: the main thread gets the same error
            return next((name for name, transfer in tuple(self._transfers) if transfer.is_under_way), None)
        return None


@dataclass
class Traffic:
    """What a rank sends in transfers that began in an interval, the transfers that finished in it, when this rank was
    blocked in them, and the CPU time of the threads that carry them."""

    num_bytes: float = 0.0
    # The latest: a script without a Replica takes none. A step has far fewer.
    transfers: deque[Transfer] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    waits: deque[tuple[Stamp, Stamp]] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    cpu_s: float = field(default=0.0, compare=False)


Message = tuple[int, torch.Tensor]  # the other rank, and the tensor that goes there or comes from there


@dataclass
class Phase:
    """One step of an exchange: what this rank sends and receives, and what it does when both are done."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)

    def add_up(self, ranks: Sequence[int], rank: int, part: torch.Tensor) -> None:
        """Receives a tensor like `part` from each other rank, then replaces `part` by the sum in the order of ranks."""
        arriving = {other: torch.empty_like(part) for other in ranks if other != rank}
        self.receives += arriving.items()
        part = part.data  # keeps the version that autograd checks
        terms = [arriving.get(other, part) for other in ranks]

        def add() -> None:
            total = terms[0]
            for term in terms[1:]:
                total = torch.add(total, term, out=part if term is part else total)

        self.then.append(add)


class Background:
    """Runs calls one by one in a daemon thread: at exit Python would join an executor's, and so wait for peers."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def submit(self, call: Callable[[], None]) -> "Future[None]":
        """Returns the call's future."""
        future: Future[None] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Ends the thread, after the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (submitted := self._calls.get()) is not None:
            call, future = submitted
            try:
                call()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            self.cpu_s = time.thread_time()
            del submitted, call, future  # free the transfer's tensors


class Exchanges:
    """Sends and receives in phases, one after the other. Each phase has a thread, which goes through all exchanges in
    their order: the phases of several exchanges overlap, and none waits for a later exchange."""

    def __init__(self, post: Callable[..., list[dist.Work]]) -> None:
        """post: begins receives and sends (group.py)."""
        self._post = post
        # Timeout for Work.wait of sends and receives; empty: the one they were opened with, which Gloo keeps.
        self.patience: tuple[timedelta, ...] = ()
        self._number = 0
        self._threads: list[Background] = []  # by phase

    def begin(self, phases: Sequence[Phase]) -> "Future[None]":
        """Begins an exchange, and returns the future of its last phase."""
        self._number += 1
        tag = self._number % (1 << 20)  # ranks with a different order fail instead of mixing data
        receives = [self._post([], phase.receives, is_nccl=False, tag=tag) for phase in phases]
        sends = self._post(phases[0].sends, [], is_nccl=False, tag=tag)

        def run(number: int, before: Future[None] | None) -> None:
            if before is not None:
                before.result()  # raises what that phase raised
                sends.extend(self._post(phases[number].sends, [], is_nccl=False, tag=tag))
            self.finish(receives[number])
            self.finish(sends)
            for call in phases[number].then:
                call()

        done = None
        for number in range(len(phases)):
            if number == len(self._threads):
                self._threads.append(Background())
            done = self._threads[number].submit(partial(run, number, done))
        assert done is not None
        return done

    def close(self) -> None:
        """Ends the threads; a later exchange begins others."""
        for thread in self._threads:
            thread.close()
        self._threads.clear()

    def cpu_s(self) -> float:
        """Returns the CPU time of the threads, with the sums that they compute."""
        return sum([thread.cpu_s for thread in self._threads])

    def finish(self, works: list[dist.Work]) -> None:
        """Waits for sends and receives; a second call does nothing."""
        for work in works:
            work.wait(*self.patience)
        works.clear()


class GlooThreads:
    """The threads that Gloo has begun in this process (Linux; elsewhere none), found by their names; the one that
    receives has a name from torch 2.13 on. They wait for the end of a time slice while all cores compute. Else each TCP
    segment that arrives interrupts a compute thread: at 100 Mbit/s that took four times as much CPU time."""

    def __init__(self) -> None:
        names = Path("/proc/self/task").glob("*/comm")
        self._tasks = [name.parent for name in names if "gloo" in _read(name)]
        for task in self._tasks:
            with contextlib.suppress(OSError):  # the system forbids it
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))

    def cpu_s(self) -> float:
        """Returns their CPU time since they began."""
        return sum([int((_read(task / "schedstat") or "0").split()[0]) for task in self._tasks]) / 1e9


def _read(path: Path) -> str:
    """Returns what a file of /proc says; an empty text if its thread has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
