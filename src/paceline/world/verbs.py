"""The verbs by which ranks communicate, what they do in a world of one, and what is counted of them."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from paceline.world.device_clock import DeviceClock
from paceline.world.errors import lost_peers_named
from paceline.world.transfer import Messages, Queued, Traffic, Transfer

ReduceOp = Literal["sum", "max"]


class Group:
    """The verbs, in a world of one: nothing is sent, every tensor is already reduced. `DistributedGroup` (group.py)
    sends. Costs are bytes sent by one rank, for a ring of n ranks and a tensor of s bytes."""

    rank = 0
    size = 1
    timeout_s = 0.0  # how long a collective waits for the other ranks
    shares_memory = False  # whether tensors of `zeros` are reduced in memory that the ranks share
    is_open = True  # whether ranks can still meet: a script may have destroyed the process group that it opened

    def __init__(self, device: torch.device):
        self._clock = DeviceClock(device)
        # The host queues collectives on a GPU, and learns their results only where it reads them.
        self.is_queued = device.type == "cuda"
        self._traffic = Traffic()
        self._queued = Queued()
        self._blocked_in: str | None = None

    def zeros(self, num_elements: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a flat tensor of that dtype and device, for collectives that are called often. Collective."""
        return torch.zeros(num_elements, dtype=like.dtype, device=like.device)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        """Begins to replace the tensor, on every rank, by its reduction over ranks. 2 s (n-1)/n bytes."""
        return Transfer(self._clock)

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        """Begins to sum a flat tensor over ranks. Afterwards a rank has the sum in elements borders[rank] ..
        borders[rank+1]-1; the others are undefined. s (n-1)/n bytes."""
        return Transfer(self._clock)

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        """Begins to fill each rank's part of a flat tensor, on every rank, with that rank's data. s (n-1)/n bytes."""
        return Transfer(self._clock)

    def start_messages(self, sends: Messages, receives: Messages, then: Callable[[], None] | None = None) -> Transfer:
        """Begins to send a tensor to each rank in `sends` and to fill the tensors of `receives`. Only these ranks take
        part. With `then` (Gloo only), a background thread waits for them and calls it. Raises ValueError for a message
        to this rank itself. Costs the bytes of `sends`."""
        if sends or receives:
            raise ValueError("rank 0 is alone: there is nobody to send to")
        if then is not None:
            then()
        return Transfer(self._clock)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Replaces the tensor, on every rank, by the source's. Counted as s (n-1) bytes that the source sends."""

    def barrier(self) -> None:
        """Returns when every rank has called it, and the exchanges begun before are over."""

    def set_timeout(self, seconds: float) -> None:
        """Sets how long later collectives wait for the other ranks before they raise PeerLost."""

    def total(self, number: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks of one float64 number, the same on all. s (n-1) bytes."""
        return number

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns every rank's CPU tensor, stacked by rank; all have the same shape. s (n-1) bytes."""
        return tensor.unsqueeze(0)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Calls start_all_reduce, and waits."""
        self.start_all_reduce(tensor, op).wait()

    def share(self, values: list[float]) -> list[list[float]]:
        """Returns every rank's values, by rank, as float64. All ranks pass equally many. s (n-1) bytes."""
        rows: list[list[float]] = self._rows(torch.tensor(values, dtype=torch.float64)).tolist()
        return rows

    def share_integers(self, values: list[int]) -> list[list[int]]:
        """Returns every rank's values, by rank, exactly (int64). All ranks pass equally many. s (n-1) bytes."""
        rows: list[list[int]] = self._rows(torch.tensor(values, dtype=torch.int64)).tolist()
        return rows

    def share_text(self, text: str) -> list[str]:
        """Returns every rank's text, by rank. Costs n-1 times the bytes of the longest."""
        data = text.encode(errors="surrogatepass")  # a path need not be UTF-8
        longest = max(row[0] for row in self.share_integers([len(data)]))
        padded = torch.frombuffer(bytearray(data.ljust(longest + 1, b"\0")), dtype=torch.uint8)
        # No text contains NUL: all are JSON or messages, whose encoders escape it.
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="surrogatepass") for row in self._rows(padded)]

    def share_json(self, value: Any) -> list[Any]:
        """Returns every rank's JSON value, by rank. Costs as `share_text`."""
        return [json.loads(text) for text in self.share_text(json.dumps(value))]

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Returns the source's JSON value on every rank. The other ranks' values are ignored."""
        data = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(data)], dtype=torch.int64)
        self.broadcast(length, source)
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8)
        if self.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(buffer, source)
        return json.loads(bytes(buffer.tolist()))

    # ---- bytes and times of collectives, and in which one this rank waits ----

    @property
    def waiting_for(self) -> str | None:
        """The collective that this rank waits in. For another thread."""
        return self._blocked_in or self._queued.under_way()

    def take_traffic(self) -> Traffic:
        """Returns the traffic since the last call; a transfer under way is returned once it has ended."""
        known, self._traffic = self._traffic, Traffic()
        over: deque[Transfer] = deque()
        for transfer in known.transfers:
            (over if transfer.is_over else self._traffic.transfers).append(transfer)
        return Traffic(known.num_bytes, over, known.waits)

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
