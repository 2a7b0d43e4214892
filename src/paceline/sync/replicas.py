"""Proves that replicas are equal: compares digests of tensors between ranks."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.world.group import Group

_ROUNDING = 1e-4  # of a tensor's largest value
_ROW = 1024  # words


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Returns name -> 63-bit digest of a tensor's bytes.

    Uses sums of 8-byte words by row and by column of a matrix of them, mixed with their positions: several times faster
    than sha256, on the tensors' device. Each flip changes its row and its column, so flips and exchanged elements
    cannot cancel each other, except by a chance of 2^-63. An attacker could make them.
    """
    sums = {name: _sums(_words(tensor)) for name, tensor in tensors.items() if tensor.nbytes and tensor.nbytes % 4 == 0}
    short: dict[str, int] = {}
    for device in {part.device for part in sums.values()}:
        parts = {name: part for name, part in sums.items() if part.device == device}
        lengths = [len(part) for part in parts.values()]
        mixed = _mixed(torch.cat([*parts.values()]))
        factors = 2 * torch.arange(max(lengths), device=device) + 1
        dots = torch.stack([(part * factors[: len(part)]).sum() for part in torch.split(mixed, lengths)])
        values = dots.cpu().tolist()  # from a GPU one copy
        short |= {name: _short(str(value).encode()) for name, value in zip(parts, values, strict=True)}
    return {name: short[name] if name in short else _digest(tensor) for name, tensor in tensors.items()}


def overall(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns one hex digest, by sha256, over all tensors and their names: equal if and only if they are."""
    by_name = {name: _digest(tensor) for name, tensor in tensors.items()}
    return hashlib.sha256(repr(sorted(by_name.items())).encode()).hexdigest()[:16]


def _digest(tensor: torch.Tensor) -> int:
    return _short(tensor.detach().resolve_conj().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes as integers of 8 bytes, or of 4."""
    tensor = tensor.cpu() if tensor.device.type == "mps" else tensor  # whose integer kernels are untried here
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:  # a view of a bucket; as it is it would have no such integers
        flat = flat.clone()
    words = flat.view(torch.int32)
    return words.view(torch.int64) if words.numel() % 2 == 0 else words


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Returns the sums of columns and of rows, and the words that fill no row, as int64; overflows wrap around."""
    if words.numel() < _ROW:  # most tensors: biases and norms
        return words.long()
    rows = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
    return torch.cat([rows.sum(0), rows.sum(1), words[rows.numel() :].long()])


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Returns each word with its bits mixed, reversibly: else two flips of the highest bit would add up to nothing
    (the finalizer of splitmix64: Steele et al., OOPSLA 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        words = (words ^ (words >> shift) & (1 << 64 - shift) - 1) * factor  # shifts in zeros, not the sign
    return words


def _short(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between ranks."""

    name: str
    num_values: int
    minority: tuple[int, ...]  # the ranks that differ from the majority; empty if there is none

    def __str__(self) -> str:
        who = f"rank {', '.join(map(str, self.minority))} differs" if self.minority else "no value has a majority"
        return f"{self.name} has {self.num_values} different values ({who})"


def differences(
    tensors: Mapping[str, torch.Tensor], group: Group, holders: Sequence[Sequence[int]] = ()
) -> list[Difference]:
    """Returns the tensors that differ between ranks, the same list on all. Reads them once and sends 8 bytes for each.
    holders: sets of ranks, each of which has equal tensors; none: all ranks. Collective."""
    return compared(digests(tensors), group, holders)


def compared(
    tensor_digests: Mapping[str, int], group: Group, holders: Sequence[Sequence[int]] = ()
) -> list[Difference]:
    """Returns what `differences` does, from this rank's digests."""
    rows = group.share_integers(list(tensor_digests.values()))
    different = []
    for name, column in zip(tensor_digests, zip(*rows, strict=True), strict=True):
        for ranks in holders or (range(group.size),):
            counts = Counter(column[rank] for rank in ranks)
            if len(counts) == 1:
                continue
            value, votes = counts.most_common(1)[0]
            has_majority = 2 * votes > len(ranks)
            minority = tuple(rank for rank in ranks if column[rank] != value) if has_majority else ()
            different.append(Difference(name, len(counts), minority))
    return different


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Flips the lowest bit of the middle element (an injected fault)."""
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[flat.numel() // 2] ^= 1


def take_rounding_of_rank_0(tensors: Iterable[torch.Tensor], group: Group, device: torch.device) -> None:
    """Replaces tensors by rank 0's where they differ by rounding only, as averages of weights do that unequal
    processors computed. Others stay as they are, and are found by a comparison. Collective. device: of the group."""
    averages = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    shapes = str([(tensor.dtype, tensor.shape) for tensor in averages])
    if len(set(group.share_text(shapes))) > 1:  # broadcasts would not match; the comparison names the difference
        return
    for tensor in averages:
        theirs = tensor.detach().to(device, copy=True)
        group.broadcast(theirs)
        theirs = theirs.to(tensor.device)
        if (tensor - theirs).abs().max() <= _ROUNDING * theirs.abs().max():
            tensor.detach().copy_(theirs)


def broadcast(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Gives every rank rank 0's values, whatever the order of elements in each rank's memory. Collective."""
    for tensor in tensors:
        values = tensor.detach().resolve_conj().contiguous()
        group.broadcast(values)
        if values.data_ptr() != tensor.data_ptr():
            fill(tensor.detach(), values)


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values of the same shape into a tensor; one that repeats its elements (`expand`) gets each once."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[once].copy_(values[once])


def take_strides_of_rank_0(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """Gives parameters the order of elements in memory (channels_last, transposed) that they have on rank 0: gradients
    have it, too, and are summed as they lie in memory. Collective."""
    strides_here = [list(torch.empty_like(parameter, device="meta").stride()) for parameter in parameters]
    for parameter, here, strides in zip(parameters, strides_here, group.share_json(strides_here)[0], strict=True):
        if here != strides:
            there = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=parameter.device)
            parameter.data = there.copy_(parameter.detach())
