"""This rank's micro-batches drawn: from a data set by numbers, or from generators of its own."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.base.errors import UserError
from paceline.base.seeds import key
from paceline.script.dealing import Arithmetic, Deal, Feed, Ranks, Sampled, Step, kind
from paceline.script.workers import Telling, Told
from paceline.world.calls import place

Collate = Callable[[list[Any]], Any]
Lane = Callable[..., Iterator[Any]]


class Source(Protocol):
    """Where a rank's samples come from."""

    facts: dict[str, Any]  # what a position is a position in; JSON, the same on all ranks
    num_steps: int | None  # in a pass
    data: Any  # what is read or run, and
    init: Callable[[int], Any] | None  # the script's worker_init_fn: one of them is to blame for generators alike

    def steps(self, epoch: int, first: int) -> Iterator[list[Any]]:
        """Yields this rank's micro-batches of each step of the epoch from `first` on; equally often on all ranks."""
        ...

    def told(self) -> Told | None:
        """Returns what this rank's workers tell of their generators, once they gave a micro-batch; None: there are no
        workers, this process draws."""
        ...


class Indexed:
    """A map-style data set, read by a DataLoader whose batch_sampler is the feed."""

    def __init__(
        self,
        order: Arithmetic | Sampled,
        deal: Deal,
        world: Ranks,
        seed: int,
        feed: Feed,
        loader: DataLoader[Any],
        telling: Telling | None = None,
    ) -> None:
        """telling: where the loader has workers."""
        self.facts: dict[str, Any] = order.facts
        self.num_steps, self.data = order.num_steps, loader.dataset
        self.init = telling.script_init if telling else None
        self._order, self._deal, self._world, self._seed = order, deal, world, seed
        self._feed, self._loader, self._telling = feed, loader, telling
        self._generator = loader.generator = torch.Generator()
        self._has_workers = False  # begun: a rank without a sample has none

    def steps(self, epoch: int, first: int) -> Iterator[list[Any]]:
        self._feed.begin(self._order.steps(self._deal, epoch, first))
        self._generator.manual_seed(key(self._seed, "workers", epoch, first, self._world.rank))
        batches: Iterator[Any] | None = None
        number = first
        while (step := self._agreed(number)) is not None:
            if step.micro_batches and batches is None:  # it draws its workers' seeds
                batches, self._has_workers = iter(self._loader), self._loader.num_workers > 0
            yield [] if batches is None else list(islice(batches, len(step.micro_batches)))
            number += 1

    def _agreed(self, number: int) -> Step | None:
        """The next step. Raises UserError on all ranks where a sampler gave other numbers on one."""
        step = self._feed.step()
        if not self._order.must_agree:
            return step
        self._world.calls.note("share")
        mine = [int(step is not None), step.digest if step else 0]
        rows = self._world.group.share_integers(mine)
        odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if odd:
            what = "ends" if rows[odd[0]][0] == 0 else "goes on" if rows[0][0] == 0 else "gives other numbers"
            raise UserError(
                f"{place()}: {self._order.facts['source']} {what} on rank {odd[0]} at step {number} of the epoch where "
                "rank 0 does not agree: the sampler must do the same on all ranks. Have it draw from its generator or "
                "from torch's, numpy's or random's global one, and from nothing that differs by rank",
                reach="world",
            )
        return step

    def told(self) -> Told | None:
        if self._telling is None:
            return None
        return Told(self._telling.generators.names, True, self._telling.rows() if self._has_workers else [])


class Lanes:
    """A generator for each place in the batch; this rank runs those of its places."""

    def __init__(
        self,
        function: Lane,
        world: Ranks,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
        drop_last: bool,
        collate: Collate,
    ) -> None:
        self.num_steps: int | None = None
        self.data = function
        self.init: Callable[[int], Any] | None = None
        self._function, self._world, self._seed = function, world, seed
        self._batch_size, self._drop_last, self._collate = batch_size, drop_last, collate
        self._places = Deal(world, micro_batch_size, batch_size)(batch_size)
        self.facts: dict[str, Any] = {
            "source": "lanes",
            "batch_size": batch_size,
            "drop_last": drop_last,
            "seed": seed,
        }

    def steps(self, epoch: int, first: int) -> Iterator[list[Any]]:
        micro_batches = [[self._open(lane, epoch, first) for lane in places] for places in self._places]
        while True:
            drawn = [[sample for lane in lanes for sample in islice(lane, 1)] for lanes in micro_batches]
            self._world.calls.note("share")
            rows = self._world.group.share_integers([sum(map(len, drawn))])
            num_samples = sum(row[0] for row in rows)
            if num_samples == 0 or (self._drop_last and num_samples < self._batch_size):
                return
            yield [self._collate(samples) for samples in drawn if samples]

    def _open(self, lane: int, epoch: int, first: int) -> Iterator[Any]:
        """The lane from step `first` on: what comes before is drawn and passed over."""
        known = inspect.signature(self._function).parameters
        wanted = {name: value for name, value in (("epoch", epoch), ("seed", self._seed)) if name in known}
        samples = self._function(lane, self._batch_size, **wanted)
        if not isinstance(samples, Iterable):
            raise UserError(
                f"{place()}: {kind(self._function)}({lane}, {self._batch_size}) gave a {kind(samples)}; a function "
                "that is shared gives an iterator over the samples of its lane"
            )
        return islice(iter(samples), first, None)

    def told(self) -> Told | None:
        return None
