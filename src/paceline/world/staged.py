"""Transfers of a rank on a GPU over Gloo, which sends no GPU's memory: each tensor passes through host memory, and the
copies wait for the GPU."""

from collections.abc import Callable, Sequence

import torch

from paceline.world.transfer import Transfer


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
