"""Collectives of a rank on a GPU over Gloo, as in a world of GPUs and CPUs."""

from collections.abc import Callable, Sequence

import torch

from paceline.world.device_clock import DeviceClock
from paceline.world.group import DistributedGroup, ReduceOp, Transfer
from paceline.world.transfer import Messages, nothing


class StagedGroup(DistributedGroup):
    """Gloo between ranks of which this one computes on a GPU. Gloo sends no GPU's memory, so each tensor passes through
    host memory, and the copies wait for the GPU."""

    def __init__(self, device: torch.device, timeout_s: float = 300.0, hosts: Sequence[str] = ()):
        super().__init__(torch.device("cpu"), timeout_s, hosts)
        self._clock = DeviceClock(device)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Transfer:
        host = _on_host(tensor)
        return _copied_back(super().start_all_reduce(host, op), [(tensor, host)])

    def start_reduce_scatter(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        host = _on_host(flat)
        return _copied_back(super().start_reduce_scatter(host, borders), [(flat, host)])

    def start_all_gather(self, flat: torch.Tensor, borders: Sequence[int]) -> Transfer:
        host = _on_host(flat)
        return _copied_back(super().start_all_gather(host, borders), [(flat, host)])

    def start_messages(self, sends: Messages, receives: Messages) -> Transfer:
        arriving = {source: _on_host(tensor) for source, tensor in receives.items()}
        transfer = super().start_messages({to: _on_host(tensor) for to, tensor in sends.items()}, arriving)
        return _copied_back(transfer, [(receives[source], host) for source, host in arriving.items()])

    def start_exchange(self, sends: Messages, receives: Messages, then: Callable[[], None] = nothing) -> Transfer:
        arriving = {source: _on_host(tensor) for source, tensor in receives.items()}

        def copy_back() -> None:
            for source, host in arriving.items():
                receives[source].copy_(host)
            then()

        return super().start_exchange({to: _on_host(tensor) for to, tensor in sends.items()}, arriving, copy_back)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        host = _on_host(tensor)
        super().broadcast(host, source)
        tensor.data.copy_(host)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied_back(transfer: Transfer, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
    """Makes the end of a transfer copy each host tensor to its place, once."""
    finish, left = transfer.finish, list(pairs)

    def finish_and_copy() -> None:
        finish()
        while left:
            tensor, host = left.pop()
            tensor.data.copy_(host)  # .data: keeps the version that autograd checks

    transfer.finish = finish_and_copy
    return transfer
