"""The one door to the other ranks: everything that crosses between processes goes through a Group.

`DistributedGroup` speaks through torch.distributed; `LocalGroup` answers the same verbs for a world of one, so that
nobody else asks how many ranks there are. Both count what passed: a Transfer for each collective, with its bytes and
the moments it began and ended. No object collectives: they unpickle what another rank sent.

Each verb must be reached by every rank, in the same order. A verb whose peers are gone raises PeerLost; after that no
further collective is possible, and the way out is to exit, which is also how the others learn of it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from paceline.base.errors import RunError
from paceline.world.device import DeviceClock, Stamp

ReduceOp = Literal["sum", "min", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class PeerLost(RunError):
    """Another rank died, hung past the timeout, or left; this rank can only stop."""

    is_consequence = True


class Transfer:
    """One collective on its way. `wait()` returns when its result may be used."""

    def __init__(self, clock: DeviceClock, num_bytes: float):
        self.num_bytes = num_bytes  # that this rank sends
        self.start: Stamp = clock.stamp()
        self.end: Stamp | None = None

    @property
    def is_over(self) -> bool:
        """Whether both moments may be read."""
        return self.end is not None

    def wait(self) -> None:
        """Returns when the result may be used; raises PeerLost."""


@dataclass
class Traffic:
    """What passed a group for a while: its finished transfers, and when this rank stood still for them."""

    transfers: list[Transfer] = field(default_factory=list)
    waits: list[tuple[Stamp, Stamp]] = field(default_factory=list)


class Group(Protocol):
    """The verbs. Costs in bytes a rank sends, for a ring of n ranks and a tensor of s bytes."""

    rank: int
    size: int
    waiting_for: str | None  # the collective in which this rank stands still; None: in none. Read by the watchdog

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        """Begins replacing the tensor, on every rank, by the reduction over ranks. 2 s (n-1)/n bytes."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """start_all_reduce, waited for."""
        ...

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        """Begins summing a flat tensor over ranks, each rank its part: afterwards elements borders[rank] ..
        borders[rank+1]-1 are the sum, the others undefined. s (n-1)/n bytes."""
        ...

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        """Begins replacing, on every rank, each rank's part of a flat tensor by what that rank has there.
        s (n-1)/n bytes; a rank sends its own part n-1 times."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replaces the tensor, on every rank, by the source's. Counted as s (n-1) bytes, which the source sends."""
        ...

    def start_messages(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Transfer:
        """Begins sending each tensor to the rank it stands under, and filling each from the rank it stands under, all
        at once. Between these ranks alone: the others do not take part. A rank has no messages for itself; raises
        ValueError there. The bytes of `sends`."""
        ...

    def share(self, values: list[float]) -> list[list[float]]:
        """Returns every rank's values, by rank, as float64. All ranks give equally many. s (n-1) bytes."""
        ...

    def share_integers(self, values: list[int]) -> list[list[int]]:
        """Returns every rank's values, by rank, exactly (int64). All ranks give equally many. s (n-1) bytes."""
        ...

    def share_text(self, text: str) -> list[str]:
        """Returns every rank's text, by rank. n-1 times the longest's bytes."""
        ...

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Returns the source's JSON value on every rank; what the others pass is ignored."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        ...

    def take_traffic(self) -> Traffic:
        """Returns what has ended since the last call, and forgets it; what is under way is told when it has ended."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """From here on a collective waits so long for the other ranks before it raises PeerLost."""
        ...


class LocalGroup:
    """The group of a world of one: nothing moves, everything is already reduced."""

    rank = 0
    size = 1
    waiting_for: str | None = None

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        return Transfer(self._clock, 0)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None: ...

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        return Transfer(self._clock, 0)

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        return Transfer(self._clock, 0)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None: ...

    def start_messages(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Transfer:
        if sends or receives:
            raise ValueError("rank 0 is alone: there is nobody to send to")
        return Transfer(self._clock, 0)

    def share(self, values: list[float]) -> list[list[float]]:
        return [[float(value) for value in values]]

    def share_integers(self, values: list[int]) -> list[list[int]]:
        return [list(values)]

    def share_text(self, text: str) -> list[str]:
        return [text]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        return json.loads(json.dumps(value))

    def barrier(self) -> None: ...

    def take_traffic(self) -> Traffic:
        return Traffic()

    def set_timeout(self, seconds: float) -> None: ...


class SideChannel:
    """Sends and receives beside the steps' collectives, from any thread: a process group of its own, always Gloo.

    Making it is collective. Tensors are on the CPU.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when the tensor may be overwritten. Raises RuntimeError where the other rank is gone."""
        dist.send(tensor, to, group=self._group)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fills the tensor with what the source sends. Raises RuntimeError where it is gone."""
        dist.recv(tensor, source, group=self._group)


class DistributedGroup:
    """All ranks of torch.distributed's default process group."""

    def __init__(self, device: torch.device):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.waiting_for: str | None = None
        self.device = device
        self._clock = DeviceClock(device)
        self._traffic = Traffic()
        # Collectives run in a stream of their own so that an event on either side of one times that one alone.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_nccl = dist.get_backend() == "nccl"
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="transfers")  # ends exchanges between pairs of ranks
        self._num_exchanges = 0
        self._patience: timedelta | None = None  # None: what the process group was opened with

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        num_bytes = 2 * _num_bytes(tensor) * (self.size - 1) / self.size
        work = "an all-reduce", num_bytes, lambda: dist.all_reduce(tensor, _OPS[op], async_op=True)
        return self._start(tensor, *work)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        self.start_all_reduce(tensor, op).wait()

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        mine = self._part(flat, borders, self.rank)
        num_bytes = _num_bytes(flat) - _num_bytes(mine)
        if self._is_nccl:
            parts = [self._part(flat, borders, rank) for rank in range(self.size)]
            return self._start(
                flat, "a reduce-scatter", num_bytes, lambda: dist.reduce_scatter(mine, parts, async_op=True)
            )
        # Gloo's reduce-scatter is an all-reduce whose other parts are thrown away: twice the bytes. Each pair of ranks
        # exchanges its parts instead, and the owner adds them up: 12 ms for 40 MB at two ranks, not 44 (docs/LOG.md).
        arrived = torch.empty(self.size - 1, mine.numel(), dtype=flat.dtype, device=flat.device)

        def add_up() -> None:
            for part in arrived:  # by distance of rank: the order never changes, so neither does a bit of the sum
                mine.data.add_(part)  # another thread's change is none of the script's: its version is left alone

        return self._exchange(
            "a reduce-scatter",
            num_bytes,
            sends=lambda to: self._part(flat, borders, to),
            receives=lambda distance: arrived[distance - 1],
            finish=add_up,
        )

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        mine = self._part(flat, borders, self.rank)
        num_bytes = _num_bytes(mine) * (self.size - 1)
        if self._is_nccl:
            parts = [self._part(flat, borders, rank) for rank in range(self.size)]
            return self._start(flat, "an all-gather", num_bytes, lambda: dist.all_gather(parts, mine, async_op=True))
        # Received in place; Gloo's own goes through buffers of its own: 10 ms for 40 MB at two ranks against 29 to 48.
        return self._exchange(
            "an all-gather",
            num_bytes,
            sends=lambda _: mine,
            receives=lambda distance: self._part(flat, borders, (self.rank - distance) % self.size),
        )

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        with self._timed("a broadcast", tensor):
            dist.broadcast(tensor, source)

    def start_messages(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Transfer:
        if self.rank in (*sends, *receives):
            raise ValueError(f"rank {self.rank} has no messages for itself")
        name = "messages between ranks"
        transfer = _MessageTransfer(self, name, sum(map(_num_bytes, sends.values())))
        with self._named(name):
            works: list[dist.Work | None] = []
            if self._is_nccl and (sends or receives):  # one after the other they would wait for each other
                operations = [dist.P2POp(dist.isend, tensor, to) for to, tensor in sends.items()]
                operations += [dist.P2POp(dist.irecv, tensor, source) for source, tensor in receives.items()]
                works += dist.batch_isend_irecv(operations)
            elif not self._is_nccl:
                works += [dist.irecv(tensor, source) for source, tensor in receives.items()]  # first: see _exchange
                works += [dist.isend(tensor, to) for to, tensor in sends.items()]
        transfer.works = [work for work in works if work is not None]
        self._traffic.transfers.append(transfer)
        return transfer

    def share(self, values: list[float]) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows: list[list[float]] = self._all_gather(mine).tolist()
        return rows

    def share_integers(self, values: list[int]) -> list[list[int]]:
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        rows: list[list[int]] = self._all_gather(mine).tolist()
        return rows

    def share_text(self, text: str) -> list[str]:
        data = text.encode()
        longest = max(row[0] for row in self.share_integers([len(data)]))
        padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8).to(self.device)
        # NUL cannot occur: what is shared is JSON or a message, whose encoders escape it.
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in self._all_gather(padded).cpu()]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        data = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        self.broadcast(length, source)
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(buffer, source)
        return json.loads(bytes(buffer.cpu().tolist()))

    def barrier(self) -> None:
        with self._waiting("a barrier"):
            dist.barrier()

    def take_traffic(self) -> Traffic:
        known, self._traffic = self._traffic, Traffic()
        over = [transfer.is_over for transfer in known.transfers]
        self._traffic.transfers = [t for t, is_over in zip(known.transfers, over, strict=True) if not is_over]
        return Traffic([t for t, is_over in zip(known.transfers, over, strict=True) if is_over], known.waits)

    def set_timeout(self, seconds: float) -> None:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
        self._patience = timedelta(seconds=seconds)  # Gloo's sends and receives keep the one they were opened with

    def _patience_given(self) -> tuple[timedelta, ...]:
        """How long to wait for a send or a receive; nothing: as long as the process group was opened with."""
        return () if self._patience is None else (self._patience,)

    def _start(
        self, tensor: torch.Tensor, name: str, num_bytes: float, begin: Callable[[], dist.Work | None]
    ) -> Transfer:
        transfer: Transfer
        with self._named(name):
            if self._stream is not None:
                transfer = _CudaTransfer(self, name, num_bytes, begin, self._stream, tensor)
            else:
                transfer = _HostTransfer(self, name, num_bytes, begin)
        self._traffic.transfers.append(transfer)
        return transfer

    def _exchange(
        self,
        name: str,
        num_bytes: float,
        *,
        sends: Callable[[int], torch.Tensor],
        receives: Callable[[int], torch.Tensor],
        finish: Callable[[], None] = lambda: None,
    ) -> Transfer:
        """Begins one send to and one receive from every other rank. Every pair of ranks takes part, so a rank that
        dies is noticed by all at once, and not by its neighbours in a ring alone.

        Receives first: what Gloo tells a sender, that he may begin, travels in the same connection as data. Behind a
        send it would wait for all of it, and the two directions of a link for each other: 8 MiB each way at 1 Gbit
        took 70 to 137 ms that way, and 70 this way."""
        self._num_exchanges += 1
        tag = self._num_exchanges % (1 << 20)  # ranks that disagree about the order fail instead of mixing data
        works = []
        with self._named(name):
            for distance in range(1, self.size):
                incoming = receives(distance)
                if incoming.numel():
                    works.append(dist.irecv(incoming, (self.rank - distance) % self.size, tag=tag))
            for distance in range(1, self.size):
                to = (self.rank + distance) % self.size
                outgoing = sends(to)
                if outgoing.numel():
                    works.append(dist.isend(outgoing, to, tag=tag))
        transfer = _PeerTransfer(self, name, num_bytes, [work for work in works if work is not None], finish)
        self._traffic.transfers.append(transfer)
        return transfer

    def _part(self, flat: torch.Tensor, borders: Sequence[int], rank: int) -> torch.Tensor:
        return flat[borders[rank] : borders[rank + 1]]

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype, device=self.device)
        with self._timed("an all-gather", tensor):
            dist.all_gather(list(gathered.unbind()), tensor)
        return gathered

    @contextmanager
    def _timed(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        transfer = Transfer(self._clock, _num_bytes(tensor) * (self.size - 1))
        with self._waiting(name):
            yield
        transfer.end = self._clock.stamp()
        self._traffic.transfers.append(transfer)

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """What is inside stands still until other ranks have come."""
        start, self.waiting_for = self._clock.stamp(), name
        with self._named(name):
            yield
        self.waiting_for = None  # not where it raises: the rank is where it failed
        self._traffic.waits.append((start, self._clock.stamp()))

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Turns torch's errors into one message that says who noticed what."""
        try:
            yield
        except RuntimeError as error:  # DistBackendError and DistNetworkError derive from it
            raise PeerLost(
                f"rank {self.rank} lost the other ranks during {what}: {_essence(error)}. "
                "Another rank has died or hangs; its own output or log says more",
                reach="world",
            ) from error


def _essence(error: Exception) -> str:
    """What happened, of a message of torch's: without the source file before it and the advice behind."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0].rstrip(".")


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _HostTransfer(Transfer):
    """A collective in Gloo's threads; a callback there notes when it ended."""

    def __init__(self, group: DistributedGroup, name: str, num_bytes: float, begin: Callable[[], dist.Work | None]):
        super().__init__(group._clock, num_bytes)
        self._group, self._name = group, name
        work = begin()
        assert work is not None
        self._work = work
        self._work.get_future().add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        if self.end is None:
            self.end = self._group._clock.stamp()

    def wait(self) -> None:
        with self._group._waiting(self._name):
            self._work.wait()
        self._note_end(None)


class _PeerTransfer(Transfer):
    """Sends and receives between pairs of ranks; a thread waits for them and does what is left to do with what came,
    behind whatever this rank computes meanwhile."""

    def __init__(
        self,
        group: DistributedGroup,
        name: str,
        num_bytes: float,
        works: list[dist.Work],
        finish: Callable[[], None],
    ):
        super().__init__(group._clock, num_bytes)
        self._group, self._name = group, name
        self._future = group._finisher.submit(self._run, works, finish)

    def _run(self, works: list[dist.Work], finish: Callable[[], None]) -> None:
        for work in works:
            work.wait(*self._group._patience_given())
        finish()
        self.end = self._group._clock.stamp()

    def wait(self) -> None:
        with self._group._waiting(self._name):
            self._future.result()


class _MessageTransfer(Transfer):
    """Messages between ranks, ended by who waits for them. No thread: its two switches would be part of a latency."""

    def __init__(self, group: DistributedGroup, name: str, num_bytes: float):
        super().__init__(group._clock, num_bytes)
        self.works: list[dist.Work] = []
        self._group, self._name = group, name

    def wait(self) -> None:
        if self.end is not None:
            return
        with self._group._waiting(self._name):
            for work in self.works:
                work.wait(*self._group._patience_given())
        self.end = self._group._clock.stamp()


class _CudaTransfer(Transfer):
    """A collective in the group's stream, after all that the current stream was asked for until now."""

    def __init__(
        self,
        group: DistributedGroup,
        name: str,
        num_bytes: float,
        begin: Callable[[], dist.Work | None],
        stream: torch.cuda.Stream,
        tensor: torch.Tensor,
    ):
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            super().__init__(group._clock, num_bytes)
            work = begin()
            assert work is not None
            work.wait()  # makes this stream, not the host, wait for NCCL's own
            self.end = group._clock.stamp()
        self._group, self._name, self.device = group, name, tensor.device

    @property
    def is_over(self) -> bool:
        return bool(self.end.query())  # type: ignore[union-attr]

    def wait(self) -> None:
        with self._group._waiting(self._name):
            torch.cuda.current_stream(self.device).wait_event(self.end)  # type: ignore[arg-type]
