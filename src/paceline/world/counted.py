"""Counts the bytes and times of collectives, and shows the watchdog in which one a rank waits."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from paceline.world.errors import lost_peers_named
from paceline.world.transfer import Queued, Traffic, Transfer
from paceline.world.verbs import Group


class CountedGroup(Group):
    """A group that counts what it sends."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._traffic = Traffic()
        self._queued = Queued()
        self._blocked_in: str | None = None

    @property
    def waiting_for(self) -> str | None:  # type: ignore[override]
        return self._blocked_in or self._queued.under_way()

    def take_traffic(self) -> Traffic:
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
