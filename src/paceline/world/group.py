"""The only caller of torch.distributed's collectives, with side.py: all communication between ranks goes through it.

`LocalGroup` has the same verbs for a world of one, so no other code asks how many ranks there are. `DistributedGroup`
counts bytes and times of each collective. Object collectives are not used: they unpickle what another rank sent.

Every rank must call each verb, in the same order. If a peer is gone, a verb raises PeerLost. Then no collective is
possible any more: the rank exits, and the others notice that.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.ownership import borders
from paceline.world.device_clock import DeviceClock
from paceline.world.errors import PeerLost as PeerLost
from paceline.world.errors import from_rank_0 as from_rank_0
from paceline.world.errors import lost_peers_named
from paceline.world.hierarchy import Hosts
from paceline.world.peer import Peer
from paceline.world.shared import SharedMemory, finish, open_shared_memory
from paceline.world.transfer import Exchanges, GlooThreads, Messages, Phase, Queued, nothing, post
from paceline.world.transfer import Traffic as Traffic
from paceline.world.transfer import Transfer as Transfer
from paceline.world.verbs import Group as Group
from paceline.world.verbs import ReduceOp as ReduceOp

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_LEAST_BYTES_BY_LEVELS = 1 << 16  # of an all-reduce; a smaller one takes the time of its latency
SPEAKS_FIRST_S = 5.0  # collectives time out this much later than the watchdog, which knows who is missing


class LocalGroup(Group):
    """The group of a world of one: nothing is sent, every tensor is already reduced."""

    rank = 0
    size = 1
    timeout_s = 0.0

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)
        self.is_queued = device.type == "cuda"

    def total(self, number: torch.Tensor) -> torch.Tensor:
        return number

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        return Transfer(self._clock)

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        return Transfer(self._clock)

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        return Transfer(self._clock)

    def start_messages(self, sends: Messages, receives: Messages) -> Transfer:
        if sends or receives:
            raise ValueError("rank 0 is alone: there is nobody to send to")
        return Transfer(self._clock)

    def start_exchange(self, sends: Messages, receives: Messages, then: Callable[[], None] = nothing) -> Transfer:
        then()
        return self.start_messages(sends, receives)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None: ...

    def barrier(self) -> None: ...

    def take_traffic(self) -> Traffic:
        return Traffic()

    def set_timeout(self, seconds: float) -> None: ...

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)


class DistributedGroup(Group):
    """All ranks of torch.distributed's default process group."""

    def __init__(self, device: torch.device, timeout_s: float = 300.0, hosts: Sequence[str] = ()):
        """timeout_s: the timeout that the process group was opened with. hosts: the name of each rank's host."""
        self.timeout_s = timeout_s
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self._clock = DeviceClock(device)
        self._traffic = Traffic()
        # Collectives of a GPU's tensors have their own stream: events before and after one then time only that one.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # "undefined" is a backend for each device.
        self.is_queued = device.type == "cuda" and dist.get_backend() != "gloo"
        # CPU tensors beside NCCL: numbers and texts neither queue behind gradients nor block on the GPU.
        self._control = dist.new_group(backend="gloo") if self.is_queued else None  # None: the default group
        if self._control is not None:
            self._control.set_timeout(timedelta(seconds=timeout_s))  # torch gives it half an hour
        self.beside: list[dist.ProcessGroup] = []  # of some ranks, which torch's `fully_shard` uses
        self._blocked_in: str | None = None
        self._queued = Queued()
        self.hosts = Hosts.of(hosts or [""] * self.size)
        self._exchanges = Exchanges()
        self._under_way: set[futures.Future[None]] = set()  # what threads of this process carry
        self._gloo, self._cpu_s = GlooThreads(), 0.0
        self._gloo.yield_to_compute()
        self._memory: SharedMemory | None = None

    def share_memory(self, peers: Sequence[Peer], is_wanted: bool) -> None:
        """Makes `zeros` and collectives of its tensors use memory that the ranks share, if they can. Collective."""
        self._memory = open_shared_memory(self, peers, is_wanted)

    @property
    def shares_memory(self) -> bool:
        return self._memory is not None

    def zeros(self, num_elements: int, like: torch.Tensor) -> torch.Tensor:
        if self._memory is None or not num_elements:
            return super().zeros(num_elements, like)
        return self._memory.zeros(num_elements, like.dtype)

    def close(self) -> None:
        """Ends the group's threads; the process group is torch's."""
        self._exchanges.close()
        if self._memory is not None:
            self._memory.close()

    @property
    def waiting_for(self) -> str | None:
        return self._blocked_in or self._queued.under_way()

    @property
    def is_open(self) -> bool:
        return dist.is_initialized()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        name, num_bytes = "an all-reduce", 2 * tensor.nbytes * (self.size - 1) / self.size
        if op == "sum" and (own := self._in_memory(name, num_bytes, tensor, borders(tensor.numel(), [1] * self.size))):
            return own
        has_levels = self.hosts.has_levels and tensor.nbytes >= _LEAST_BYTES_BY_LEVELS and tensor.is_contiguous()
        if op == "sum" and has_levels and not self.is_queued:
            parts = self._parts(tensor.view(-1), borders(tensor.numel(), self.hosts.even_shares()))
            reduce, gather = self.hosts.reduce_scatter(self.rank, parts), self.hosts.all_gather(self.rank, parts)
            return self._exchange(name, [*reduce, *gather])
        return self._start(name, num_bytes, tensor, partial(dist.all_reduce, op=_OPS[op], async_op=True))

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        name, parts = "a reduce-scatter", self._parts(flat, borders)
        mine = parts[self.rank]
        if own := self._in_memory(name, flat.nbytes - mine.nbytes, flat, borders):
            return own
        if self.is_queued:
            # Else NCCL makes one operation for each rank.
            even = partial(dist.reduce_scatter_tensor, mine, flat, async_op=True)
            begin = even if len(set(map(len, parts))) == 1 else partial(dist.reduce_scatter, mine, parts, async_op=True)
            return self._start(name, flat.nbytes - mine.nbytes, flat, lambda _: begin())
        # Gloo's reduce-scatter is an all-reduce: twice the bytes.
        return self._exchange(name, self.hosts.reduce_scatter(self.rank, parts))

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        name, parts = "an all-gather", self._parts(flat, borders)
        mine = parts[self.rank]
        if own := self._in_memory(name, mine.nbytes * (self.size - 1), flat, borders):
            return own
        if self.is_queued:
            even = partial(dist.all_gather_into_tensor, flat, mine, async_op=True)
            begin = even if len(set(map(len, parts))) == 1 else partial(dist.all_gather, parts, mine, async_op=True)
            return self._start(name, mine.nbytes * (self.size - 1), flat, lambda _: begin())
        # Received in place: Gloo's all-gather copies through its own buffers and takes three times as long.
        return self._exchange(name, self.hosts.all_gather(self.rank, parts))

    def start_messages(self, sends: Messages, receives: Messages) -> Transfer:
        if self.rank in (*sends, *receives):
            raise ValueError(f"rank {self.rank} has no messages for itself")
        name = "messages between ranks"
        transfer, num_bytes = Transfer(self._clock), sum(tensor.nbytes for tensor in sends.values())
        with lost_peers_named(self.rank, name):
            works = post(sends.items(), receives.items(), is_nccl=self.is_queued)
        # Finished in the caller's thread: switching threads would add latency.
        return self._counted(transfer, num_bytes, name, lambda: self._exchanges.finish(works))

    def start_exchange(self, sends: Messages, receives: Messages, then: Callable[[], None] = nothing) -> Transfer:
        return self._exchange("an exchange", [Phase([*sends.items()], [*receives.items()], [then])])

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        with self._timed("a broadcast", tensor):
            dist.broadcast(tensor, source, group=self._control if tensor.device.type == "cpu" else None)

    def barrier(self) -> None:
        with self._waiting("a barrier"):
            self.finish()
            dist.barrier(group=self._control)

    def finish(self) -> None:
        """Waits for the exchanges that this rank has begun: torch's barrier knows nothing of them."""
        futures.wait(self._under_way, self.timeout_s)

    def total(self, number: torch.Tensor) -> torch.Tensor:
        if not self.is_queued:
            return super().total(number)
        self.all_reduce(number)  # all ranks get one sum, and no host waits for it
        return number

    def take_traffic(self) -> Traffic:
        known, self._traffic = self._traffic, Traffic()
        over: deque[Transfer] = deque()
        for transfer in known.transfers:
            (over if transfer.is_over else self._traffic.transfers).append(transfer)
        in_memory_s = self._memory.cpu_s if self._memory else 0.0
        before, self._cpu_s = self._cpu_s, self._gloo.cpu_s() + self._exchanges.cpu_s() + in_memory_s
        return Traffic(known.num_bytes, over, known.waits, self._cpu_s - before)

    def set_timeout(self, seconds: float) -> None:
        assert dist.group.WORLD is not None
        if self._control is not None:
            self._control.set_timeout(timedelta(seconds=seconds))
        # NCCL counts from when a collective is queued, and then ends the process: the watchdog has to be first.
        for each in (dist.group.WORLD, *self.beside):
            each.set_timeout(timedelta(seconds=2 * seconds if self.is_queued else seconds))
        self.timeout_s = seconds
        # With a timeout NCCL would make the host wait for the GPU.
        self._exchanges.patience = () if self.is_queued else (timedelta(seconds=seconds),)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype)
        with self._timed("an all-gather", tensor):
            dist.all_gather(list(gathered.unbind()), tensor, group=self._control)
        return gathered

    def _parts(self, flat: torch.Tensor, borders: Sequence[int]) -> list[torch.Tensor]:
        return [flat[borders[rank] : borders[rank + 1]] for rank in range(self.size)]

    def _start(
        self, name: str, num_bytes: float, tensor: torch.Tensor, begin: Callable[[torch.Tensor], dist.Work | None]
    ) -> Transfer:
        """Begins a collective of torch's. Gloo runs it in its own threads; on a GPU it runs in our stream."""
        if self._stream is None:
            transfer = Transfer(self._clock)
            with lost_peers_named(self.rank, name):
                work = begin(tensor)
            assert work is not None
            work.get_future().add_done_callback(lambda _: transfer.record_end())
            return self._counted(transfer, num_bytes, name, work.wait)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream), lost_peers_named(self.rank, name):
            transfer = Transfer(self._clock)
            work = begin(tensor)
            assert work is not None
            work.wait()  # makes this stream, not the host, wait for NCCL's stream
            transfer.record_end()
        self._queued.add(name, transfer)
        end: Any = transfer.end
        return self._counted(transfer, num_bytes, name, lambda: torch.cuda.current_stream(self.device).wait_event(end))

    def _exchange(self, name: str, phases: Sequence[Phase]) -> Transfer:
        transfer = Transfer(self._clock)
        with lost_peers_named(self.rank, name):
            done = self._exchanges.begin(phases)
        self._follow(done, transfer)
        num_bytes = sum(tensor.nbytes for phase in phases for _, tensor in phase.sends)
        return self._counted(transfer, num_bytes, name, done.result)

    def _in_memory(self, name: str, num_bytes: float, flat: torch.Tensor, borders: Sequence[int]) -> Transfer | None:
        """Begins a collective in shared memory; returns None if the tensor is not there, on any rank."""
        transfer = Transfer(self._clock)
        done = self._memory and self._memory.start(name, flat, borders)
        if not done:
            return None
        self._follow(done, transfer)
        return self._counted(transfer, num_bytes, name, lambda: finish(done, self.timeout_s))

    def _follow(self, done: "futures.Future[None]", transfer: Transfer) -> None:
        """Records the end of a transfer that a thread carries."""
        self._under_way.add(done)
        done.add_done_callback(self._under_way.discard)
        done.add_done_callback(lambda _: transfer.record_end())

    def _counted(self, transfer: Transfer, num_bytes: float, name: str, wait: Callable[[], object]) -> Transfer:
        def finish() -> None:
            with self._waiting(name):
                wait()

        transfer.finish = finish
        self._traffic.num_bytes += num_bytes
        self._traffic.transfers.append(transfer)
        return transfer

    @contextmanager
    def watched(self, name: str) -> Iterator[Transfer]:
        """Shows the watchdog the collective that is queued inside, in the GPU's current stream."""
        transfer = Transfer(self._clock)
        yield transfer
        transfer.record_end()
        if self.is_queued:
            self._queued.add(name, transfer)

    @contextmanager
    def _timed(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        with self._waiting(name), self.watched(name) as transfer:
            yield
        self._traffic.num_bytes += tensor.nbytes * (self.size - 1)
        self._traffic.transfers.append(transfer)

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Marks this rank as blocked in the collective `name`."""
        start, self._blocked_in = self._clock.stamp(), name
        with lost_peers_named(self.rank, name):
            yield
        self._blocked_in = None  # kept if it raises: shows where the rank failed
        self._traffic.waits.append((start, self._clock.stamp()))
