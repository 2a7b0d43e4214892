"""The `zero` strategy with integers of a few bits on the wire (codec.py): for slow links. It rounds, and says so.

  gradients  each rank encodes its contribution to each other rank's part once; the owner decodes and adds them in
             float32. With 4 bits a rank keeps what its messages had too much (`excess`), and subtracts it from the
             next ones (error feedback, arXiv 1901.09847).
  weights    the owner keeps exact weights, the master. All ranks, the owner included, hold the same replica of it in
             the model's parameters. The owner encodes master - replica in 4 bits, and all add what that decodes to. So
             replicas stay equal to the last bit, and what one message left out is in the next difference.

A step that is skipped leaves `excess` and the replica as they were.
"""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from paceline.base.ownership import Slice
from paceline.sync.buckets import Named
from paceline.sync.codec import Blocks
from paceline.sync.zero import Layout, ShardedBucket, ShardedSync
from paceline.world.group import Group, Transfer
from paceline.world.hierarchy import by_distance

_WEIGHT_BITS = 4
_LARGEST_BLOCK, _LEAST_BLOCK = 256, 64
REPLICA, EXCESS = "wire.replica", "wire.excess-"  # names in a checkpoint, after the parameter's; the sender's rank


class CodedBucket(ShardedBucket):
    """`values` has the replica, of all ranks' elements."""

    def __init__(self, members: Sequence[Named], borders: list[int], group: Group, gradient_bits: int, block: int):
        super().__init__(Layout(members, (), borders, members[0][1].dtype), group)
        self.master, self.is_rounded = self.master.clone(), True
        self.hold_memory()
        self._parts = list(pairwise(borders))
        self._gradients, self._weights = Blocks(gradient_bits, block), Blocks(_WEIGHT_BITS, block)
        self.excess = torch.zeros_like(self.flat) if gradient_bits < 8 else None
        self._next = torch.zeros_like(self.flat) if gradient_bits < 8 else None  # once this step's update is made
        self.loss_factor = 1.0  # that of the losses whose gradients `excess` is of
        self.codec_ms = 0.0

    def start_coded_reduce(self, group: Group, loss_factor: float) -> Transfer:
        """Begins to add up the ranks' gradients on their owners. 1 or 1/2 byte an element of the other ranks' parts."""
        began = time.thread_time()
        own = slice(*self.span)
        if self.excess is not None:
            if loss_factor != self.loss_factor:  # a new tensor: a save may still copy the old one
                self.excess = self.excess * (loss_factor / self.loss_factor)
                self.loss_factor = loss_factor
            self.flat[own].sub_(self.excess[own])  # zero, but after a resume in another world
        sends = {}
        for to in by_distance(group.rank, 1, group.size):
            part = slice(*self._parts[to])
            sends[to] = self._message(self._gradients, to)
            if self.excess is None or self._next is None:
                self._gradients.encode(self.flat[part], sends[to])
            else:
                self._gradients.encode(self.flat[part], sends[to], self.excess[part], self._next[part])
        arrived = {
            source: self._message(self._gradients, group.rank) for source in by_distance(group.rank, -1, group.size)
        }
        self._count(began)

        def add_up() -> None:
            began = time.thread_time()
            for message in arrived.values():
                self._gradients.add_decoded(message, self.flat.data[own])
            self._count(began)

        return group.start_exchange(sends, arrived, add_up)

    def start_gather(self, group: Group) -> None:
        """Begins to give all ranks the new weights: this rank's costs 1/2 byte an element for each other rank."""
        if self.excess is not None:
            assert self._next is not None
            self.excess, self._next = self._next, self.excess
            self._next[slice(*self.span)] = 0
        began = time.thread_time()
        arrived = {source: self._message(self._weights, source) for source in by_distance(group.rank, -1, group.size)}
        mine = self._message(self._weights, group.rank)
        self._weights.encode(self.master, mine, minus=self.values[slice(*self.span)])
        self._count(began)

        def add_up() -> None:
            began = time.thread_time()
            for source, message in {group.rank: mine, **arrived}.items():
                self._weights.add_decoded(message, self.values[slice(*self._parts[source])])
            self._count(began)

        self.gathering = group.start_exchange(
            dict.fromkeys(by_distance(group.rank, 1, group.size), mine), arrived, add_up
        )

    def start_refresh(self, group: Group) -> None:
        """Begins to make the replica equal to the masters. 4 bytes an element."""
        self.values[slice(*self.span)] = self.master
        self.gathering = group.start_all_gather(self.values, self.borders)

    def _message(self, codec: Blocks, rank: int) -> torch.Tensor:
        start, stop = self._parts[rank]
        return torch.empty(codec.num_bytes(stop - start), dtype=torch.uint8, device=self.flat.device)

    def _count(self, began: float) -> None:
        self.codec_ms += (time.thread_time() - began) * 1e3


