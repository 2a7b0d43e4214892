"""The only caller of torch.distributed's collectives: all communication between ranks goes through it.

A world of one has the same verbs (verbs.py), so no other code asks how many ranks there are. `DistributedGroup` counts
bytes and times of each collective. It has three ways: torch's collective, an exchange of parts (hierarchy.py), which
sends fewer bytes over Gloo, and memory that the ranks share (shared.py). Object collectives are not used: they unpickle
what another rank sent.

Every rank must call each verb, in the same order. If a peer is gone, a verb raises PeerLost. Then no collective is
possible any more: the rank exits, and the others notice that.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.ownership import borders
from paceline.world.errors import PeerLost, from_rank_0, lost_peers_named
from paceline.world.hierarchy import Hosts
from paceline.world.peer import Peer
from paceline.world.shared import SharedMemory, open_shared_memory
from paceline.world.transfer import (
    Exchanges,
    GlooThreads,
    Message,
    Messages,
    Phase,
    Traffic,
    Transfer,
    on_host,
    through_host,
)
from paceline.world.verbs import Group, ReduceOp

__all__ = ["DistributedGroup", "Group", "PeerLost", "ReduceOp", "SideChannel", "Traffic", "Transfer", "from_rank_0"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_LEAST_BYTES_BY_LEVELS = 1 << 16  # of an all-reduce; a smaller one takes the time of its latency
SPEAKS_FIRST_S = 5.0  # collectives time out this much later than the watchdog, which knows who is missing
LocalGroup = Group  # of a world of one


class DistributedGroup(Group):
    """All ranks of torch.distributed's default process group."""

    def __init__(self, device: torch.device, timeout_s: float, hosts: Sequence[str], *, is_staged: bool = False):
        """timeout_s: the timeout that the process group was opened with. hosts: the name of each rank's host.
        is_staged: Gloo sends no GPU's memory, so each tensor passes through host memory, and copies wait for the GPU.
        """
        self.timeout_s = timeout_s
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        super().__init__(device)
        self._is_staged = is_staged
        self.device = device = torch.device("cpu") if is_staged else device
        # Collectives of a GPU's tensors have their own stream: events before and after one then time only that one.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.is_queued = device.type == "cuda" and dist.get_backend() != "gloo"  # "undefined": one for each device
        # CPU tensors beside NCCL: numbers and texts neither queue behind gradients nor block on the GPU.
        self._control = dist.new_group(backend="gloo") if self.is_queued else None  # None: the default group
        if self._control is not None:
            self._control.set_timeout(timedelta(seconds=timeout_s))  # torch gives it half an hour
        self.beside: list[dist.ProcessGroup] = []  # of some ranks, which torch's `fully_shard` uses
        self.hosts = Hosts.of(hosts)
        self._exchanges = Exchanges(_post)
        self._under_way: set[futures.Future[None]] = set()  # what threads of this process carry
        self._gloo, self._cpu_s = GlooThreads(), 0.0
        self._memory: SharedMemory | None = None

    def share_memory(self, peers: Sequence[Peer], is_wanted: bool) -> None:
        """Makes `zeros` and collectives of its tensors use memory that the ranks share, if they can. Collective."""
        self._memory = open_shared_memory(self, peers, is_wanted)

    @property
    def shares_memory(self) -> bool:  # type: ignore[override]
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
    def is_open(self) -> bool:  # type: ignore[override]
        return dist.is_initialized()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        return self._through_host([tensor], partial(self._all_reduce, op=op))

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        return self._through_host([flat], partial(self._reduce_scatter, borders=borders))

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        return self._through_host([flat], partial(self._all_gather, borders=borders))

    def start_messages(self, sends: Messages, receives: Messages, then: Callable[[], None] | None = None) -> Transfer:
        if self.rank in (*sends, *receives):
            raise ValueError(f"rank {self.rank} has no messages for itself")
        sent, arriving = self._sendable(sends), self._sendable(receives)

        def end() -> None:
            for source, tensor in arriving.items() if self._is_staged else ():
                receives[source].data.copy_(tensor)
            if then is not None:
                then()

        if then is not None:
            return self._exchange("an exchange", [Phase([*sent.items()], [*arriving.items()], [end])])
        name = "messages between ranks"
        transfer, num_bytes = Transfer(self._clock), sum(tensor.nbytes for tensor in sends.values())
        with lost_peers_named(self.rank, name):
            works = _post(sent.items(), arriving.items(), is_nccl=self.is_queued)

        def finish() -> None:
            if works:  # not for a second wait
                self._exchanges.finish(works)
                end()

        # Finished in the caller's thread: switching threads would add latency.
        return self._counted(transfer, num_bytes, name, finish)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Transfer:
        name, num_bytes = "an all-reduce", 2 * tensor.nbytes * (self.size - 1) / self.size
        equal_parts = borders(tensor.numel(), [1] * self.size)
        if op == "sum" and (transfer := self._in_memory(name, num_bytes, tensor, equal_parts)):
            return transfer
        has_levels = self.hosts.has_levels and tensor.nbytes >= _LEAST_BYTES_BY_LEVELS and tensor.is_contiguous()
        if op == "sum" and has_levels and not self.is_queued:
            parts = self._parts(tensor.view(-1), borders(tensor.numel(), self.hosts.even_shares()))
            reduce, gather = self.hosts.reduce_scatter(self.rank, parts), self.hosts.all_gather(self.rank, parts)
            return self._exchange(name, [*reduce, *gather])
        return self._start(name, num_bytes, tensor, partial(dist.all_reduce, op=_OPS[op], async_op=True))

    def _reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        name, parts = "a reduce-scatter", self._parts(flat, borders)
        part = parts[self.rank]
        if transfer := self._in_memory(name, flat.nbytes - part.nbytes, flat, borders):
            return transfer
        if self.is_queued:
            # Else NCCL makes one operation for each rank.
            even = partial(dist.reduce_scatter_tensor, part, flat, async_op=True)
            begin = even if len(set(map(len, parts))) == 1 else partial(dist.reduce_scatter, part, parts, async_op=True)
            return self._start(name, flat.nbytes - part.nbytes, flat, lambda _: begin())
        # Gloo's reduce-scatter is an all-reduce: twice the bytes.
        return self._exchange(name, self.hosts.reduce_scatter(self.rank, parts))

    def _all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        name, parts = "an all-gather", self._parts(flat, borders)
        part = parts[self.rank]
        if transfer := self._in_memory(name, part.nbytes * (self.size - 1), flat, borders):
            return transfer
        if self.is_queued:
            even = partial(dist.all_gather_into_tensor, flat, part, async_op=True)
            begin = even if len(set(map(len, parts))) == 1 else partial(dist.all_gather, parts, part, async_op=True)
            return self._start(name, part.nbytes * (self.size - 1), flat, lambda _: begin())
        # Received in place: Gloo's all-gather copies through its own buffers and takes three times as long.
        return self._exchange(name, self.hosts.all_gather(self.rank, parts))

    def _sendable(self, messages: Messages) -> Messages:
        """Returns tensors that the backend can send and fill: these or, of a GPU over Gloo, copies in host memory."""
        return {rank: on_host(tensor) for rank, tensor in messages.items()} if self._is_staged else messages

    def _through_host(self, tensors: Sequence[torch.Tensor], begin: Callable[..., Transfer]) -> Transfer:
        return through_host(tensors, begin) if self._is_staged else begin(*tensors)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        sent = on_host(tensor) if self._is_staged else tensor
        with self._timed("a broadcast", sent):
            dist.broadcast(sent, source, group=self._control if sent.device.type == "cpu" else None)
        if sent is not tensor:
            tensor.data.copy_(sent)

    def barrier(self) -> None:
        with self._waiting("a barrier"):
            self.finish()
            dist.barrier(group=self._control)

    def leave(self) -> None:
        """Returns when every rank has called it, before the process group is destroyed: a rank that leaves early breaks
        the others' last transfer."""
        self.finish()
        with contextlib.suppress(RuntimeError):
            dist.barrier()

    def finish(self) -> None:
        """Waits for the exchanges that this rank has begun: torch's barrier knows nothing of them."""
        futures.wait(self._under_way, self.timeout_s)

    def total(self, number: torch.Tensor) -> torch.Tensor:
        if not self.is_queued:
            return number.new_tensor(sum(row[0] for row in self.share([float(number)])))
        self.all_reduce(number)  # all ranks get one sum, and no host waits for it
        return number

    def take_traffic(self) -> Traffic:
        in_memory_s = self._memory.cpu_s if self._memory else 0.0
        before, self._cpu_s = self._cpu_s, self._gloo.cpu_s() + self._exchanges.cpu_s() + in_memory_s
        traffic = super().take_traffic()
        traffic.cpu_s = self._cpu_s - before
        return traffic

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
            works = [work]  # emptied: torch's work keeps its tensors, and what has been counted keeps the transfer

            def finish() -> None:
                if works:  # not for a second wait
                    works[0].wait()
                    works.clear()

            return self._counted(transfer, num_bytes, name, finish)
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

        def finish() -> None:
            try:
                done.result(self.timeout_s)
            except TimeoutError:
                raise dist.DistError(f"Timed out after {self.timeout_s:g} s") from None

        return self._counted(transfer, num_bytes, name, finish)

    def _follow(self, done: "futures.Future[None]", transfer: Transfer) -> None:
        """Records the end of a transfer that a thread carries."""
        self._under_way.add(done)
        done.add_done_callback(self._under_way.discard)
        done.add_done_callback(lambda _: transfer.record_end())


