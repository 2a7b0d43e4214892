"""The `zero` strategy: every rank has all weights, and updates only its share (ZeRO stage 1, arXiv 1910.02054).

Optimizer state, twice the weights for AdamW, is divided by the number of ranks. `ddp`'s all-reduce is a reduce-scatter
and an all-gather; here the update comes between the two, so no more bytes are sent:

  launch   a bucket's reduce-scatter overlaps with backward: each rank gets the sums of its own gradients
  update   the optimizer changes this rank's slices: any elements with AdamW, complete matrices with Muon
  publish  all-gathers start, in the order in which the next forward needs the weights: each after its bucket's update,
           if the optimizer can update a part of its slices, else after the whole update
  wait     each half of a block waits for its own weights, most of which arrived during the blocks before

A weight that every reader rounds first, as a matrix product in bfloat16 does, is sent rounded, and the model's
parameters hold the rounded value on all ranks, the owner included. The owner alone has the exact value, its master: the
optimizer updates it, and checkpoints hold it. No product and no update changes by a bit.

All ranks compute the same ownership (base/ownership.py). Matrices that cannot be split are assigned by the cost of
their update; everything else is split so that each rank has an equal share of the state.

NCCL is several times faster if all ranks' parts of a bucket have one length. There buckets are padded: matrices of one
shape are dealt out one by one, and everything else is split into equal parts.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.base import ownership
from paceline.base.errors import RunError
from paceline.optim import adamw, muon
from paceline.optim.optimizer import ParamSlice
from paceline.sync.buckets import Bucket, BucketStrategy, Named, backward_order, cut
from paceline.world.group import Group, Transfer
from paceline.world.hierarchy import by_distance

_MAX_BYTES_IN_FLIGHT = 40 << 20  # of buckets, and at least 4 of them: a received part takes memory until it is added


class Layout(NamedTuple):
    """A bucket's parameters, where each begins, the borders of the ranks' elements, and the dtype of sent weights."""

    members: Sequence[Named]
    offsets: Sequence[int]
    borders: list[int]
    read_as: torch.dtype


class ShardedBucket(Bucket):
    """A bucket whose parameters are also views of a flat buffer. Rank r owns elements borders[r] .. borders[r+1]-1.

    `values` has the parameters of all ranks, `master` this rank's elements: a view of `values`, or a copy of more bits
    where `values` is rounded to `read_as`.
    """

    owns_memory = True
    is_rounded = False  # the parameters have fewer bits than the master

    def __init__(self, layout: Layout, group: Group):
        members, offsets, borders, read_as = layout
        for _, parameter in members:
            parameter.data = parameter.data.contiguous()
        super().__init__(members, group, offsets)
        self.borders = borders
        self.span = borders[group.rank], borders[group.rank + 1]
        self.values = group.zeros(len(self.flat), self.flat)
        for parameter, offset in zip(self.parameters, self.offsets, strict=False):
            view = self.values[offset : offset + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        self.message = self.values  # what a gather sends and fills
        self.master = self.values[slice(*self.span)]
        self.read_as, self.is_rounded = read_as, read_as != self.values.dtype
        if self.is_rounded:
            self.master = self.master.clone()
            self.values.copy_(self.values.to(read_as))
        self.hold_memory()
        self.gathering: Transfer | None = None
        self.has_fitted = False

    def marks(self) -> list[object]:
        """Where values are rounded, also a change in place counts, which the master must take."""
        if not self.is_rounded:
            return super().marks()
        return [(parameter.data_ptr(), parameter._version) for parameter in self.parameters]

    def take_replaced(self) -> list[int]:
        self.wait()  # else what arrives later would overwrite the script's values
        replaced = super().take_replaced()
        for index in replaced if self.is_rounded else ():
            first, own = self.offsets[index], range(*self.span)
            start, stop = max(first, own.start), min(first + self.parameters[index].numel(), own.stop)
            if start < stop:
                self.master[start - own.start : stop - own.start] = self.values[start:stop]
            self.homes[index].copy_(self.homes[index].to(self.read_as))
        return replaced

    def slices(self, is_unsplit: bool) -> list[ParamSlice]:
        """Returns this rank's slices of it, with their gradients in place."""
        found = []
        for name, parameter, offset in zip(self.names, self.parameters, self.offsets, strict=False):
            start, stop = max(self.span[0], offset), min(self.span[1], offset + parameter.numel())
            if start < stop:
                shape = parameter.shape if is_unsplit else (stop - start,)
                mine = nn.Parameter(self.master[start - self.span[0] : stop - self.span[0]].view(shape))
                mine.grad = self.flat[start:stop].view(shape)
                found.append(ParamSlice(name, parameter.shape, start - offset, stop - offset, mine))
        return found

    def start_reduce(self, group: Group, sent_as: torch.dtype | None, must_fit: bool) -> Transfer:
        """Begins to add up the ranks' gradients on their owners, sent in another dtype if one is given. must_fit: they
        have its values; the first ones are compared, which takes longer than to round them."""
        if sent_as is None:
            return group.start_reduce_scatter(self.flat, self.borders)
        parts = [self.flat[start:stop] for start, stop in pairwise(self.borders)]
        mine = parts[group.rank]
        sends = {to: parts[to].to(sent_as) for to in by_distance(group.rank, 1, group.size)}
        if must_fit and not self.has_fitted:
            # Values that are not finite make all ranks skip the step.
            if any(((part != parts[to]) & parts[to].isfinite()).any() for to, part in sends.items()):
                raise RunError(
                    f"the gradient of {self.names[0]} has more bits than {sent_as}, in which `rounded_gradients` says "
                    "that it can be sent: leave that parameter out there"
                )
            self.has_fitted = True
        sources = by_distance(group.rank, -1, group.size)
        arrived = {source: torch.empty_like(mine, dtype=sent_as) for source in sources}

        def add_up() -> None:  # in the order of start_reduce_scatter
            for source in sources:
                mine.data.add_(arrived[source])

        return group.start_exchange(sends, arrived, add_up)

    def start_gather(self, group: Group) -> None:
        """Begins to send this rank's weights and to receive the others'. (n-1)/n times the bytes in `read_as`."""
        if self.is_rounded:
            self.message = torch.empty_like(self.values, dtype=self.read_as)
            self.message[slice(*self.span)].copy_(self.master)
        self.gathering = group.start_all_gather(self.message, self.borders)

    def wait(self) -> None:
        """Waits until the parameters have the weights of the last gather."""
        if self.gathering is None:
            return
        self.gathering.wait()
        self.gathering = None
        if self.message is not self.values:
            self.values.copy_(self.message)
            self.message = self.values

    def start_full(self, group: Group) -> tuple[dict[str, torch.Tensor], Transfer]:
        """Begins to gather the masters; returns them by name, in their shapes, not filled yet."""
        flat = torch.empty_like(self.values)
        flat[slice(*self.span)] = self.master
        named = zip(self.names, self.parameters, self.offsets, strict=False)
        full = {name: flat[offset : offset + p.numel()].view_as(p) for name, p, offset in named}
        return full, group.start_all_gather(flat, self.borders)


