"""Transfers under way, messages between pairs of ranks, and a thread that finishes exchanges."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from paceline.world.device import DeviceClock, Stamp


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
    """What a rank sends in transfers that began in an interval, the transfers that finished in it, and when this rank
    was blocked in them."""

    num_bytes: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)
    waits: list[tuple[Stamp, Stamp]] = field(default_factory=list)


class Background:
    """Runs calls one by one in a daemon thread: at exit Python would join an executor's, and so wait for peers."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def submit(self, call: Callable[[], None]) -> "Future[None]":
        """Returns the call's future."""
        future: Future[None] = Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                call()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            del call, future  # free the transfer's tensors


def post(
    sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], *, is_nccl: bool, tag: int = 0
) -> list[dist.Work]:
    """Begins receives, then sends; each tensor is under the other rank's number. Empty tensors are left out. Receives
    come first: Gloo's permission to send uses the same connection, and would wait behind a send's data."""
    sends = {to: tensor for to, tensor in sends.items() if tensor.numel()}
    receives = {source: tensor for source, tensor in receives.items() if tensor.numel()}
    if is_nccl:  # one by one they would wait for each other
        operations = [dist.P2POp(dist.isend, tensor, to) for to, tensor in sends.items()]
        operations += [dist.P2POp(dist.irecv, tensor, source) for source, tensor in receives.items()]
        return list(dist.batch_isend_irecv(operations)) if operations else []
    works = [dist.irecv(tensor, source, tag=tag) for source, tensor in receives.items()]
    works += [dist.isend(tensor, to, tag=tag) for to, tensor in sends.items()]
    return [work for work in works if work is not None]
