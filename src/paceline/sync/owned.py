"""Buckets of which each rank owns a part, and what they send. `zero` uses them.

A weight that every reader rounds first, as a matrix product in bfloat16 does, is sent rounded, and the model's
parameters hold the rounded value on all ranks, the owner included. The owner alone has the exact value, its master: the
optimizer updates it, and checkpoints hold it. No product and no update changes by a bit.

A codec (codec.py) sends integers of a few bits, for slow links. It rounds, and says so:

  gradients  each rank encodes its contribution to each other rank's part once; the owner decodes and adds them in
             float32. A codec of 4 bits keeps what its messages had too much (`excess`), and subtracts it from the next.
  weights    all ranks, the owner included, hold the same replica of the master in the model's parameters. The owner
             encodes master - replica, and all add what that decodes to. So replicas stay equal to the last bit, and
             what one message left out is in the next difference.

A step that is skipped leaves `excess` and the replica as they were.
"""

import time
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from paceline.base.errors import RunError
from paceline.base.ownership import Slice
from paceline.optim.optimizer import ParamSlice
from paceline.sync.buckets import Bucket
from paceline.sync.codec import Codec, Rounded, of_wire
from paceline.sync.layout import Layout, block_of, shapes_of
from paceline.sync.wire import CODINGS
from paceline.world.group import Group, Transfer
from paceline.world.hierarchy import by_distance

REPLICA, EXCESS = "wire.replica", "wire.excess-"  # names in a checkpoint, after the parameter's; the sender's rank