class ShardedSync(BucketStrategy[ShardedBucket]):
    """Communication a step: (n-1)/n times the gradients' bytes on the last micro-batch, the same for the weights after
    the update: together as much as `ddp`, or three quarters of it with weights in bfloat16."""

    shards_state = updates_slices = True

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        bucket_bytes: int,
        unsplit_costs: Mapping[str, float],
        stages: Sequence[nn.Module] = (),
        read_as: Mapping[str, torch.dtype] | None = None,
        rounded_gradients: Collection[str] = (),
        sent_as: torch.dtype | None = None,
        is_padded: bool = False,
    ):
        """unsplit_costs: the parameters that one rank must update completely, and the cost of that, in any unit.

        stages: modules whose forward runs before any of their parameters is read, such as a model's blocks; each waits
        for its own weights. The model's forward waits for all other weights.

        read_as: the parameters that every reader casts to this dtype before any other use of them.
        rounded_gradients: those of them whose gradient from one backward pass has values of that dtype. sent_as: the
        dtype to which all gradients are rounded before they are sent. They are added in their own dtype always.
        is_padded: all ranks' parts of a bucket have one length, for NCCL.
        """
        self._unsplit, read_as = frozenset(unsplit_costs), read_as or {}
        members = backward_order(model)
        alike: dict[tuple[object, ...], list[Named]] = {}  # may be in one bucket
        for name, parameter in members:
            is_dealt = is_padded and name in unsplit_costs
            kind = name in unsplit_costs, read_as.get(name), name in rounded_gradients, is_dealt and parameter.shape
            alike.setdefault(kind, []).append((name, parameter))
        if is_padded:
            owners, shares = _dealt(alike.values(), unsplit_costs, group.size), [1.0] * group.size
        else:
            owners, shares = _assign(members, unsplit_costs, group.size)
        chunks: list[list[Named]] = []
        for named in alike.values():
            in_turn = group.size * named[0][1].nbytes if is_padded and named[0][0] in owners else 1
            chunks += cut(named, max(1, bucket_bytes // in_turn) * in_turn)  # of matrices equally many for each rank
        place = {name: index for index, (name, _) in enumerate(members)}
        chunks.sort(key=lambda chunk: max(place[name] for name, _ in chunk))  # in the order in which they fill
        layouts = [_layout(chunk, owners, shares, read_as, is_padded) for chunk in chunks]
        super().__init__(
            model,
            group,
            [self._make_bucket(group, layout) for layout in layouts],
            launch=self._start_reduce,
            max_in_flight=max(4, _MAX_BYTES_IN_FLIGHT // bucket_bytes),
        )
        self.holds_rounded = any(bucket.is_rounded for bucket in self.buckets)
        self._slices = [bucket.slices(bucket.names[0] in self._unsplit) for bucket in self.buckets]
        self._forward_order = self.buckets[::-1]
        self._rounded_gradients, self._sent_as = frozenset(rounded_gradients), sent_as
        self._num_published = 0  # of these buckets: their gathers began within the update
        self._handles = self._hook(stages)

    def slices(self) -> list[ParamSlice]:
        return [part for slices in self._slices for part in slices]

    def parts(self) -> Iterator[list[ParamSlice]]:
        for slices, bucket in zip(reversed(self._slices), self._forward_order, strict=True):
            yield slices
            bucket.start_gather(self._group)
            self._num_published += 1

    def full_weights(self) -> dict[str, torch.Tensor]:
        found = self.on_all_ranks()
        masters = [bucket.start_full(self._group) for bucket in self.buckets if bucket.is_rounded]
        for full, transfer in masters:
            transfer.wait()
            found |= full
        return found

    def full_gradients(self) -> list[torch.Tensor]:
        for transfer in [self._group.start_all_gather(bucket.flat, bucket.borders) for bucket in self.buckets]:
            transfer.wait()
        return [bucket.flat for bucket in self.buckets]

    def publish(self) -> None:
        super().publish()
        self._publish_rest()

    def _publish_rest(self) -> None:
        for bucket in self._forward_order[self._num_published :]:
            bucket.start_gather(self._group)
        self._num_published = 0

    def refresh(self) -> None:
        for bucket in self._forward_order:
            bucket.start_gather(self._group)

    def wait_for_params(self) -> None:
        _wait_for(self.buckets)
        super().wait_for_params()

    def keep_with_model(self, replica: object) -> None:
        if self.holds_rounded:
            self._of_model.keeps = replica

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.holds_rounded:
            full = self.full_weights()
            for name, parameter in self._model.named_parameters():
                parameter.data.copy_(full[name])

    def _start_reduce(self, bucket: ShardedBucket) -> Transfer:
        is_exact = self.is_one_pass and bucket.names[0] in self._rounded_gradients
        if self._sent_as is None and is_exact:
            return bucket.start_reduce(self._group, bucket.read_as, must_fit=True)
        return bucket.start_reduce(self._group, self._sent_as, must_fit=False)

    def _make_bucket(self, group: Group, layout: Layout) -> ShardedBucket:
        return ShardedBucket(layout, group)

    def _hook(self, stages: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Makes each stage's forward wait for its buckets, and the model's for those of no stage."""
        stages_of: dict[nn.Parameter, list[nn.Module]] = {}  # several if they share a parameter
        for stage in stages:
            for parameter in stage.parameters():
                stages_of.setdefault(parameter, []).append(stage)
        needed: dict[nn.Module, list[ShardedBucket]] = {self._model: []}
        for bucket in self.buckets:
            waiting = [stage for parameter in bucket.parameters for stage in stages_of.get(parameter, [self._model])]
            for module in dict.fromkeys(waiting):
                needed.setdefault(module, []).append(bucket)
        waits = {module: _WaitForWeights(buckets) for module, buckets in needed.items()}
        self._of_model = waits[self._model]
        handles = []
        for module, wait in waits.items():
            hook: Callable[..., None] = wait
            if getattr(module, "_compiled_call_impl", None) is not None:  # nn.Module.compile: keep the wait out of it
                hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
            handles.append(module.register_forward_pre_hook(hook))
        return handles


class _WaitForWeights:
    """A hook that waits for weights before a forward pass. Its copy does nothing: a copied module has no buckets."""

    def __init__(self, buckets: Sequence[ShardedBucket] = ()):
        self._buckets = buckets
        self.keeps: object = None  # what lives as long as the module

    def __call__(self, *_: object) -> None:
        _wait_for(self._buckets)

    def __reduce__(self) -> tuple[object, ...]:
        return _WaitForWeights, ()


def _wait_for(buckets: Sequence[ShardedBucket]) -> None:
    for bucket in reversed(buckets):
        bucket.wait()


def _assign(
    members: Sequence[Named], unsplit_costs: Mapping[str, float], num_ranks: int
) -> tuple[dict[str, int], list[float]]:
    """Returns the owner of each unsplit parameter, and each rank's share of all others, so that states are equal."""
    sizes = {name: parameter.numel() for name, parameter in members}
    owners = dict(zip(unsplit_costs, ownership.assign(list(unsplit_costs.values()), num_ranks), strict=True))
    loads = [0.0] * num_ranks
    for name, owner in owners.items():
        loads[owner] += len(muon.MOMENTS) * sizes[name]
    divisible = len(adamw.MOMENTS) * sum(size for name, size in sizes.items() if name not in owners)
    return owners, ownership.fill(loads, divisible)


def _dealt(alike: Iterable[Sequence[Named]], unsplit: Container[str], num_ranks: int) -> dict[str, int]:
    """Returns the owner of each unsplit parameter: those of one kind in turn, so that ranks have equally many."""
    names = [name for members in alike for name, _ in members if name in unsplit]
    return {name: index % num_ranks for index, name in enumerate(names)}


def _layout(
    chunk: list[Named],
    owners: Mapping[str, int],
    shares: Sequence[float],
    read_as: Mapping[str, torch.dtype],
    is_padded: bool,
) -> Layout:
    first, parameter = chunk[0]
    dtype, num_ranks = read_as.get(first, parameter.dtype), len(shares)
    chunk = sorted(chunk, key=lambda member: owners.get(member[0], 0))  # stable: consecutive elements for each owner
    sizes = [p.numel() for _, p in chunk]
    if first not in owners:
        length = -(-sum(sizes) // num_ranks) * num_ranks if is_padded else sum(sizes)
        return Layout(chunk, [*accumulate(sizes[:-1], initial=0), length], ownership.borders(length, shares), dtype)
    held = [0] * num_ranks
    within = []  # where each begins in its owner's part
    for (name, _), size in zip(chunk, sizes, strict=True):
        within.append(held[owners[name]])
        held[owners[name]] += size
    borders = list(accumulate([max(held)] * num_ranks if is_padded else held, initial=0))
    offsets = [borders[owners[name]] + start for (name, _), start in zip(chunk, within, strict=True)]
    return Layout(chunk, [*offsets, borders[-1]], borders, dtype)
