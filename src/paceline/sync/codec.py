"""Codecs: fewer bytes than float32 for gradients and weights on the wire. Pure functions of tensors. `of_wire` names
them all.

`Rounded` sends each element in another dtype. A message of `Blocks` holds blocks of `block` elements, each with one
float32 scale s = (largest magnitude) / L, and an integer q = round(x / s) for each element, of `bits` bits; L = 127
with 8 bits, 7 with 4, 1 with 2. Decoding is q * s.

    message   scales of all blocks | bytes of q, block by block
    bits 4    byte i of a block = q[i] + 16 q[i + block/2]: two ranges of elements, so that no byte has to be shuffled

Decoding makes the same bits on every processor: its operations (conversion of small integers, products and sums that
are rounded one by one) are exact or rounded alike everywhere. A block with a value that is not finite is decoded to
values that are not finite, so the sum of gradients shows it on their owner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from paceline.sync.wire import CODINGS

_CHUNK = 65536  # elements for each thread: its two workspaces of 256 KiB stay in the cache
_LEAST = 1e-30  # a block of smaller values is sent as zeros: its scale would lose bits, or be zero


@dataclass(frozen=True)
class Rounded:
    """Elements rounded to a dtype. Messages, of any codec, are flat tensors of bytes."""

    dtype: torch.dtype

    def num_bytes(self, num_elements: int) -> int:
        """Returns the length of the message for so many elements."""
        return num_elements * self.dtype.itemsize

    def encode(
        self,
        x: torch.Tensor,
        message: torch.Tensor,
        minus: torch.Tensor | None = None,
        excess: torch.Tensor | None = None,
    ) -> None:
        """Fills a message with the flat tensor x. No caller gives it `minus` and `excess`, see Blocks."""
        message.view(self.dtype).copy_(x)

    def add_decoded(self, message: torch.Tensor, into: torch.Tensor) -> None:
        """Adds what a message holds to a flat tensor."""
        into.add_(message.view(self.dtype))


@dataclass(frozen=True)
class Blocks:
    """Integers of 2, 4 or 8 bits with a scale for each block of elements, a multiple of 4."""

    bits: int
    block: int = 256

    def __post_init__(self) -> None:
        """Raises ValueError for bits that do not fill a byte."""
        if self.bits not in (2, 4, 8):
            raise ValueError(f"integers of {self.bits} bits do not fill bytes: bits are 2, 4 or 8")

    @property
    def _lanes(self) -> int:
        """Elements in a byte. Those of a block lie a lane's length apart."""
        return 8 // self.bits

    def num_bytes(self, num_elements: int) -> int:
        """A last block that the elements do not fill has zeros."""
        return -(-num_elements // self.block) * (4 + self.block // self._lanes)

    def encode(
        self,
        x: torch.Tensor,
        message: torch.Tensor,
        minus: torch.Tensor | None = None,
        excess: torch.Tensor | None = None,
    ) -> None:
        """Fills a message with the flat tensor x - minus; sets `excess` to what is decoded less it."""
        largest = (1 << (self.bits - 1)) - 1
        scales_N, integers_NE = self._split(message)
        for blocks, elements, values_NLE, other_NLE in self._chunks(x):
            values = values_NLE.view(-1)[: len(x[elements])]
            values_NLE.view(-1)[len(values) :] = 0
            if minus is None:
                values.copy_(x[elements])
            else:
                torch.sub(x[elements], minus[elements], out=values)
            scale_N = scales_N[blocks]
            torch.amax(torch.abs(values_NLE, out=other_NLE), (1, 2), out=scale_N).div_(largest).clamp_(_LEAST)
            torch.mul(values_NLE, scale_N.reciprocal()[:, None, None], out=other_NLE).round_()
            total_NE = other_NLE[:, 0]
            for lane in range(1, self._lanes):
                total_NE = torch.add(total_NE, other_NLE[:, lane], alpha=1 << (self.bits * lane))
            integers_NE[blocks] = total_NE
            if excess is not None:
                decoded = other_NLE.mul_(scale_N[:, None, None]).view(-1)[: len(values)]
                torch.sub(decoded, values, out=excess[elements])

    def add_decoded(self, message: torch.Tensor, into: torch.Tensor) -> None:
        scales_N, integers_NE = self._split(message)
        for blocks, elements, values_NLE, _ in self._chunks(into):
            rest_NE = values_NLE[:, 0]
            rest_NE.copy_(integers_NE[blocks])
            for lane in reversed(range(1, self._lanes)):
                base = float(1 << (self.bits * lane))
                torch.mul(rest_NE, 1 / base, out=values_NLE[:, lane]).round_()
                rest_NE.sub_(values_NLE[:, lane], alpha=base)
            values_NLE.mul_(scales_N[blocks, None, None])
            into[elements].add_(values_NLE.view(-1)[: len(into[elements])])

    def _split(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the message's scales, and its integers by block."""
        width = self.block // self._lanes
        num_blocks = len(message) // (4 + width)
        return message[: 4 * num_blocks].view(torch.float32), message[4 * num_blocks :].view(torch.int8).view(-1, width)

    def _chunks(self, x: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """Yields ranges of blocks and of their elements, each with two workspaces (blocks, lanes, elements)."""
        num_blocks = -(-x.numel() // self.block)
        at_once = max(1, _CHUNK * torch.get_num_threads() // self.block)
        shape = min(at_once, num_blocks), self._lanes, self.block // self._lanes
        space = torch.empty(2, *shape, dtype=torch.float32, device=x.device)
        for low, high in pairwise([*range(0, num_blocks, at_once), num_blocks]):
            elements = slice(low * self.block, min(high * self.block, x.numel()))
            yield slice(low, high), elements, space[0, : high - low], space[1, : high - low]


Codec = Rounded | Blocks


def of_wire(wire: str, block: int) -> tuple[Codec | None, Codec | None]:
    """Returns the codecs of gradients (with local, of its changes of weights), and of zero's changes of weights; None:
    they are sent exactly. block: elements with one scale."""
    coding = CODINGS[wire]
    return _codec(coding.bits, block), _codec(coding.weight_bits, block)


def _codec(bits: int, block: int) -> Codec | None:
    if bits == 32:
        return None
    return Rounded(torch.bfloat16) if bits == 16 else Blocks(bits, block)
