"""Which samples of a step are this rank's: by arithmetic, or by what a sampler gives.

An order (Arithmetic or Sampled) gives a Step for each step of an epoch; a Feed hands their numbers to a DataLoader, as
its batch_sampler, and the steps to `share`, which must know how many micro-batches one consists of.
"""

import inspect
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler

from paceline.base.errors import UserError
from paceline.base.seeds import key
from paceline.data.order import ids_at
from paceline.data.plan import BatchPlan
from paceline.world.calls import Calls, place
from paceline.world.group import Group

_LOCATED_AT_ONCE = 4096  # samples: the permutation costs 100 us for 8 of them and 390 us for 4096


class Ranks(Protocol):
    """What is read of a World."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def group(self) -> Group: ...
    @property
    def calls(self) -> Calls: ...


class Deal:
    """Which places of a batch are this rank's."""

    def __init__(self, world: Ranks, micro_batch_size: int | None, batch_size: int | None) -> None:
        """batch_size: None where batches are of any size."""
        self._rank, self._world_size = world.rank, world.world_size
        self._size = micro_batch_size
        if micro_batch_size is None and batch_size is not None:
            self._size = -(-batch_size // world.world_size)

    def __call__(self, num_samples: int) -> list[range]:
        """Returns the places of this rank's micro-batches in a batch of num_samples."""
        if num_samples == 0:
            return []
        size = self._size or -(-num_samples // self._world_size)
        return BatchPlan(num_samples, size, self._world_size).micro_batches(self._rank)


@dataclass(frozen=True)
class Step:
    """What this rank is to read for a step."""

    micro_batches: list[list[Any]]  # the samples' numbers
    digest: int = 0  # of all numbers of the step, where ranks must compare them


class Arithmetic:
    """The numbers of an epoch in order, or permuted by (seed, epoch); this rank's are computed and no others."""

    must_agree = False

    def __init__(self, num_samples: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> None:
        self.num_samples, self.batch_size, self.shuffle, self.seed = num_samples, batch_size, shuffle, seed
        self.num_steps = num_samples // batch_size if drop_last else -(-num_samples // batch_size)
        if self.num_steps == 0:
            why = "drop_last leaves none of them" if num_samples else "it is empty"
            raise UserError(
                f"{place()}: the data set has {num_samples} samples for a batch_size of {batch_size}: {why}"
            )
        self.facts = {
            "source": "a data set",
            "num_samples": num_samples,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "seed": seed,
        }

    def steps(self, deal: Deal, epoch: int, first: int) -> Iterator[Step]:
        """Yields what this rank reads in each step from `first` on."""
        num_own = sum(map(len, deal(self.batch_size)))
        at_once = max(1, _LOCATED_AT_ONCE // max(1, num_own))
        for begin in range(first, self.num_steps, at_once):
            yield from self._located(deal, epoch, range(begin, min(begin + at_once, self.num_steps)))

    def _located(self, deal: Deal, epoch: int, steps: range) -> Iterator[Step]:
        begins = [step * self.batch_size for step in steps]
        shares = [deal(min(self.batch_size, self.num_samples - begin)) for begin in begins]
        runs = [
            np.arange(begin + places[0].start, begin + places[-1].stop, dtype=np.int64)  # a rank's are consecutive
            for begin, places in zip(begins, shares, strict=True)
            if places
        ]
        numbers = np.concatenate([np.empty(0, np.int64), *runs])
        if self.shuffle:
            numbers = ids_at(self.seed, numbers + epoch * self.num_samples, self.num_samples)
        left = iter(numbers.tolist())
        for places in shares:
            yield Step([list(islice(left, len(micro_batch))) for micro_batch in places])


class Sampled:
    """The numbers that a sampler of batches gives, which every rank draws all of.

    It is asked one batch at a time, in this process, with generators that are a function of (seed, epoch): its own and
    that of the sampler inside it are seeded, and torch's, numpy's and random's global ones are lent to it. 0.2 ms a
    step, and 0.1 more for each 1,000 samples in it (bench/share.py).
    """

    must_agree = True

    def __init__(self, batches: Any, num_samples: int, seed: int) -> None:
        self.batches, self.seed = batches, seed
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        inner = getattr(batches, "sampler", None)
        self.name = kind(batches if inner is None or type(batches) is not BatchSampler else inner)
        self.num_steps = _length(batches)
        self.facts = {
            "source": f"a data set by {self.name}",
            "num_samples": num_samples,
            "batch_size": self.batch_size,
            "seed": seed,
        }

    def steps(self, deal: Deal, epoch: int, first: int) -> Iterator[Step]:
        """Yields what this rank reads in each step from `first` on."""
        seed = key(self.seed, "sampler", epoch)
        sampler = self.batches
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(seed)
            sampler = getattr(sampler, "sampler", None)
        lent = _Lent(seed)
        with lent.out():
            batches = islice(iter(self.batches), first, None)
        while True:
            with lent.out():
                batch = next(batches, None)
            if batch is None:
                return
            numbers = list(batch)
            mine = [numbers[places.start : places.stop] for places in deal(len(numbers))]
            yield Step(mine, key("numbers", repr(numbers)))


def _length(batches: Any) -> int | None:
    """None where the sampler does not say it: a BatchSampler has a length only where what it asks has one."""
    try:
        return len(batches)
    except TypeError:
        return None


class _Lent:
    """States of the global generators for somebody who draws from them now and then, and disturbs nobody."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        numpy_state = np.random.RandomState(seed % 2**32).get_state()
        self._states = generator.get_state(), numpy_state, random.Random(seed).getstate()

    @contextmanager
    def out(self) -> Iterator[None]:
        """The global generators are these within, and afterwards what they were."""
        outside = self._now()
        self._set(self._states)
        try:
            yield
        finally:
            self._states = self._now()
            self._set(outside)

    @staticmethod
    def _now() -> tuple[Any, Any, Any]:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    @staticmethod
    def _set(states: tuple[Any, Any, Any]) -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class Feed:
    """What a DataLoader reads next, as its batch_sampler, and what each step consists of.

    A DataLoader with workers asks ahead; a rank that has nothing in a step is not asked at all. So whoever of the two
    comes first draws a step, and it is kept for the other.
    """

    def __init__(self) -> None:
        self._drawn: Iterator[Step] = iter(())
        self._steps: deque[Step] = deque()
        self._numbers: deque[list[Any]] = deque()

    def begin(self, steps: Iterator[Step]) -> None:
        """A pass over these; what was left of the one before is forgotten."""
        self._drawn = steps
        self._steps.clear()
        self._numbers.clear()

    def step(self) -> Step | None:
        """Returns the next step; None where the pass is over."""
        if not self._steps and not self._draw():
            return None
        return self._steps.popleft()

    def __iter__(self) -> Iterator[list[Any]]:
        while self._numbers or self._draw():
            if self._numbers:
                yield self._numbers.popleft()

    def _draw(self) -> bool:
        step = next(self._drawn, None)
        if step is None:
            return False
        self._steps.append(step)
        self._numbers.extend(step.micro_batches)
        return True


def kind(thing: Any) -> str:
    """Returns the name of its class, or a function's own."""
    return str(thing.__qualname__ if inspect.isroutine(thing) else type(thing).__qualname__)


def short(value: Any) -> str:
    """Returns its representation, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
