"""Sources of a rank's samples: a map-style data set, a stream, lanes, or a function that draws.

Random numbers while reading: torch seeds a DataLoader's workers, each rank's differently. Without workers, a single
process draws from the script's global generators, as with a plain DataLoader. Several ranks draw different numbers, so
that their augmentations differ, and the script's generators stay equal on all ranks.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, chain, count, islice, tee
from operator import length_hint
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.base.seeds import key
from paceline.replica import generators
from paceline.replica.batch import Batch, tensors_in
from paceline.replica.mistakes import digest_of
from paceline.replica.orders import Drawn, Order, Split, kind
from paceline.replica.workers import rank_loader
from paceline.world.calls import mistake
from paceline.world.runtime import World

_CPU = torch.device("cpu")
Collate = Callable[[list[Any]], Any]


class Source:
    """What `share` reads from on this rank."""

    is_endless = False
    compared = advice = ""  # what ranks compare at each step, and the advice if they differ

    def __init__(self, data: Any, world: World, split: Split, num_steps: int, **facts: Any) -> None:
        """num_steps: in a pass; -1: not known. facts: identify a position's source; JSON, the same on all ranks."""
        self.data, self.num_steps, self.facts = data, num_steps, facts
        self._world, self.split = world, split
        self._last: Any = None  # a drawn micro-batch, for `peek`

    def begin(self, number: int) -> Drawn:
        """Returns the random choices of pass `number`. Collective."""
        return {}

    def steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        """Yields this rank's part of each batch of pass `number` from step `first` on; equally many on all ranks."""
        raise NotImplementedError

    def peek(self) -> Any:
        """Returns a sample micro-batch without changing the position or a random generator."""
        if self._last is not None:
            return self._last
        with generators.aside(_CPU):
            return self._example()

    def _example(self) -> Any:
        raise NotImplementedError

    def _own_random_numbers(self, *parts: int | str) -> AbstractContextManager[None]:
        """Draws inside depend on this rank and the parts alone; a single process uses the script's generators."""
        return contextlib.nullcontext() if self._world.world_size == 1 else generators.seeded(key(*parts))

    def _share_integers(self, *mine: int) -> list[list[int]]:
        self._world.calls.record("share")
        return self._world.group.share_integers(list(mine))

    def _require_same(self, step: int, digest: int | None) -> None:
        """Raises UserError on all ranks if one drew something else, or its pass ended (None). Collective."""
        rows = self._share_integers(int(digest is not None), digest or 0)
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is not None:
            (here, _), (there, _) = rows[0], rows[other]
            does = "ends" if not there else f"gives other {self.compared}" if here else "continues"
            raise mistake(
                f"{self.facts['source']} {does} on rank {other} at step {step} of the epoch, unlike rank 0: "
                f"{self.advice}",
                reach="world",
            )


