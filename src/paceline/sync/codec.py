"""Codecs: fewer bytes than float32 for gradients and weights on the wire. Pure functions of tensors. `of_wire` names
them all.

`Rounded` sends each element in another dtype. A message of `Blocks` holds blocks of `block` elements, each with one
float32 scale s = (largest magnitude) / L, and an integer q = round(x / s) for each element, of `bits` bits; L = 127
with 8 bits, 7 with 4, 1 with 2. Decoding is q * s.

    message   scales of all blocks | bytes of q
    bits 4    byte i = q[i] + 16 q[i + n/2]: two ranges of elements, so that no byte has to be shuffled

Decoding makes the same bits on every processor: its operations (conversion of small integers, products and sums that
are rounded one by one) are exact or rounded alike everywhere. A block with a value that is not finite is decoded to
values that are not finite, so the sum of gradients shows it on their owner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

_CHUNK = 65536  # elements for each thread: its two workspaces of 256 KiB stay in the cache
_LEAST = 1e-30  # a block of smaller values is sent as zeros: its scale would lose bits, or be zero


class Codec(Protocol):
    """What a bucket needs of a codec. Messages are flat tensors of bytes."""

    @property
    def keeps_excess(self) -> bool:
        """Whether what messages had too much is subtracted from later ones (error feedback, arXiv 1901.09847)."""

    def num_bytes(self, num_elements: int) -> int:
        """Returns the length of the message for so many elements."""

    def encode(
        self,
        x: torch.Tensor,
        message: torch.Tensor,
        minus: torch.Tensor | None = None,
        excess: torch.Tensor | None = None,
    ) -> None:
        """Fills a message with the flat tensor x - minus; sets `excess` to what is decoded less it."""

    def add_decoded(self, message: torch.Tensor, into: torch.Tensor) -> None:
        """Adds what a message holds to a flat tensor."""


@dataclass(frozen=True)
class Rounded:
    """Elements rounded to a dtype."""

    dtype: torch.dtype

    @property
    def keeps_excess(self) -> bool:
        return False

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self.dtype.itemsize

    def encode(
        self,
        x: torch.Tensor,
        message: torch.Tensor,
        minus: torch.Tensor | None = None,
        excess: torch.Tensor | None = None,
    ) -> None:
        values = x if minus is None else x - minus
        sent = message.view(self.dtype).copy_(values)
        if excess is not None:
            torch.sub(sent.to(values.dtype), values, out=excess)

    def add_decoded(self, message: torch.Tensor, into: torch.Tensor) -> None:
        into.add_(message.view(self.dtype))


@dataclass(frozen=True)
class Blocks:
    """Integers of 2, 4 or 8 bits with a scale for each block of elements."""

    bits: int
    block: int = 256

    @property
    def keeps_excess(self) -> bool:
        return self.bits < 8

    @property
    def _lanes(self) -> int:
        return 8 // self.bits  # elements in a byte; they lie a lane's length apart

    def _lane(self, num_elements: int) -> int:
        """The blocks of one lane. Blocks that the elements do not fill are zeros."""
        return -(-num_elements // (self.block * self._lanes))

    def num_bytes(self, num_elements: int) -> int:
        return self._lane(num_elements) * (4 * self._lanes + self.block)

    def encode(
        self,
        x: torch.Tensor,
        message: torch.Tensor,
        minus: torch.Tensor | None = None,
        excess: torch.Tensor | None = None,
    ) -> None:
        largest = (1 << (self.bits - 1)) - 1
        scales, integers = self._split(message, x.numel())
        for low, high, values, other in self._chunks(x):
            spans = self._spans(x.numel(), low, high)
            for (start, stop), row in zip(spans, values.flatten(1), strict=True):
                if minus is None:
                    row[: stop - start] = x[start:stop]
                else:
                    torch.sub(x[start:stop], minus[start:stop], out=row[: stop - start])
                row[stop - start :] = 0
            scale = scales[:, low:high]
            torch.amax(torch.abs(values, out=other), -1, out=scale).div_(largest).clamp_(_LEAST)
            torch.mul(values, scale.reciprocal().unsqueeze_(-1), out=other).round_()
            total = other[0]
            for lane in range(1, self._lanes):
                total = torch.add(total, other[lane], alpha=1 << (self.bits * lane))
            integers[low:high] = total
            if excess is not None:
                other.mul_(scale.unsqueeze(-1))
                for (start, stop), was, row in zip(spans, values.flatten(1), other.flatten(1), strict=True):
                    torch.sub(row[: stop - start], was[: stop - start], out=excess[start:stop])

    def add_decoded(self, message: torch.Tensor, into: torch.Tensor) -> None:
        scales, integers = self._split(message, into.numel())
        for low, high, values, _ in self._chunks(into):
            rest = values[0]
            rest.copy_(integers[low:high])
            for lane in reversed(range(1, self._lanes)):
                base = float(1 << (self.bits * lane))
                torch.mul(rest, 1 / base, out=values[lane]).round_()
                rest.sub_(values[lane], alpha=base)
            values.mul_(scales[:, low:high, None])
            for (start, stop), row in zip(self._spans(into.numel(), low, high), values.flatten(1), strict=True):
                into[start:stop].add_(row[: stop - start])

    def _split(self, message: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the message's scales (lanes, blocks) and integers (blocks, elements)."""
        lane = self._lane(num_elements)
        end = 4 * lane * self._lanes
        integers = message[end : end + lane * self.block].view(torch.int8)
        return message[:end].view(torch.float32).view(self._lanes, lane), integers.view(lane, self.block)

    def _chunks(self, x: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yields ranges of a lane's blocks, each with two workspaces (lanes, blocks, elements)."""
        lane = self._lane(x.numel())
        at_once = max(1, _CHUNK * torch.get_num_threads() // (self.block * self._lanes))
        space = torch.empty(2, self._lanes, min(at_once, lane), self.block, dtype=torch.float32, device=x.device)
        for low, high in pairwise([*range(0, lane, at_once), lane]):
            yield low, high, space[0, :, : high - low], space[1, :, : high - low]

    def _spans(self, num_elements: int, low: int, high: int) -> list[tuple[int, int]]:
        """Returns, for each lane, the elements of its blocks low .. high-1."""
        lane = self._lane(num_elements)
        edges = [((i * lane + low) * self.block, (i * lane + high) * self.block) for i in range(self._lanes)]
        return [(min(start, num_elements), min(stop, num_elements)) for start, stop in edges]


def of_wire(wire: str, block: int) -> tuple[Codec | None, Codec | None]:
    """Returns the codecs of gradients, and of changes of weights; None: they are sent exactly. block: elements with one
    scale."""
    table: dict[str, tuple[Codec | None, Codec | None]] = {
        "exact": (None, None),
        "bf16": (Rounded(torch.bfloat16), None),
        "int8": (Blocks(8, block), Blocks(4, block)),
        "int4": (Blocks(4, block), Blocks(4, block)),
    }
    return table[wire]