class CodedSync(ShardedSync):
    """Communication a step: (n-1)/n bytes an element of gradients, half of that with 4 bits, and half of that for
    weights; 1.5 to 2% more for the blocks' scales."""

    is_coded = True
    buckets: list[CodedBucket]  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        bucket_bytes: int,
        unsplit_costs: Mapping[str, float],
        stages: Sequence[nn.Module],
        gradient_bits: int,
    ):
        self._gradient_bits = gradient_bits
        self._is_skipped = False
        super().__init__(model, group, bucket_bytes, unsplit_costs, stages)

    def skip(self) -> None:
        self._is_skipped = True

    def _publish_rest(self) -> None:
        if not self._is_skipped:
            super()._publish_rest()
        self._is_skipped = False

    def refresh(self) -> None:
        for bucket in reversed(self.buckets):
            bucket.start_refresh(self._group)

    @property
    def excess_factor(self) -> float:
        return self.buckets[0].loss_factor if self.buckets else 1.0

    def wire_state(self) -> dict[Slice, torch.Tensor]:
        self.wait_for_params()
        found = {}
        for bucket in self.buckets:
            for name, parameter, offset in zip(bucket.names, bucket.parameters, bucket.offsets, strict=False):
                start, stop = max(bucket.span[0], offset), min(bucket.span[1], offset + parameter.numel())
                if start < stop:
                    found[Slice(f"{name}/{REPLICA}", start - offset, stop - offset)] = bucket.values[start:stop]
                if bucket.excess is not None:
                    whole = bucket.excess[offset : offset + parameter.numel()]
                    found[Slice(f"{name}/{EXCESS}{self._group.rank}", 0, parameter.numel())] = whole
        return found

    def take_wire_state(self, found: Mapping[Slice, torch.Tensor], loss_factor: float) -> None:
        for bucket in self.buckets:
            if bucket.excess is not None:
                bucket.excess.zero_()
            bucket.loss_factor = loss_factor
            for name, parameter, offset in zip(bucket.names, bucket.parameters, bucket.offsets, strict=False):
                size = parameter.numel()
                for item, tensor in found.items():
                    owner, _, key = item.name.rpartition("/")
                    if owner == name and key == REPLICA:
                        bucket.values[offset : offset + size] = tensor
                    elif owner == name and bucket.excess is not None:
                        bucket.excess[offset : offset + size] += tensor

    def take_codec_ms(self) -> float:
        spent = sum(bucket.codec_ms for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.codec_ms = 0.0
        return spent

    def _start_reduce(self, bucket: ShardedBucket) -> Transfer:
        assert isinstance(bucket, CodedBucket)
        return bucket.start_coded_reduce(self._group, self.loss_factor)

    def _make_bucket(self, group: Group, layout: Layout) -> CodedBucket:
        chunk, borders = layout.members, layout.borders
        block = block_of([parameter.shape for _, parameter in chunk])
        if chunk[0][0] not in self._unsplit:
            borders = [border // block * block for border in borders[:-1]] + borders[-1:]
        return CodedBucket(chunk, borders, group, self._gradient_bits, block)


def block_of(shapes: Sequence[torch.Size]) -> int:
    """Returns the largest block that fills rows of all these tensors: rows of a matrix may differ much in magnitude.
    128 where only tiny blocks do."""
    row = math.gcd(*(shape[1:].numel() if len(shape) > 1 else shape.numel() for shape in shapes))
    return max((b for b in range(_LEAST_BLOCK, _LARGEST_BLOCK + 1) if row % b == 0), default=128)