class DatasetSource(Source):
    """A map-style data set, read by a DataLoader for this rank's rows only."""

    compared = "numbers"
    advice = (
        "the sampler must do the same on all ranks. Have it draw from its generator or from torch's, numpy's or "
        "random's global one, and from nothing that differs by rank"
    )

    def __init__(
        self, order: Order, world: World, split: Split, seed: int, loader: DataLoader[Any], draws_worker_seed: bool
    ) -> None:
        """loader: copied to read. draws_worker_seed: a pass draws a seed for workers, as the script's DataLoader
        does."""
        super().__init__(loader.dataset, world, split, order.num_steps, **order.facts)
        self._order, self._seed, self._given, self._draws_worker_seed = order, seed, loader, draws_worker_seed
        self._own_ids = _OwnIds()
        self._loader = rank_loader(loader, world, batch_sampler=self._own_ids, collate_fn=loader.collate_fn)
        self._generator = self._loader.generator = torch.Generator()
        self._before_worker_seed: torch.Tensor | None = None  # the state from which a plain DataLoader draws it

    def begin(self, number: int) -> Drawn:
        drawn: Drawn = {}
        self._before_worker_seed = None
        if self._draws_worker_seed and (number == 0 or not self._given.persistent_workers):
            self._before_worker_seed = (self._given.generator or torch.default_generator).get_state()
            drawn["base"] = _draw_worker_seed(self._given, self._world)
        else:
            self._world.group.barrier()
        return drawn | self._order.draw(self._world.group)

    def steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        # Workers read ahead, and a rank without rows in a step reads nothing, so the two iterators advance separately.
        batches, ahead = tee(self._order.batches(number, first, drawn))
        own = (
            batch[rows.start : rows.stop]
            for step, batch in enumerate(ahead, first)
            for rows in self.split(len(batch), (number, step))
        )
        self._own_ids.of_pass = self._order.ids(number, own)
        seeds = self._seed, "reading", drawn.get("base", 0), number
        if self._before_worker_seed is not None and self._world.rank == 0 and first == 0:
            self._generator.set_state(self._before_worker_seed)  # workers draw as in a plain DataLoader
        else:
            self._generator.manual_seed(key(*seeds, first, self._world.rank))
        read: Iterator[Any] | None = None
        for step in count(first):
            batch = next(batches, None)
            if self._order.needs_check:
                self._require_same(step, None if batch is None else key("numbers", repr(batch)))
            if batch is None:
                return
            num_rows = len(batch)
            own_rows = self.split(num_rows, (number, step))
            if read is None and own_rows:
                read = iter(self._loader)
            with self._own_random_numbers(*seeds, step):  # also on a rank that reads nothing: see generators.seeded
                pass
            draw = partial(self._read, read, own_rows, [*seeds, step])
            yield self.split.batch(draw, num_rows, (number, step), stand_in=partial(self.peek, num_rows))

    def _read(self, read: Iterator[Any] | None, own_rows: list[range], seeds: list[int | str]) -> Iterator[Any]:
        for rows in own_rows:
            assert read is not None
            with self._own_random_numbers(*seeds, rows.start):
                micro_batch = next(read)
            yield micro_batch

    def _own_random_numbers(self, *parts: int | str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._loader.num_workers else super()._own_random_numbers(*parts)

    def peek(self, most: int | None = None) -> Any:
        size = min(self.split.micro_batch_size or 1, len(self.data), most or len(self.data))
        with generators.aside(_CPU):
            return self._loader.collate_fn([self.data[index] for index in range(size)])


class _OwnIds:
    """The batch_sampler of this rank's DataLoader."""

    def __init__(self) -> None:
        self.of_pass: Iterator[list[Any]] = iter(())  # ids of each of this rank's micro-batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self.of_pass


class StreamSource(Source):
    """A torch IterableDataset. Every rank reads all of it and collates its own rows only."""

    compared = "samples"
    advice = (
        "the stream must be the same on all ranks, since each keeps its own rows of every batch: take away what makes "
        "it differ by rank (a split by rank, such as split_dataset_by_node; a seed by rank), or give share a function "
        "(lane, num_lanes) -> iterator of samples"
    )

    def __init__(self, loader: DataLoader[Any], world: World, split: Split) -> None:
        facts = {
            "source": f"the stream {kind(loader.dataset)}",
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "num_workers": loader.num_workers,  # workers take turns, so their number decides the order
        }
        super().__init__(loader.dataset, world, split, length_hint(loader, -1), **facts)
        own_rows = _OwnRows(loader.collate_fn, split)
        self._given = loader
        self._loader = rank_loader(
            loader, batch_size=loader.batch_size, drop_last=loader.drop_last, collate_fn=own_rows
        )
        self._generator = self._loader.generator = torch.Generator()

    def begin(self, number: int) -> Drawn:
        """Returns rank 0's generator state, so that the workers of all ranks read the same samples."""
        text = generators.text_of(self._given.generator or torch.default_generator)
        _draw_worker_seed(self._given, self._world)
        return {"state": self._world.group.broadcast_json(text)}

    def steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        self._generator.set_state(generators.state_of(drawn["state"]))
        found = generators.drawn_with(key("stream", drawn["state"], number), lambda: iter(self._loader))
        for _ in islice(found, first):  # a stream cannot seek, so it is read again
            pass
        for step in count(first):
            num_rows, digest, micro_batches = next(found, (0, None, []))
            self._require_same(step, digest)
            if digest is None:
                return
            self._last = micro_batches[0] if micro_batches else self._last
            yield self.split.batch(partial(list, micro_batches), num_rows, (number, step), stand_in=self.peek)

    def _example(self) -> Any:
        return self._given.collate_fn(list(islice(iter(self.data), self.split.micro_batch_size or 1)))


class _OwnRows:
    """A collate_fn that collates this rank's rows only; called in workers if there are any."""

    def __init__(self, collate_fn: Collate, split: Split) -> None:
        self._collate_fn, self.split = collate_fn, split

    def __call__(self, samples: list[Any]) -> tuple[int, int, list[Any]]:
        """Returns the batch's rows, a digest of their number and the first sample, and this rank's micro-batches."""
        mine = [self._collate_fn(samples[rows.start : rows.stop]) for rows in self.split(len(samples))]
        first = json.dumps(samples[0], default=digest_of, skipkeys=True)
        return len(samples), key(len(samples), first), mine


class FunctionSource(Source):
    """A function that draws one random micro-batch a call. Every rank calls it for all micro-batches of a step, so that
    all draw the same numbers, and keeps its own.

    As in a loop that fetches one micro-batch ahead (nanoGPT's), the first of a step is drawn before the script gets the
    step, the others during it. So draws of the script, as for an evaluation, come in between.
    """

    is_endless = True

    def __init__(self, function: Callable[[], Any], world: World, split: Split, num_micro_batches: int) -> None:
        facts = {"source": "a function", "micro_batches": num_micro_batches}
        super().__init__(function, world, split, -1, **facts)
        self._count = num_micro_batches

    def steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        for step in count(first):
            plan = self.split.plan(self._count, (number, step))
            mine = plan.micro_batches(self._world.rank)
            self._equalise_generators()  # dropout may have drawn more on some ranks
            self._last = self.data()
            draw = partial(self._draw, self._last, mine)
            batch = Batch(draw, count=len(mine), passes=plan.passes, stand_in=self.peek)
            batch.observe = self.split.observer((number, step), plan)
            yield batch

    def _equalise_generators(self) -> None:
        """Copies rank 0's global generators to all ranks. Collective."""
        self._world.calls.record("share")
        generators.agree(self._world.group, _CPU)

    def _draw(self, first: Any, mine: list[range]) -> Iterator[Any]:
        """Yields this rank's micro-batches of a step. All are drawn now, while the ranks' generators are equal; a
        single process draws each when needed, with dropout in between, as in a plain loop. Collective."""
        drawn = chain([first], (self.data() for _ in range(self._count - 1)))
        if self._world.world_size == 1:
            return drawn
        self._equalise_generators()
        found = [(micro_batch, _versions(micro_batch)) for micro_batch in drawn]
        if any(_versions(micro_batch) != versions for micro_batch, versions in found):
            raise mistake(
                f"{kind(self.data)} writes each micro-batch over the one before, and all of a step's are "
                "drawn before the first is used: have it return copies (x.clone(), y.clone())"
            )
        self._last = found[-1][0]
        return iter([found[rows.start][0] for rows in mine])

    def _example(self) -> Any:
        return self.data()


def _versions(micro_batch: Any) -> list[int]:
    """Returns counters that grow when a tensor of the micro-batch is written to."""
    return [tensor._version for tensor in tensors_in(micro_batch) if not tensor.is_inference()]


class LaneSource(Source):
    """An iterator of samples (lane) for each row of the batch; this rank runs the lanes of its rows."""

    def __init__(
        self, function: Callable[..., Iterator[Any]], world: World, split: Split, collate: Collate, **facts: Any
    ) -> None:
        """facts: batch_size, drop_last and seed."""
        super().__init__(function, world, split, -1, source="lanes", **facts)
        self._collate = collate
        self._samples: list[Any] = []  # of the last micro-batch

    def steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        size, rank = self.facts["batch_size"], self._world.rank
        lanes_of = [[self._open(lane, number, first) for lane in rows] for rows in self.split(size)]
        for step in count(first):
            with self._own_random_numbers(self.facts["seed"], "lanes", number, step, rank):
                found = [[sample for lane in lanes for sample in islice(lane, 1)] for lanes in lanes_of]
            found = [samples for samples in found if samples]
            counts = self._share_integers(sum(map(len, found)), len(found))
            num_rows = sum(rows for rows, _ in counts)
            if num_rows == 0 or (self.facts["drop_last"] and num_rows < size):
                return
            self._samples = found[0] if found else self._samples
            ends = list(accumulate(map(len, found), initial=sum(rows for rows, _ in counts[:rank])))
            yield Batch(
                partial(map, self._collate, found),
                rows=list(map(range, ends, ends[1:])),
                num_rows=num_rows,
                passes=max(passes for _, passes in counts),
                stand_in=self.peek,
            )

    def _example(self) -> Any:
        return self._collate(self._samples or list(islice(self._open(0, 0, 0), 1)))

    def _open(self, lane: int, epoch: int, first: int) -> Iterator[Any]:
        """Opens the lane at step `first`: earlier samples are drawn and skipped."""
        size = self.facts["batch_size"]
        known = inspect.signature(self.data).parameters
        wanted = {"epoch": epoch, "seed": self.facts["seed"]}
        samples = self.data(lane, size, **{name: wanted[name] for name in wanted if name in known})
        if not isinstance(samples, Iterable):
            raise mistake(
                f"{kind(self.data)}({lane}, {size}) gave a {kind(samples)}; a function that is shared "
                "returns an iterator over the samples of its lane"
            )
        return islice(iter(samples), first, None)


def _draw_worker_seed(loader: DataLoader[Any], world: World) -> int:
    """Returns the worker seed that rank 0's DataLoader draws. Collective."""
    base = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return world.group.share_integers([int(base.item())])[0][0]
