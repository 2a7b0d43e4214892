"""The one door to the other ranks: everything that crosses between processes goes through a Group.

`DistributedGroup` speaks through torch.distributed; `LocalGroup` answers the same verbs for a world of one, so that
nobody else asks how many ranks there are. Both count what passed: a Transfer for each collective, with its bytes and
the moments it began and ended. No object collectives: they unpickle what another rank sent.

Each verb must be reached by every rank, in the same order. A verb whose peers are gone raises PeerLost; after that no
further collective is possible, and the way out is to exit, which is also how the others learn of it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
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

    def __init__(self, clock: DeviceClock, num_bytes: int):
        self.num_bytes = num_bytes
        self.start: Stamp = clock.stamp()
        self.end: Stamp | None = None

    def wait(self) -> None:
        """Returns when the result may be used; raises PeerLost."""


class Group(Protocol):
    """The verbs. Costs in bytes a rank sends, for a ring of n ranks and a tensor of s bytes."""

    rank: int
    size: int

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        """Begins replacing the tensor, on every rank, by the reduction over ranks. 2 s (n-1)/n bytes."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """start_all_reduce, waited for."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replaces the tensor, on every rank, by the source's. s bytes."""
        ...

    def share(self, values: list[float]) -> list[list[float]]:
        """Returns every rank's values, by rank, as float64. All ranks give equally many. s (n-1) bytes."""
        ...

    def share_integers(self, values: list[int]) -> list[list[int]]:
        """Returns every rank's values, by rank, exactly (int64). All ranks give equally many."""
        ...

    def share_text(self, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        ...

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Returns the source's JSON value on every rank; what the others pass is ignored."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        ...

    def take_transfers(self) -> list[Transfer]:
        """Returns the collectives since the last call, and forgets them."""
        ...


class LocalGroup:
    """The group of a world of one: nothing moves, everything is already reduced."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        return Transfer(self._clock, 0)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None: ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None: ...

    def share(self, values: list[float]) -> list[list[float]]:
        return [[float(value) for value in values]]

    def share_integers(self, values: list[int]) -> list[list[int]]:
        return [list(values)]

    def share_text(self, text: str) -> list[str]:
        return [text]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        return json.loads(json.dumps(value))

    def barrier(self) -> None: ...

    def take_transfers(self) -> list[Transfer]:
        return []


class DistributedGroup:
    """All ranks of torch.distributed's default process group."""

    def __init__(self, device: torch.device):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device
        self._clock = DeviceClock(device)
        self._transfers: list[Transfer] = []
        # Collectives run in a stream of their own so that an event on either side of one times that one alone.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        num_bytes = tensor.numel() * tensor.element_size()
        transfer: Transfer
        with self._named("an all-reduce"):
            if self._stream is not None:
                transfer = _CudaTransfer(self, self._stream, tensor, op, num_bytes)
            else:
                transfer = _HostTransfer(self, self._clock, tensor, op, num_bytes)
        self._transfers.append(transfer)
        return transfer

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        self.start_all_reduce(tensor, op).wait()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        with self._timed("a broadcast", tensor):
            dist.broadcast(tensor, source)

    def share(self, values: list[float]) -> list[list[float]]:
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        rows: list[list[float]] = self._all_gather(mine).tolist()
        return rows

    def share_integers(self, values: list[int]) -> list[list[int]]:
        mine = torch.tensor(values, dtype=torch.int64, device=self._device)
        rows: list[list[int]] = self._all_gather(mine).tolist()
        return rows

    def share_text(self, text: str) -> list[str]:
        data = text.encode()
        longest = max(row[0] for row in self.share_integers([len(data)]))
        padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8).to(self._device)
        # NUL cannot occur: what is shared is JSON or a message, whose encoders escape it.
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in self._all_gather(padded).cpu()]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        data = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        self.broadcast(length, source)
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(buffer, source)
        return json.loads(bytes(buffer.cpu().tolist()))

    def barrier(self) -> None:
        with self._named("a barrier"):
            dist.barrier()

    def take_transfers(self) -> list[Transfer]:
        taken, self._transfers = self._transfers, []
        return taken

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype, device=self._device)
        with self._timed("an all-gather", tensor):
            dist.all_gather(list(gathered.unbind()), tensor)
        return gathered

    @contextmanager
    def _timed(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        transfer = Transfer(self._clock, tensor.numel() * tensor.element_size())
        with self._named(name):
            yield
        transfer.end = self._clock.stamp()
        self._transfers.append(transfer)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Turns torch's errors into one message that says who noticed what."""
        try:
            yield
        except RuntimeError as error:  # DistBackendError and DistNetworkError derive from it
            raise PeerLost(
                f"rank {self.rank} lost the other ranks during {what}: {_essence(error)}. "
                "Another rank has died or hangs; its own log says more (ranks/ in the run folder)",
                reach="world",
            ) from error


def _essence(error: Exception) -> str:
    """What happened, of a message of torch's: without the source file before it and the advice behind."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0].rstrip(".")


class _HostTransfer(Transfer):
    """An all-reduce in Gloo's threads; a callback there notes when it ended."""

    def __init__(self, group: DistributedGroup, clock: DeviceClock, tensor: torch.Tensor, op: ReduceOp, num_bytes: int):
        super().__init__(clock, num_bytes)
        self._group, self._clock = group, clock
        self._work = dist.all_reduce(tensor, _OPS[op], async_op=True)
        self._work.get_future().add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        if self.end is None:
            self.end = self._clock.stamp()

    def wait(self) -> None:
        with self._group._named("an all-reduce"):
            self._work.wait()
        self._note_end(None)


class _CudaTransfer(Transfer):
    """An all-reduce in the group's stream, after all that the current stream was asked for until now."""

    def __init__(
        self, group: DistributedGroup, stream: torch.cuda.Stream, tensor: torch.Tensor, op: ReduceOp, num_bytes: int
    ):
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            super().__init__(group._clock, num_bytes)
            work = dist.all_reduce(tensor, _OPS[op], async_op=True)
            work.wait()  # makes this stream, not the host, wait for NCCL's own
            self.end = group._clock.stamp()
        self._stream, self._device = stream, tensor.device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.end)  # type: ignore[arg-type]
