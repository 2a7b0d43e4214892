"""The order in which a pass reads a data set, and each rank's rows of a batch."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from paceline.base.seeds import key
from paceline.data.order import ids_at
from paceline.data.plan import BatchPlan, in_proportion
from paceline.record.balance import listed
from paceline.replica import generators
from paceline.replica.balance import Balancer
from paceline.replica.batch import Batch
from paceline.replica.result import StepTimes
from paceline.world.calls import mistake
from paceline.world.group import Group
from paceline.world.runtime import World

_AT_ONCE = 16  # micro-batches, since computing a permutation has a fixed cost a call
StepOfPass = tuple[int, int]  # number of the pass, and of the step in it
_BEGINNING: StepOfPass = (0, 0)
Drawn = dict[str, Any]  # random choices of one pass; JSON, the same on all ranks


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
        size = self.micro_batch_size or -(-num_rows // self._world_size)
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


class Order:
    """The sample ids of each batch in a pass."""

    def __init__(self, num_steps: int, batch_size: int | None, needs_check: bool = False, **facts: Any) -> None:
        """num_steps: in a pass; -1: not known. batch_size: None: batches differ in size. needs_check: ranks must
        compare what they draw. facts: see Source."""
        self.num_steps, self.batch_size, self.needs_check = num_steps, batch_size, needs_check
        self.facts = {**facts, "batch_size": batch_size}

    def draw(self, group: Group) -> Drawn:
        """Returns the random choices for a pass. Collective if there are any."""
        return {}

    def batches(self, number: int, first: int, drawn: Drawn) -> Iterator[Sequence[Any]]:
        """Yields the ids of each batch of pass `number` from step `first` on, or positions for `ids` to look up."""
        raise NotImplementedError

    def ids(self, number: int, runs: Iterator[Any]) -> Iterator[list[Any]]:
        """Yields the sample ids for each run of positions from `batches`."""
        return map(list, runs)


def most_read_ahead(loader: DataLoader[Any]) -> int:
    """Returns the most steps beyond the current one whose rows a rank may have chosen: its workers read ahead."""
    return _AT_ONCE + loader.num_workers * (loader.prefetch_factor or 0) + 1


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    batches: Any = loader.batch_sampler
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    is_plain = type(batches) is BatchSampler and batches.sampler is loader.sampler
    if is_plain and type(loader.sampler) is SequentialSampler and len(loader.sampler) == num_samples:
        return SeededOrder(num_samples, batches.batch_size, batches.drop_last, False, seed)
    if is_plain and type(loader.sampler) is RandomSampler:
        return TorchOrder(batches)
    return SamplerOrder(batches, num_samples, seed)


class SeededOrder(Order):
    """The samples in order, or permuted by (seed, epoch). A rank computes the ids of its own rows only."""

    def __init__(self, num_samples: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> None:
        self._num_samples, self._size, self._shuffle, self._seed = num_samples, batch_size, shuffle, seed
        self._starts = range(0, num_samples - (batch_size - 1 if drop_last else 0), batch_size)
        if not self._starts:
            why = "drop_last leaves none of them" if num_samples else "it is empty"
            raise mistake(f"the data set has {num_samples} samples for a batch_size of {batch_size}: {why}")
        super().__init__(
            len(self._starts),
            batch_size,
            source="a data set",
            num_samples=num_samples,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
        )

    def batches(self, number: int, first: int, drawn: Drawn) -> Iterator[range]:
        for start in self._starts[first:]:
            yield range(start, min(start + self._size, self._num_samples))

    def ids(self, number: int, runs: Iterator[Any]) -> Iterator[list[int]]:
        if not self._shuffle:
            yield from super().ids(number, runs)
            return
        while chunk := list(islice(runs, _AT_ONCE)):
            positions = np.concatenate(chunk) + number * self._num_samples
            ids = iter(ids_at(self._seed, positions, self._num_samples).tolist())
            yield from (list(islice(ids, len(run))) for run in chunk)


class TorchOrder(Order):
    """The order of torch's RandomSampler, drawn as by a plain DataLoader. Every rank computes the complete order."""

    def __init__(self, batches: Any) -> None:
        self._batches, self._sampler = batches, batches.sampler
        num_samples = len(batches.sampler.data_source)
        named = {"source": "a shuffled DataLoader", "num_samples": num_samples, "drop_last": batches.drop_last}
        super().__init__(length_hint(batches, -1), batches.batch_size, **named)

    def draw(self, group: Group) -> Drawn:
        """Rank 0's seed, as the sampler would draw it, or rank 0's state of the sampler's own generator."""
        if self._sampler.generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            return {"seed": group.share_integers([seed])[0][0]}
        return {"state": group.broadcast_json(generators.text_of(self._sampler.generator))}

    def batches(self, number: int, first: int, drawn: Drawn) -> Iterator[list[Any]]:
        given = self._sampler
        generator = ("state" in drawn and given.generator) or torch.Generator()
        if "state" in drawn:
            generator.set_state(generators.state_of(drawn["state"]))
        else:
            generator.manual_seed(drawn["seed"])
        sampler = RandomSampler(given.data_source, given.replacement, given.num_samples, generator)
        return islice(BatchSampler(sampler, self._batches.batch_size, self._batches.drop_last), first, None)


class SamplerOrder(Order):
    """The order of any other sampler. Every rank draws all of it, with the sampler's generator and torch's, numpy's and
    Python's global ones seeded by (seed, epoch)."""

    def __init__(self, batches: Any, num_samples: int, seed: int) -> None:
        self._batches, self._seed = batches, seed
        inner = getattr(batches, "sampler", None)
        name = kind(batches if inner is None or type(batches) is not BatchSampler else inner)
        named = {"source": f"a data set by {name}", "num_samples": num_samples, "seed": seed}
        super().__init__(length_hint(batches, -1), getattr(batches, "batch_size", None), needs_check=True, **named)

    def batches(self, number: int, first: int, drawn: Drawn) -> Iterator[list[Any]]:
        seed = key(self._seed, "sampler", number)
        sampler = self._batches
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(seed)
            sampler = getattr(sampler, "sampler", None)
        yield from map(list, generators.drawn_with(seed, lambda: islice(iter(self._batches), first, None)))


def kind(thing: Any) -> str:
    """Returns the name of its class; of a function, its own name."""
    return str(thing.__qualname__ if inspect.isroutine(thing) else type(thing).__qualname__)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
