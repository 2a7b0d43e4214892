"""Proof that replicas are equal: a digest of every parameter, compared between ranks."""

import hashlib
from collections import Counter

import torch
from torch import nn

from paceline.base.errors import RunError
from paceline.world.group import Group


def digests(model: nn.Module) -> dict[str, int]:
    """Returns parameter name -> 63-bit digest of its bytes. Any single flipped bit changes it."""
    return {name: _digest(parameter) for name, parameter in model.named_parameters()}


def overall(model: nn.Module) -> str:
    """Returns one hex digest over all parameters and their names: equal if and only if the replicas are."""
    return hashlib.sha256(repr(sorted(digests(model).items())).encode()).hexdigest()[:16]


def _digest(tensor: torch.Tensor) -> int:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


def require_equal(model: nn.Module, group: Group, step: int) -> None:
    """Returns if all replicas are bit-identical; else raises RunError on every rank, naming ranks and a parameter.

    Collective. Costs 8 bytes a parameter tensor a rank, and reading the weights once (about 2 GB/s).
    """
    mine = digests(model)
    rows = group.share_integers(list(mine.values()))
    for name, column in zip(mine, zip(*rows, strict=True), strict=True):
        counts = Counter(column)
        if len(counts) > 1:
            majority, votes = counts.most_common(1)[0]
            odd = [rank for rank, value in enumerate(column) if value != majority]
            who = f"rank {', '.join(map(str, odd))} differs" if 2 * votes > len(column) else "there is no majority"
            raise RunError(
                f"replicas are not equal at step {step}: {name} has {len(counts)} different values over "
                f"{len(column)} ranks ({who}). Nothing was saved since; resume from the newest checkpoint",
                reach="world",
            )


def broadcast_parameters(model: nn.Module, group: Group) -> None:
    """Gives every rank rank 0's parameters and buffers.

    The same seed is not enough: on processors with other vector units torch's normal_ differs in the last bits.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        group.broadcast(tensor.data)
