"""Which parameters are in one bucket, and which rank owns which of its elements. No communication: all ranks compute
the same.

With `ddp` every rank owns all elements. With `zero` matrices that cannot be split are assigned by the cost of their
update, and everything else is split so that each rank has an equal part of the optimizer state (base/ownership.py).
NCCL is several times faster if all ranks' parts of a bucket have one length. There buckets are padded: matrices of one
shape are dealt out one by one, and everything else is split into equal parts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from paceline.base import ownership
from paceline.optim import adamw, muon

Named = tuple[str, nn.Parameter]

_LARGEST_BLOCK, _LEAST_BLOCK = 256, 64


class Layout(NamedTuple):
    """A bucket's parameters, where each begins, then the buffer's length, and the borders of the ranks' elements."""

    members: Sequence[Named]
    offsets: Sequence[int]
    borders: Sequence[int] = ()  # none: every rank owns all elements


def backward_order(model: nn.Module) -> list[Named]:
    """Returns the trainable parameters with their names, roughly in the order in which backward finishes them."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad][::-1]


def cut(members: Sequence[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Yields groups of consecutive parameters of one dtype, at most bucket_bytes each, or one larger parameter."""
    chunk: list[Named] = []
    chunk_bytes = 0
    for name, parameter in members:
        num_bytes = parameter.numel() * parameter.element_size()
        if chunk and (chunk_bytes + num_bytes > bucket_bytes or parameter.dtype != chunk[0][1].dtype):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append((name, parameter))
        chunk_bytes += num_bytes
    if chunk:
        yield chunk


def owned_by_all(members: Sequence[Named]) -> Layout:
    """Returns the layout of a bucket of which every rank owns all elements: one parameter follows the other."""
    return Layout(members, list(accumulate((parameter.numel() for _, parameter in members), initial=0)))


def divided(
    members: Sequence[Named],
    kind_of: Callable[[str], object],
    costs: Mapping[str, float],
    num_ranks: int,
    bucket_bytes: int,
    is_padded: bool,
    is_coded: bool,
) -> list[Layout]:
    """Returns the buckets of these parameters, divided over the ranks, in the order in which they fill.

    kind_of: parameters in one bucket have one kind. costs: the parameters that one rank must update completely, and the
    cost of that, in any unit. is_padded: all ranks' parts of a bucket have one length. is_coded: parts that are split
    begin with a block of the codec."""
    alike: dict[tuple[object, ...], list[Named]] = {}
    for name, parameter in members:
        shape = parameter.shape if is_padded and name in costs else None
        alike.setdefault((name in costs, kind_of(name), shape), []).append((name, parameter))
    if is_padded:  # those of one kind in turn, so that ranks have equally many
        whole = [name for named in alike.values() for name, _ in named if name in costs]
        owners, shares = {name: index % num_ranks for index, name in enumerate(whole)}, [1.0] * num_ranks
    else:
        owners, shares = _assigned(members, costs, num_ranks)
    chunks: list[list[Named]] = []
    for named in alike.values():
        in_turn = num_ranks * named[0][1].nbytes if is_padded and named[0][0] in owners else 1
        chunks += cut(named, max(1, bucket_bytes // in_turn) * in_turn)  # of matrices equally many for each rank
    place = {name: index for index, (name, _) in enumerate(members)}
    chunks.sort(key=lambda chunk: max(place[name] for name, _ in chunk))
    layouts = []
    for chunk in chunks:
        if chunk[0][0] in owners:
            layouts.append(_of_whole(chunk, owners, num_ranks, is_padded))
        else:
            layouts.append(_of_parts(chunk, shares, is_padded, block_of(shapes_of(chunk)) if is_coded else 1))
    return layouts


def block_of(shapes: Sequence[torch.Size]) -> int:
    """Returns the largest block, a multiple of 4, that fills rows of all these tensors: rows of a matrix may differ
    much in magnitude. 128 where none does."""
    row = math.gcd(*(shape[1:].numel() if len(shape) > 1 else shape.numel() for shape in shapes))
    return max((b for b in range(_LEAST_BLOCK, _LARGEST_BLOCK + 1, 4) if row % b == 0), default=128)


def shapes_of(members: Sequence[Named]) -> list[torch.Size]:
    return [parameter.shape for _, parameter in members]


def _assigned(
    members: Sequence[Named], costs: Mapping[str, float], num_ranks: int
) -> tuple[dict[str, int], list[float]]:
    """Returns the owner of each whole parameter, and each rank's part of all others, so that states are equal."""
    sizes = {name: parameter.numel() for name, parameter in members}
    owners = dict(zip(costs, ownership.assign(list(costs.values()), num_ranks), strict=True))
    loads = [0.0] * num_ranks
    for name, owner in owners.items():
        loads[owner] += len(muon.MOMENTS) * sizes[name]
    divisible = len(adamw.MOMENTS) * sum(size for name, size in sizes.items() if name not in owners)
    return owners, ownership.fill(loads, divisible)


def _of_parts(chunk: Sequence[Named], shares: Sequence[float], is_padded: bool, block: int) -> Layout:
    """Returns the layout of parameters that are split anywhere, but between the elements of a block."""
    *offsets, length = accumulate((parameter.numel() for _, parameter in chunk), initial=0)
    if is_padded:
        length = -(-length // len(shares)) * len(shares)
    borders = ownership.borders(length, shares)
    borders = [border // block * block for border in borders[:-1]] + borders[-1:]
    return Layout(chunk, [*offsets, length], borders)


def _of_whole(chunk: Sequence[Named], owners: Mapping[str, int], num_ranks: int, is_padded: bool) -> Layout:
    """Returns the layout of parameters that have one owner each, whose elements are consecutive."""
    members = sorted(chunk, key=lambda member: owners[member[0]])  # stable
    lengths = [0] * num_ranks  # of each owner's part
    within = []  # where each parameter begins in its owner's part
    for name, parameter in members:
        within.append(lengths[owners[name]])
        lengths[owners[name]] += parameter.numel()
    borders = list(accumulate([max(lengths)] * num_ranks if is_padded else lengths, initial=0))
    offsets = [borders[owners[name]] + start for (name, _), start in zip(members, within, strict=True)]
    return Layout(members, [*offsets, borders[-1]], borders)
