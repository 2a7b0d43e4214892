"""A step's micro-batches on one rank: which rows of the batch they are, and drawing each when the step needs it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from paceline.data.plan import BatchPlan, in_proportion
from paceline.record.balance import listed
from paceline.replica.balance import Balancer
from paceline.replica.result import StepTimes
from paceline.sync.strategy import Strategy
from paceline.world.calls import mistake
from paceline.world.runtime import World

_NONE = object()


StepOfPass = tuple[int, int]  # number of the pass, and of the step in it
_BEGINNING: StepOfPass = (0, 0)


class Pass(NamedTuple):
    micro_batch: Any  # on the rank's device
    rows: range | None  # of the global batch; None: not known
    num_rows: int | None  # if `rows` is None a guess: the first dimension
    is_real: bool  # False: a dummy of weight 0, so that all ranks make equally many fsdp passes
    is_last: bool


class Batch:
    """This rank's micro-batches of one step. `len` is their number, which may be 0. Not iterable itself: `for x, y in
    batch` would take two micro-batches for one."""

    def __init__(
        self,
        micro_batches: Sequence[Any] | Callable[[], Iterable[Any]],
        *,
        rows: Sequence[range] | None = None,
        num_rows: int | None = None,
        count: int | None = None,
        passes: int | None = None,
        stand_in: Callable[[], Any] | None = None,
    ) -> None:
        """micro_batches: a list, or a function that starts drawing them (needs `rows` or `count`). rows: of the global
        batch, by micro-batch. num_rows: of the global batch. passes: the most micro-batches of any rank in this step;
        None: not known. stand_in: makes the dummy micro-batch (weight 0) of a rank that has fewer passes (fsdp); None:
        its last one is used again."""
        self.micro_batches: list[Any] | None = None
        if not callable(micro_batches):
            if count not in (None, len(micro_batches)):
                raise mistake(f"count is {count}, and there are {len(micro_batches)} micro-batches: leave count out")
            self.micro_batches = kept = list(micro_batches)
            if len(kept) > 1:
                _require_own_memory(kept)
            micro_batches, count = (lambda: kept), len(kept)
            stand_in = stand_in or ((lambda: kept[-1]) if kept else None)
        self.rows, self.num_rows, self.passes, self.stand_in = rows, num_rows, passes, stand_in
        self.observe: Callable[[Sequence[StepTimes]], None] | None = None
        """Takes the times of the step that used this batch, by rank; None: nothing depends on them."""
        self.dealt_by: Any = None
        """The share that this batch is of; None: the script's own."""
        self._draw = micro_batches
        if count is None and rows is None:
            raise mistake("a Batch of a function does not know how many micro-batches that draws: give rows= or count=")
        self._count = len(rows or ()) if count is None else count
        if rows is not None and len(rows) != self._count:
            raise mistake(f"rows has {len(rows)} ranges, and there are {self._count} micro-batches: give one for each")
        if passes is not None and passes < self._count:
            raise mistake(f"passes is {passes}, the most of any rank, and this rank has {self._count} micro-batches")
        self._drawn: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self._count

    def like(self, micro_batches: Sequence[Any]) -> "Batch":
        """Returns a batch of other micro-batches for the same rows, one for each pass over this batch, in order: for a
        second model, such as a discriminator that trains on generated samples."""
        others = list(micro_batches)
        if len(others) < len(self):
            raise mistake(f"{len(others)} micro-batches cannot stand for the {len(self)} of this batch")
        stand_in = (lambda: others[-1]) if others else None
        used = others[: len(self)]
        return Batch(used, rows=self.rows, num_rows=self.num_rows, passes=self.passes, stand_in=stand_in)

    def draw(self) -> Iterator[Any]:
        """Returns an iterator over the remaining micro-batches."""
        if self._drawn is None:
            self._drawn = iter(self._draw())
        return self._drawn

    def passes_of(self, sync: Strategy, world: World) -> Iterator[Pass]:
        """Yields this rank's micro-batches; with fsdp then dummies, until all ranks have made equally many passes.
        Collective then, unless `passes` is known."""
        is_lockstep = sync.shards_weights or (self.passes is not None and world.calls.has_lockstep)
        count = self._count_passes(world) if is_lockstep else len(self)
        drawn = self.draw()
        for index in range(count):
            is_real = index < len(self)
            micro_batch = next(drawn, _NONE) if is_real else self.stand_in() if self.stand_in else _NONE
            if micro_batch is _NONE:
                raise mistake(
                    "another step has already used this batch: for a second model keep the first one's inputs "
                    "or outputs in a list, and use replica.step(batch.like(that_list))"
                )
            size, rows = num_rows(micro_batch), None
            if self.rows is not None:
                rows = self.rows[index] if is_real else range(size or 0)
                size = len(rows)
            yield Pass(moved(micro_batch, world.device), rows, size, is_real, index == count - 1)

    def _count_passes(self, world: World) -> int:
        if self.passes is not None:
            return self.passes
        rows = world.group.share_integers([len(self), int(self.stand_in is not None)])
        most = max(count for count, _ in rows)
        if any(count < most and not has_stand_in for count, has_stand_in in rows):
            raise mistake(
                f"ranks have {[count for count, _ in rows]} micro-batches, and with strategy fsdp, whose "
                "forward communicates, each rank needs one at least: share the data by replica.steps(loader), or take "
                "strategy zero",
                reach="world",
            )
        return most

    def drain(self) -> None:
        """Draws the remaining micro-batches and drops them."""
        for _ in self.draw():
            pass

    def __iter__(self) -> NoReturn:
        raise mistake(
            "this is a step, not a micro-batch: write `for step in replica.steps(batches):` and in it "
            "`for x, y in step:`; to read samples without training write `for x, y in batches.flat():`, and to look "
            "at one micro-batch `batches.peek()`"
        )

    def __getitem__(self, index: object) -> NoReturn:
        self.__iter__()


class Split:
    """Divides the rows of a batch among ranks: equally, in proportion to shares, or by the ranks' speeds."""

    def __init__(
        self,
        world: World,
        micro_batch_size: int | None,
        batch_size: int | None,
        shares: Sequence[int] = (),
        read_ahead: int | None = None,
    ) -> None:
        """micro_batch_size: None: the rank's part of the batch is one. batch_size: None: batches differ in size.
        shares: by rank; empty: equal. read_ahead: the shares follow the ranks' speeds, and ranks may have read so many
        steps beyond the current one; None: the shares stay."""
        self._rank, self._world_size = world.rank, world.world_size
        self._given_size, self._read_ahead = micro_batch_size, read_ahead
        self._say = None if read_ahead is None else world.say  # workers get a copy of the others, and no world
        self.micro_batch_size = micro_batch_size or (batch_size and -(-batch_size // world.world_size))
        self._shares = [(_BEGINNING, tuple(shares))]  # with the first step of each
        self._balancer = None if read_ahead is None else Balancer(shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """The newest shares; empty: equal."""
        return self._shares[-1][1]

    def restore(self, shares: Sequence[int]) -> None:
        """Takes shares that a checkpoint has, if they follow the ranks' speeds and the world has the same size."""
        if self._balancer is not None and len(shares) == self._world_size and sum(shares) == sum(self.shares):
            self._shares, self._balancer = [(_BEGINNING, tuple(shares))], Balancer(shares)

    def __call__(self, num_rows: int, at: StepOfPass = _BEGINNING) -> list[range]:
        """Returns the rows of each of this rank's micro-batches in a batch of so many rows."""
        return self.plan(num_rows, at).micro_batches(self._rank) if num_rows else []

    def plan(self, num_rows: int, at: StepOfPass = _BEGINNING) -> BatchPlan:
        shares = next(shares for first, shares in reversed(self._shares) if first <= at)
        if shares:
            size = self._given_size or num_rows
            return BatchPlan(num_rows, size, self._world_size, in_proportion(num_rows, shares))
        size = self._given_size or -(-num_rows // self._world_size)
        return BatchPlan(num_rows, size, self._world_size)

    def batch(self, draw: Callable[[], Any], num_rows: int, at: StepOfPass, stand_in: Callable[[], Any]) -> Batch:
        if not num_rows:
            return Batch(draw, rows=[], num_rows=0, passes=0, stand_in=stand_in)
        plan = self.plan(num_rows, at)
        batch = Batch(
            draw, rows=plan.micro_batches(self._rank), num_rows=num_rows, passes=plan.passes, stand_in=stand_in
        )
        batch.observe = self.observer(at, plan)
        return batch

    def observer(self, at: StepOfPass, plan: BatchPlan) -> Callable[[Sequence[StepTimes]], None] | None:
        """Returns the function that takes the times of a step; None if the shares stay."""
        return None if self._balancer is None else partial(self._observe, at, plan)

    def _observe(self, at: StepOfPass, plan: BatchPlan, times: Sequence[StepTimes]) -> None:
        """Takes the ranks' times of a step, the same on all ranks, and perhaps changes the shares of later steps."""
        assert self._balancer is not None
        assert self._say is not None
        assert self._read_ahead is not None
        if change := self._balancer.observe(plan.num_sequences(), times):
            number, step = at
            self._shares.append(((number, step + 1 + self._read_ahead), change.shares))
            self._say(f"paceline: the ranks' shares of a batch are now {listed(change.shares)}: {change.why}")


def _require_own_memory(micro_batches: Sequence[Any]) -> None:
    """Raises UserError if two micro-batches are the same memory, as of a loader that fills one buffer again."""
    numbers: dict[tuple[int, ...], int] = {}
    for number, micro_batch in enumerate(micro_batches):
        dense = (each for each in tensors_in(micro_batch) if each.layout == torch.strided and not each.is_nested)
        addresses = tuple(tensor.data_ptr() for tensor in dense if tensor.numel())
        if any(addresses) and (earlier := numbers.setdefault(addresses, number)) != number:
            raise mistake(
                f"micro-batches {earlier} and {number} of a paceline.Batch are the same memory: a loader that fills "
                "one buffer again has written the second over the first. Put copies into the list: x.clone(), or "
                "torch.tensor(x) of a numpy array"
            )


def moved(micro_batch: Any, device: torch.device) -> Any:
    """Returns the micro-batch with its tensors on the device; tuples, lists and dicts keep their type."""
    kind = type(micro_batch)  # asked instead of the object, whose __getattr__ may look for a key
    if isinstance(micro_batch, torch.Tensor | PackedSequence) or (hasattr(kind, "keys") and hasattr(kind, "to")):
        return micro_batch.to(device, non_blocking=device.type == "cuda")  # elsewhere the copy may outlive its source
    if isinstance(micro_batch, tuple) and hasattr(micro_batch, "_fields"):
        return type(micro_batch)(*(moved(item, device) for item in micro_batch))
    if isinstance(micro_batch, list | tuple):
        return type(micro_batch)(moved(item, device) for item in micro_batch)
    if isinstance(micro_batch, dict):
        there = copy(micro_batch)
        there.update({name: moved(item, device) for name, item in micro_batch.items()})
        return there
    return micro_batch


def copied(micro_batch: Any) -> Any:
    """Returns a copy with tensors of its own. Of a view of a large tensor only the view is copied."""
    tensors = {id(tensor): tensor.detach().clone() for tensor in tensors_in(micro_batch)}
    return deepcopy(micro_batch, tensors)


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a micro-batch, including those in nested tuples, lists and mappings."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping | list | tuple):
        for item in thing.values() if isinstance(thing, Mapping) else thing:
            yield from tensors_in(item)


def is_samples(batch: Any) -> bool:
    """Whether this is a list of uncollated samples, each a tuple."""
    return isinstance(batch, list) and bool(batch) and all(type(item) is tuple for item in batch)


def num_rows(batch: Any) -> int | None:
    """Returns the first dimension of the first tensor, or the length of a list of uncollated samples; None if there is
    neither. A guess (a batch may be sequence-first), so no loss is weighted by it (see Step.backward)."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        if not batch.ndim:
            return None
        return batch.size(0) if isinstance(batch, torch.Tensor) else int(batch.shape[0])  # a nested one has no shape
    if isinstance(batch, str | bytes):
        return None
    if is_samples(batch):
        return len(batch)
    items: Iterable[Any] = batch if isinstance(batch, tuple | list) else ()
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        items = (batch[name] for name in batch.keys())  # noqa: SIM118 -- not only mappings have them
    rows = next((rows for rows in map(num_rows, items) if rows is not None), None)
    return len(batch) if rows is None and isinstance(batch, list) else rows
