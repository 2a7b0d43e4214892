"""The `zero` strategy: every rank has all weights, and updates only what it owns (ZeRO stage 1, arXiv 1910.02054).

Optimizer state, twice the weights for AdamW, is divided by the number of ranks. The all-reduce of `ddp` is a
reduce-scatter followed by an all-gather; here the update stands between the two, so no byte more moves:

  launch   a bucket's reduce-scatter starts behind backward: each rank gets the sum of what it owns
  update   the optimizer changes this rank's pieces, AdamW by slices, Muon by whole matrices
  publish  all-gathers start, in the order in which the next forward will need the weights
  settle   a block's forward waits for its own weights; only what the forward before it did not hide is waited for

Ownership (base/ownership.py) is the same arithmetic on every rank. Matrices that must be updated whole are dealt out
by the cost of their update; everything else is cut anywhere, so that each rank ends with an equal share of the state.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from paceline.base import ownership
from paceline.base.ownership import Slice
from paceline.optim import adamw, muon
from paceline.optim.optimizer import Piece
from paceline.sync.buckets import Bucket, Buckets, Named, backward_order, cut, first_not_finite
from paceline.sync.whole import full, whole_weights
from paceline.world.group import Group, Transfer

# What has arrived and is not yet added up takes memory; so many buckets hide a network that keeps up.
_MOST_UNDER_WAY = 4


class ShardedBucket(Bucket):
    """A bucket whose parameters live in one flat buffer, too, of which each rank owns a part: borders[r] ..
    borders[r+1]-1."""

    def __init__(self, members: Sequence[Named], borders: list[int], rank: int):
        super().__init__(members)
        self.borders = borders
        self.span = borders[rank], borders[rank + 1]
        self.values = torch.empty_like(self.flat)
        for parameter, offset in zip(self.parameters, self.offsets, strict=False):
            view = self.values[offset : offset + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        self.gathering: Transfer | None = None

    def pieces(self, must_be_whole: bool) -> list[Piece]:
        """Returns what this rank owns of it, each with its gradient, which stays where it is."""
        found = []
        for name, parameter, offset in zip(self.names, self.parameters, self.offsets, strict=False):
            start, stop = max(self.span[0], offset), min(self.span[1], offset + parameter.numel())
            if start < stop:
                shape = parameter.shape if must_be_whole else (stop - start,)
                mine = nn.Parameter(self.values[start:stop].view(shape))
                mine.grad = self.flat[start:stop].view(shape)
                found.append(Piece(name, parameter.shape, start - offset, stop - offset, mine))
        return found


class ShardedSync:
    """Communication a step: (n-1)/n times the gradients' bytes on the last micro-step, as much for the weights after
    the update: together what `ddp` moves."""

    shards_weights = False
    shards_state = True
    lockstep = False

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        bucket_bytes: int,
        whole_costs: Mapping[str, float],
        stages: Sequence[nn.Module] = (),
    ):
        """whole_costs: the parameters that are updated whole, and what that costs, in any unit.

        stages: modules whose own forward runs before any of their parameters is read, such as a model's blocks; each
        waits for its weights there. All other weights are waited for where the model's forward begins.
        """
        self._model, self._group = model, group
        self._whole = frozenset(whole_costs)
        members = backward_order(model)
        chunks = [
            *cut([member for member in members if member[0] in whole_costs], bucket_bytes),
            *cut([member for member in members if member[0] not in whole_costs], bucket_bytes),
        ]
        place = {name: index for index, (name, _) in enumerate(members)}
        chunks.sort(key=lambda chunk: max(place[name] for name, _ in chunk))  # in the order in which they fill
        owners, shares = _deal(members, whole_costs, group.size)
        self.buckets = [_bucket(chunk, owners, shares, group.rank) for chunk in chunks]
        self._buckets = Buckets(
            list(self.buckets),
            launch=lambda bucket: group.start_reduce_scatter(bucket.flat, bucket.borders),  # type: ignore[attr-defined]
            most_under_way=_MOST_UNDER_WAY,
        )
        self._hook(stages)

    def pieces(self) -> list[Piece]:
        return [piece for bucket in self.buckets for piece in bucket.pieces(bucket.names[0] in self._whole)]

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return self._buckets.accumulate(last)

    def reduce(self) -> list[torch.Tensor]:
        self._buckets.finish()
        return [bucket.flat[slice(*bucket.span)] for bucket in self.buckets]

    def total(self, amount: float) -> float:
        return float(sum(row[0] for row in self._group.share([amount])))

    def not_finite(self) -> tuple[str | None, bool | None]:
        return first_not_finite(self.buckets, [bucket.span for bucket in self.buckets])

    def publish(self) -> None:
        self._buckets.empty()
        for bucket in reversed(self.buckets):  # the forward order: the first weights are needed first
            bucket.gathering = self._group.start_all_gather(bucket.values, bucket.borders)

    def settle(self) -> None:
        self._wait_for(self.buckets)

    def weights(self) -> dict[Slice, torch.Tensor]:
        self.settle()
        return whole_weights(self._model)

    def full_weights(self) -> dict[str, torch.Tensor]:
        self.settle()
        return full(self._model)

    def _hook(self, stages: Sequence[nn.Module]) -> None:
        """Lets each stage wait for its own buckets, and the model for those of no stage."""
        stages_of: dict[nn.Parameter, list[nn.Module]] = {}  # several where they share a parameter
        for stage in stages:
            for parameter in stage.parameters():
                stages_of.setdefault(parameter, []).append(stage)
        needed: dict[nn.Module, list[ShardedBucket]] = {self._model: []}
        for bucket in self.buckets:
            waiting = [stage for parameter in bucket.parameters for stage in stages_of.get(parameter, [self._model])]
            for module in dict.fromkeys(waiting):
                needed.setdefault(module, []).append(bucket)
        for module, buckets in needed.items():
            hook = self._make_hook(buckets)
            if (
                getattr(module, "_compiled_call_impl", None) is not None
            ):  # nn.Module.compile: a wait is part of no graph
                hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(hook)

    def _make_hook(self, buckets: list[ShardedBucket]) -> Callable[..., None]:
        def before_forward(*_: object) -> None:
            self._wait_for(buckets)

        return before_forward

    def _wait_for(self, buckets: Sequence[ShardedBucket]) -> None:
        for bucket in reversed(buckets):
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None


def _deal(
    members: Sequence[Named], whole_costs: Mapping[str, float], num_ranks: int
) -> tuple[dict[str, int], list[float]]:
    """Returns the owner of each parameter that is updated whole, and which share of all others each rank gets, so
    that all ranks have as equal amounts of state as can be."""
    sizes = {name: parameter.numel() for name, parameter in members}
    owners = dict(zip(whole_costs, ownership.deal(list(whole_costs.values()), num_ranks), strict=True))
    loads = [0.0] * num_ranks
    for name, owner in owners.items():
        loads[owner] += len(muon.MOMENTS) * sizes[name]
    divisible = len(adamw.MOMENTS) * sum(size for name, size in sizes.items() if name not in owners)
    return owners, ownership.fill(loads, divisible)


def _bucket(chunk: list[Named], owners: Mapping[str, int], shares: Sequence[float], rank: int) -> ShardedBucket:
    if chunk[0][0] not in owners:
        num_elements = sum(parameter.numel() for _, parameter in chunk)
        return ShardedBucket(chunk, ownership.borders(num_elements, shares), rank)
    chunk = sorted(chunk, key=lambda member: owners[member[0]])  # stable: one run of elements for each owner
    borders = [0]
    for owner in range(len(shares)):
        borders.append(borders[-1] + sum(p.numel() for name, p in chunk if owners[name] == owner))
    return ShardedBucket(chunk, borders, rank)