class OwnedBucket(Bucket):
    """A bucket whose parameters are also views of a flat buffer. Rank r owns elements borders[r] .. borders[r+1]-1.

    `values` has the parameters of all ranks, `master` this rank's elements: a view of `values`, or a copy of more bits
    where `values` is rounded, to `read_as` or by a codec.
    """

    owns_memory = True

    def __init__(self, layout: Layout, group: Group, read_as: torch.dtype | None, wire: str):
        """read_as: the dtype to which every reader rounds these weights; None: no reader does."""
        for _, parameter in layout.members:
            parameter.data = parameter.data.contiguous()
        self.is_rounded = False
        super().__init__(layout, group)
        self.borders = list(layout.borders)
        self.parts = [slice(start, stop) for start, stop in pairwise(self.borders)]
        self.span = self.borders[group.rank], self.borders[group.rank + 1]
        self.part_here = self.parts[group.rank]
        self.values = group.zeros(len(self.flat), self.flat)
        for parameter, offset in zip(self.parameters, self.offsets, strict=False):
            view = self.values[offset : offset + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        self.message = self.values  # what a gather sends and fills
        self.master = self.values[self.part_here]
        self.codec, self.change_codec = of_wire(wire, block_of(shapes_of(layout.members)))
        self.read_as = read_as or self.values.dtype
        self.is_rounded = self.read_as != self.values.dtype or self.change_codec is not None
        if self.is_rounded:
            self.master = self.master.clone()
            self.values.copy_(self.values.to(self.read_as))
        self.hold_memory()
        self.gathering: Transfer | None = None
        self.excess: torch.Tensor | None = None
        if CODINGS[wire].keeps_excess:
            self.excess, self._next = torch.zeros_like(self.flat), torch.zeros_like(self.flat)  # next: after the update
        self.excess_factor = 1.0  # the `loss_factor` of the gradients in `excess`
        self.codec_ms = 0.0
        self._is_checked = False  # gradients have the values of `read_as`

    # ---- memory ----

    def marks(self) -> list[object]:
        """Where values are rounded, also a change in place counts, which the master must take."""
        if not self.is_rounded:
            return super().marks()
        return [(parameter.data_ptr(), parameter._version) for parameter in self.parameters]

    def take_replaced(self) -> list[int]:
        self.wait()  # else what arrives later would overwrite the script's values
        replaced = super().take_replaced()
        for index in replaced if self.is_rounded else ():
            start, stop = self.owned(index)
            if start < stop:
                self.master[start - self.span[0] : stop - self.span[0]] = self.values[start:stop]
            self.homes[index].copy_(self.homes[index].to(self.read_as))
        return replaced

    def owned(self, index: int) -> tuple[int, int]:
        """Returns which elements of a parameter this rank owns, as places in the buffer: start .. stop-1, or none."""
        offset = self.offsets[index]
        return max(self.span[0], offset), min(self.span[1], offset + self.parameters[index].numel())

    def slices(self, is_whole: bool) -> list[ParamSlice]:
        """Returns this rank's slices of it, with their gradients in place."""
        slices = []
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            start, stop = self.owned(index)
            if start < stop:
                shape = parameter.shape if is_whole else (stop - start,)
                weights = nn.Parameter(self.master[start - self.span[0] : stop - self.span[0]].view(shape))
                weights.grad = self.flat[start:stop].view(shape)
                offset = self.offsets[index]
                slices.append(ParamSlice(name, parameter.shape, start - offset, stop - offset, weights))
        return slices

    # ---- gradients ----

    def start_exact_reduce(self) -> Transfer:
        """Begins to add up the ranks' gradients on their owners in `read_as`, whose values they have. The first ones
        are compared, which takes longer than to round them."""
        if not self._is_checked:
            for rank, part in enumerate(self.parts):
                values = self.flat[part]
                # Values that are not finite make all ranks skip the step.
                if rank != self.group.rank and ((values != values.to(self.read_as)) & values.isfinite()).any():
                    raise RunError(
                        f"the gradient of {self.names[0]} has more bits than {self.read_as}, in which "
                        "`rounded_gradients` says that it can be sent: leave that parameter out there"
                    )
            self._is_checked = True
        return self._start_coded_reduce(Rounded(self.read_as))

    def start_reduce(self, loss_factor: float = 1.0) -> Transfer:
        """Begins to add up the ranks' gradients on their owners. loss_factor: of the losses."""
        if self.codec is None:
            return self.group.start_reduce_scatter(self.flat, self.borders)
        if self.excess is not None:
            if loss_factor != self.excess_factor:  # a new tensor: a save may still copy the old one
                self.excess = self.excess * (loss_factor / self.excess_factor)
                self.excess_factor = loss_factor
            self.flat[self.part_here].sub_(self.excess[self.part_here])  # zero, but after a resume in another world
        return self._start_coded_reduce(self.codec)

    def _start_coded_reduce(self, codec: Codec) -> Transfer:
        began = time.thread_time()
        sends = {}
        for to in by_distance(self.group.rank, 1, self.group.size):
            part = self.parts[to]
            sends[to] = self._message(codec, to)
            if self.excess is None:
                codec.encode(self.flat[part], sends[to])
            else:
                codec.encode(self.flat[part], sends[to], self.excess[part], self._next[part])
        sources = by_distance(self.group.rank, -1, self.group.size)
        arrived = {source: self._message(codec, self.group.rank) for source in sources}
        self._count(began)

        def add_up() -> None:  # in the order of start_reduce_scatter
            began = time.thread_time()
            for message in arrived.values():
                codec.add_decoded(message, self.flat.data[self.part_here])
            self._count(began)

        return self.group.start_messages(sends, arrived, add_up)

    # ---- weights ----

    def start_gather(self) -> None:
        """Begins to give all ranks the new weights: (n-1)/n times the bytes in `read_as`, or of the codec."""
        if self.change_codec is not None:
            self.gathering = self._start_changes(self.change_codec)
        else:
            self.start_refresh()

    def start_refresh(self) -> None:
        """Begins to give all ranks this rank's weights, as they are read."""
        if self.read_as != self.values.dtype:
            self.message = torch.empty_like(self.values, dtype=self.read_as)
        if self.is_rounded:
            self.message[self.part_here].copy_(self.master)
        self.gathering = self.group.start_all_gather(self.message, self.borders)

    def _start_changes(self, codec: Codec) -> Transfer:
        """Begins to send master - replica, and to add what arrives to the replica."""
        if self.excess is not None:
            self.excess, self._next = self._next, self.excess
            self._next[self.part_here] = 0
        began, group = time.thread_time(), self.group
        arrived = {source: self._message(codec, source) for source in by_distance(group.rank, -1, group.size)}
        change = self._message(codec, group.rank)
        codec.encode(self.master, change, minus=self.values[self.part_here])
        self._count(began)

        def add_up() -> None:
            began = time.thread_time()
            for source, message in {group.rank: change, **arrived}.items():
                codec.add_decoded(message, self.values[self.parts[source]])
            self._count(began)

        return group.start_messages(dict.fromkeys(by_distance(group.rank, 1, group.size), change), arrived, add_up)

    def wait(self) -> None:
        """Waits until the parameters have the weights of the last gather."""
        if self.gathering is None:
            return
        self.gathering.wait()
        self.gathering = None
        if self.message is not self.values:
            self.values.copy_(self.message)
            self.message = self.values

    def start_full(self) -> tuple[dict[str, torch.Tensor], Transfer]:
        """Begins to gather the masters; returns them by name, in their shapes, not filled yet."""
        flat = torch.empty_like(self.values)
        flat[self.part_here] = self.master
        named = zip(self.names, self.parameters, self.offsets, strict=False)
        full = {name: flat[offset : offset + p.numel()].view_as(p) for name, p, offset in named}
        return full, self.group.start_all_gather(flat, self.borders)

    def _message(self, codec: Codec, rank: int) -> torch.Tensor:
        """Returns room for a message of that rank's part."""
        num_bytes = codec.num_bytes(self.borders[rank + 1] - self.borders[rank])
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.flat.device)

    def _count(self, began: float) -> None:
        self.codec_ms += (time.thread_time() - began) * 1e3

    # ---- what later messages depend on ----

    def private_state(self) -> dict[Slice, torch.Tensor]:
        """Returns the replica of this rank's elements, and what its messages had too much, as `Strategy` says."""
        tensors = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            offset, size = self.offsets[index], parameter.numel()
            start, stop = self.owned(index)
            if start < stop:
                tensors[Slice(f"{name}/{REPLICA}", start - offset, stop - offset)] = self.values[start:stop]
            if self.excess is not None:
                excess = self.excess[offset : offset + size]
                tensors[Slice(f"{name}/{EXCESS}{self.group.rank}", 0, size)] = excess
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor], excess_factor: float) -> None:
        """Takes `private_state`, complete tensors by name. What several ranks' messages had too much is added up."""
        self.excess_factor = excess_factor
        if self.excess is not None:
            self.excess.zero_()
        for key, tensor in tensors.items():
            name, _, kind = key.rpartition("/")
            if name not in self.names:
                continue
            place = slice(self.offsets[self.names.index(name)], None)
            if kind == REPLICA:
                self.values[place][: len(tensor)] = tensor
            elif self.excess is not None:
                self.excess[place][: len(tensor)] += tensor
