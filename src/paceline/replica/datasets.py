"""torch's data sets and DataLoaders as sources: the order in which a pass reads them, and this rank's rows."""

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count, islice, tee
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from paceline.base.seeds import key
from paceline.data.order import ids_at
from paceline.replica import generators
from paceline.replica.batch import Batch, Split
from paceline.replica.mistakes import digest_of
from paceline.replica.sources import Collate, Drawn, Share, kind
from paceline.world.calls import mistake
from paceline.world.group import Group
from paceline.world.runtime import World

_STOP_SIGNALS = ("SIGINT", "SIGHUP", "SIGUSR1")
_AT_ONCE = 16  # micro-batches, since computing a permutation has a fixed cost a call


# ---- orders ----


class Order:
    """The sample ids of each batch in a pass."""

    def __init__(self, num_steps: int, batch_size: int | None, needs_check: bool = False, **facts: Any) -> None:
        """num_steps: in a pass; -1: not known. batch_size: None: batches differ in size. needs_check: ranks must
        compare what they draw. facts: see Share."""
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


# ---- reading ----


class DatasetShare(Share):
    """A map-style data set, read by a DataLoader for this rank's rows only."""

    _compared = "numbers"
    _advice = (
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
        self._loader = _rank_loader(loader, world, batch_sampler=self._own_ids, collate_fn=loader.collate_fn)
        self._generator = self._loader.generator = torch.Generator()
        self._before_worker_seed: torch.Tensor | None = None  # the state from which a plain DataLoader draws it

    def _begin(self, number: int) -> Drawn:
        drawn: Drawn = {}
        self._before_worker_seed = None
        if self._draws_worker_seed and (number == 0 or not self._given.persistent_workers):
            self._before_worker_seed = (self._given.generator or torch.default_generator).get_state()
            drawn["base"] = _draw_worker_seed(self._given, self._world)
        else:
            self._world.group.barrier()
        return drawn | self._order.draw(self._world.group)

    def _steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        # Workers read ahead, and a rank without rows in a step reads nothing, so the two iterators advance separately.
        batches, ahead = tee(self._order.batches(number, first, drawn))
        own = (
            batch[rows.start : rows.stop]
            for step, batch in enumerate(ahead, first)
            for rows in self._split(len(batch), (number, step))
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
            own_rows = self._split(num_rows, (number, step))
            if read is None and own_rows:
                read = iter(self._loader)
            with self._own_random_numbers(*seeds, step):  # also on a rank that reads nothing: see generators.seeded
                pass
            draw = partial(self._read, read, own_rows, [*seeds, step])
            yield self._split.batch(draw, num_rows, (number, step), stand_in=partial(self.peek, num_rows))

    def _read(self, read: Iterator[Any] | None, own_rows: list[range], seeds: list[int | str]) -> Iterator[Any]:
        for rows in own_rows:
            assert read is not None
            with self._own_random_numbers(*seeds, rows.start):
                micro_batch = next(read)
            yield micro_batch

    def _own_random_numbers(self, *parts: int | str) -> AbstractContextManager[None]:
        """Draws inside depend on this rank and the parts alone; a single process uses the script's generators."""
        is_outside = self._loader.num_workers or self._world.world_size == 1
        return contextlib.nullcontext() if is_outside else generators.seeded(key(*parts))

    def peek(self, most: int | None = None) -> Any:
        size = min(self._split.micro_batch_size or 1, len(self.dataset), most or len(self.dataset))
        with generators.aside(generators.CPU):
            return self._loader.collate_fn([self.dataset[index] for index in range(size)])


class _OwnIds:
    """The batch_sampler of this rank's DataLoader."""

    def __init__(self) -> None:
        self.of_pass: Iterator[list[Any]] = iter(())  # ids of each of this rank's micro-batches

    def __iter__(self) -> Iterator[list[Any]]:
        return self.of_pass


class StreamShare(Share):
    """A torch IterableDataset. Every rank reads all of it and collates its own rows only."""

    _compared = "samples"
    _advice = (
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
        self._loader = _rank_loader(
            loader, batch_size=loader.batch_size, drop_last=loader.drop_last, collate_fn=own_rows
        )
        self._generator = self._loader.generator = torch.Generator()

    def _begin(self, number: int) -> Drawn:
        """Returns rank 0's generator state, so that the workers of all ranks read the same samples."""
        text = generators.text_of(self._given.generator or torch.default_generator)
        _draw_worker_seed(self._given, self._world)
        return {"state": self._world.group.broadcast_json(text)}

    def _steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
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
            yield self._split.batch(partial(list, micro_batches), num_rows, (number, step), stand_in=self.peek)

    def _example(self) -> Any:
        return self._given.collate_fn(list(islice(iter(self.dataset), self._split.micro_batch_size or 1)))


class _OwnRows:
    """A collate_fn that collates this rank's rows only; called in workers if there are any."""

    def __init__(self, collate_fn: Collate, split: Split) -> None:
        self._collate_fn, self._split = collate_fn, split

    def __call__(self, samples: list[Any]) -> tuple[int, int, list[Any]]:
        """Returns the batch's rows, a digest of their number and the first sample, and this rank's micro-batches."""
        mine = [self._collate_fn(samples[rows.start : rows.stop]) for rows in self._split(len(samples))]
        first = json.dumps(samples[0], default=digest_of, skipkeys=True)
        return len(samples), key(len(samples), first), mine


# ---- a DataLoader of the script ----


def _rank_loader(loader: DataLoader[Any], world: World | None = None, **reads: Any) -> DataLoader[Any]:
    """Returns a DataLoader like the given one that reads and collates differently.

    The script's worker_init_fn gets the worker's number among those of all ranks. world: None: all ranks' workers do
    the same, so they are numbered from 0 on each.
    """
    if loader.num_workers:
        first = world.rank * loader.num_workers if world else 0
        reads |= {
            "worker_init_fn": _WorkerInit(loader.worker_init_fn, first),
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    if loader.pin_memory_device:
        reads["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(loader.dataset, num_workers=loader.num_workers, pin_memory=loader.pin_memory, **reads)


class _WorkerInit:
    """A worker_init_fn; a class, so that it can be pickled for spawned workers."""

    def __init__(self, script_init: Any, first: int) -> None:
        self._script_init, self._first = script_init, first

    def __call__(self, worker: int) -> None:
        """Makes the worker ignore stop signals, which a terminal sends to all processes: its rank needs it to finish
        the step. SIGTERM still ends it, as torch needs."""
        for name in _STOP_SIGNALS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        if self._script_init is not None:
            self._script_init(self._first + worker)


def _draw_worker_seed(loader: DataLoader[Any], world: World) -> int:
    """Returns the worker seed that rank 0's DataLoader draws. Collective."""
    base = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return world.group.share_integers([int(base.item())])[0][0]