def _post(sends: Iterable[Message], receives: Iterable[Message], *, is_nccl: bool, tag: int = 0) -> list[dist.Work]:
    """Begins receives, then sends. Empty tensors are left out. Receives come first: Gloo's permission to send uses the
    same connection, and would wait behind a send's data."""
    calls = [
        (dist.irecv if is_receive else dist.isend, tensor, other)
        for is_receive, messages in ((True, receives), (False, sends))
        for other, tensor in messages
        if tensor.numel()
    ]
    if is_nccl:  # one by one they would wait for each other
        return list(dist.batch_isend_irecv([dist.P2POp(*call) for call in calls])) if calls else []
    works = [begin(tensor, other, tag=tag) for begin, tensor, other in calls]
    return [work for work in works if work is not None]


class SideChannel:
    """Sends and receives CPU tensors from any thread, in its own Gloo process group, neither counted nor timed.
    Creating it is collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Returns when the tensor may be overwritten. Raises RuntimeError if the other rank is gone."""
        dist.send(tensor, to, group=self._group)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fills the tensor with what the source sends. Raises RuntimeError if the source is gone."""
        dist.recv(tensor, source, group=self._group)


def all_gather_for_torch(
    group: DistributedGroup, output: torch.Tensor, part: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """The collective with which torch's `fully_shard` gathers a block's weights."""
    if borders := _borders_of_own(group, process_group, output):
        flat = output.view(-1)
        flat[borders[group.rank] : borders[group.rank + 1]].copy_(part)
        group.start_all_gather(flat, borders).wait()
        return None
    with group.watched("an all-gather of weights"):
        work: dist.Work | None = dist.all_gather_into_tensor(output, part, process_group, async_op)
    return work


def reduce_scatter_for_torch(
    group: DistributedGroup,
    output: torch.Tensor,
    flat: torch.Tensor,
    process_group: dist.ProcessGroup,
    op: dist.ReduceOp,
) -> None:
    """The collective with which it sums a block's gradients."""
    if borders := _borders_of_own(group, process_group, flat):
        flat = flat.view(-1)
        group.start_reduce_scatter(flat, borders).wait()
        output.copy_(flat[borders[group.rank] : borders[group.rank + 1]].view_as(output))
        return
    with group.watched("a reduce-scatter of gradients"):
        dist.reduce_scatter_tensor(output, flat, op, process_group)


def _borders_of_own(group: DistributedGroup, process_group: dist.ProcessGroup, flat: torch.Tensor) -> list[int]:
    """Returns where each rank's elements begin, and the end, for a collective of the group's own; empty for torch's.
    Over Gloo torch's reduce-scatter sends twice the bytes, and its all-gather takes 1.5 times as long on a slow link
    unless ranks begin at once (docs/LOG.md)."""
    if group.is_queued or process_group.size() != group.size:
        return []
    return [flat.numel() // group.size * rank for rank in range(group.size + 1)]


def all_reduce_for_torch(group: DistributedGroup, tensor: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """The collective that sums a block's sharded gradients over hosts, in the stream that torch chose."""
    with group.watched("an all-reduce of gradients between hosts"):
        dist.all_reduce(tensor, group=process_group)
