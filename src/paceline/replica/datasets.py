"""torch's data sets and DataLoaders as sources: the order in which a pass reads them, and this rank's rows."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, count, islice, tee
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from paceline.base.seeds import key
from paceline.base.units import listed
from paceline.data.order import ids_at
from paceline.replica import generators
from paceline.replica.batch import Batch, Split
from paceline.replica.mistakes import warn
from paceline.replica.sources import Collate, Drawn, Share, kind, sample_digest
from paceline.replica.stopping import outlive_signals, signals_wait
from paceline.world.calls import mistake
from paceline.world.group import Group
from paceline.world.runtime import World

_AT_ONCE = 16  # micro-batches, since computing a permutation has a fixed cost a call


# ---- orders ----


def most_read_ahead(loader: DataLoader[Any]) -> int:
    """Returns the most steps beyond the current one whose rows a rank may have chosen: its workers read ahead."""
    return _AT_ONCE + loader.num_workers * (loader.prefetch_factor or 0) + 1


class LoaderOrder:
    """The order of a DataLoader: what its samplers draw, as in one process.

    All ranks draw it under rank 0's global generators at the beginning of the pass. These are kept in the position, so
    that a resume draws the same order again."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches: Any = loader.batch_sampler
        self._batches = batches
        self.samplers = list(samplers_of(batches))
        named = batches.sampler if type(batches) is BatchSampler else batches
        self.needs_check = type(named) not in (SequentialSampler, RandomSampler)
        """Whether ranks must compare what they draw."""
        self.num_steps = length_hint(batches, -1)
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.facts = {
            "source": f"a DataLoader by {kind(named)}",
            "num_samples": len(loader.dataset),  # type: ignore[arg-type]
            "drop_last": bool(getattr(batches, "drop_last", False)),
            "batch_size": self.batch_size,
        }

    def begin(self, group: Group) -> Drawn:
        """Returns the generators of rank 0, from which a pass draws. Collective."""
        text = generators.to_text(generators.states(generators.CPU))
        return {"generators": group.broadcast_json(text)}

    def batches(self, number: int, first: int, drawn: Drawn) -> Iterator[list[Any]]:
        """Yields the sample ids of each batch of pass `number` from step `first` on."""
        for sampler in self.samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number)
        here, begun = generators.states(generators.CPU), generators.from_text(drawn["generators"])
        generators.put_back(begun, generators.CPU)
        batches = iter(self._batches)
        head = list(islice(batches, 1))  # here torch's samplers draw
        end = generators.states(generators.CPU)
        # The script's generators move on as with the plain loader; a checkpoint has restored those of a pass under way.
        generators.put_back(here if first else generators.advanced(here, begun, end), generators.CPU)
        rest = generators.drawn_from(end, batches) if self.needs_check else batches
        yield from islice(map(list, chain(head, rest)), first, None)

    def ids(self, number: int, runs: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Yields the sample ids for each run of a batch."""
        return runs


def samplers_of(sampler: Any) -> Iterator[Any]:
    """Yields a batch sampler, and those that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


class SeededOrder:
    """The order of a data set without a DataLoader: its samples in order, or permuted by (seed, epoch). No list of them
    is made: a rank computes the ids of its own rows."""

    needs_check = False
    samplers: Sequence[Any] = ()

    def __init__(self, num_samples: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> None:
        self._num_samples, self.batch_size, self._shuffle, self._seed = num_samples, batch_size, shuffle, seed
        self._starts = range(0, num_samples - (batch_size - 1 if drop_last else 0), batch_size)
        if not self._starts:
            why = "drop_last leaves none of them" if num_samples else "it is empty"
            raise mistake(f"the data set has {num_samples} samples for a batch_size of {batch_size}: {why}")
        self.num_steps = len(self._starts)
        self.facts = {
            "source": "a data set",
            "num_samples": num_samples,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "seed": seed,
            "batch_size": batch_size,
        }

    def begin(self, group: Group) -> Drawn:
        return {}

    def batches(self, number: int, first: int, drawn: Drawn) -> Iterator[range]:
        """Yields the positions of each batch in the permutation."""
        for start in self._starts[first:]:
            yield range(start, min(start + self.batch_size, self._num_samples))

    def ids(self, number: int, runs: Iterator[range]) -> Iterator[list[int]]:
        while chunk := list(islice(runs, _AT_ONCE)):
            positions = np.concatenate(chunk)
            if self._shuffle:
                positions = ids_at(self._seed, positions + number * self._num_samples, self._num_samples)
            ids = iter(positions.tolist())
            yield from (list(islice(ids, len(run))) for run in chunk)


# ---- reading ----


class DatasetShare(Share):
    """A map-style data set, read by a DataLoader for this rank's rows only."""

    _compared = "numbers"
    _advice = (
        "the sampler must do the same on all ranks. Have it draw from its generator or from torch's, numpy's or "
        "random's global one, and from nothing that differs by rank"
    )
    _remedy = "have it draw from a torch.Generator or the global generators, and give it set_epoch(epoch) if it counts"

    def __init__(
        self, order: LoaderOrder | SeededOrder, world: World, split: Split, seed: int, loader: DataLoader[Any]
    ) -> None:
        """loader: copied to read."""
        super().__init__(loader.dataset, world, split, order.num_steps, (loader, *order.samplers), **order.facts)
        self._order: Any = order
        self._seed, self._script_loader = seed, loader
        self._of_data = generators.ScriptState(loader.dataset, getattr(loader.dataset, "dataset", None))
        self._own_ids = _OwnIds()
        self._loader = _rank_loader(loader, world, batch_sampler=self._own_ids, collate_fn=loader.collate_fn)
        self._generator = self._loader.generator = torch.Generator()
        self._before_worker_seed: torch.Tensor | None = None  # the state from which a plain DataLoader draws it

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"not_kept": self._of_data.changed()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if names := state.get("not_kept"):
            warn(
                f"{kind(self.dataset)} changes {listed(names)} while it is read, which a checkpoint does not keep, so "
                "what depends on it differs after this resume. Draw from the global generators of torch, numpy or "
                "random, or compute the sample from its number",
                self._world,
            )

    def _begin(self, number: int) -> Drawn:
        drawn: Drawn = {}
        self._before_worker_seed = None
        # A plain DataLoader draws a seed for its workers; persistent ones get it once.
        if isinstance(self._order, LoaderOrder) and (number == 0 or not self._script_loader.persistent_workers):
            self._before_worker_seed = (self._script_loader.generator or torch.default_generator).get_state()
            drawn["base"] = self._world.group.share_integers([_draw_worker_seed(self._script_loader)])[0][0]
        drawn.update(self._order.begin(self._world.group))
        return drawn

    def _steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        is_checked = bool(first) and self._order.needs_check
        ordered = self._order.batches(number, first - is_checked, drawn)
        if is_checked:  # the step before shows whether the samplers draw what they drew then
            self._compare(first - 1, next(ordered, None))
        # Workers read ahead, and a rank without rows in a step reads nothing, so the two iterators advance separately.
        batches, ahead = tee(ordered)
        rows_here = (
            batch[rows.start : rows.stop]
            for step, batch in enumerate(ahead, first)
            for rows in self._split(len(batch), (number, step))
        )
        self._own_ids.of_pass = self._order.ids(number, rows_here)
        seeds = self._seed, "reading", drawn.get("base", 0), number
        if self._before_worker_seed is not None and self._world.rank == 0 and first == 0:
            self._generator.set_state(self._before_worker_seed)  # workers draw as in a plain DataLoader
        else:
            self._generator.manual_seed(key(*seeds, first, self._world.rank))
        read: Iterator[Any] | None = None
        for step in count(first):
            batch = next(batches, None)
            if self._order.needs_check:
                self._compare(step, batch)
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

    def _compare(self, step: int, batch: Sequence[Any] | None) -> None:
        self._require_same(step, None if batch is None else key("numbers", repr(batch)))

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
        "the stream must be the same on all ranks, since each keeps its own rows of every batch: remove what makes "
        "it differ by rank (a split by rank, such as split_dataset_by_node; a seed by rank), or give share a function "
        "(lane, num_lanes) -> iterator of samples"
    )
    _remedy = "have its __iter__ begin anew at each call, and draw from the global generators"

    def __init__(self, loader: DataLoader[Any], world: World, split: Split) -> None:
        facts = {
            "source": f"the stream {kind(loader.dataset)}",
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "num_workers": loader.num_workers,  # workers take turns, so their number decides the order
        }
        read_here = () if loader.num_workers else (loader.dataset,)  # workers read copies of it
        super().__init__(loader.dataset, world, split, length_hint(loader, -1), (loader, *read_here), **facts)
        own_rows = partial(_own_rows, loader.collate_fn, split)
        self._script_loader = loader
        self._loader = _rank_loader(
            loader, batch_size=loader.batch_size, drop_last=loader.drop_last, collate_fn=own_rows
        )
        self._generator = self._loader.generator = torch.Generator()

    def _begin(self, number: int) -> Drawn:
        """Returns rank 0's generator state, so that the workers of all ranks read the same samples."""
        text = generators.text_of(self._script_loader.generator or torch.default_generator)
        _draw_worker_seed(self._script_loader)  # as the plain DataLoader does
        return {"state": self._world.group.broadcast_json(text)}

    def _steps(self, number: int, first: int, drawn: Drawn) -> Iterator[Batch]:
        self._generator.set_state(generators.state_of(drawn["state"]))
        with generators.seeded(key("stream", drawn["state"], number)):
            states = generators.states(generators.CPU)
        batches = generators.drawn_from(states, chain.from_iterable([self._loader]))
        for _ in islice(batches, max(first - 1, 0)):  # a stream cannot seek, so it is read again
            pass
        for step in count(max(first - 1, 0)):
            num_rows, digest, micro_batches = next(batches, (0, None, []))
            self._require_same(step, digest)
            if digest is None:
                return
            if step < first:
                continue
            self._last = micro_batches[0] if micro_batches else self._last
            yield self._split.batch(partial(list, micro_batches), num_rows, (number, step), stand_in=self.peek)

    def _example(self) -> Any:
        return self._script_loader.collate_fn(list(islice(iter(self.dataset), self._split.micro_batch_size or 1)))


def _own_rows(collate_fn: Collate, split: Split, samples: list[Any]) -> tuple[int, int, list[Any]]:
    """A collate_fn, called in workers if there are any: returns the batch's rows, a digest of their number and the
    first sample, and this rank's micro-batches. Only these are collated."""
    micro_batches = [collate_fn(samples[rows.start : rows.stop]) for rows in split(len(samples))]
    return len(samples), key(len(samples), sample_digest(samples[0])), micro_batches


# ---- a DataLoader of the script ----


def _rank_loader(loader: DataLoader[Any], world: World | None = None, **reads: Any) -> DataLoader[Any]:
    """Returns a DataLoader like the given one that reads and collates differently.

    The script's worker_init_fn gets the worker's number among those of all ranks. world: None: all ranks' workers do
    the same, so they are numbered from 0 on each.
    """
    if loader.num_workers:
        first = world.rank * loader.num_workers if world else 0
        reads |= {
            "worker_init_fn": partial(_init_worker, loader.worker_init_fn, first),
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    if loader.pin_memory_device:
        reads["pin_memory_device"] = loader.pin_memory_device
    return _RankLoader(loader.dataset, num_workers=loader.num_workers, pin_memory=loader.pin_memory, **reads)


class _RankLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        with signals_wait():  # one that arrives while workers begin would end them
            return super().__iter__()


def _init_worker(script_init: Any, first: int, worker: int) -> None:
    """A worker_init_fn."""
    outlive_signals()
    if script_init is not None:
        script_init(first + worker)


def _draw_worker_seed(loader: DataLoader[Any]) -> int:
    """Returns the worker seed that the DataLoader draws on this rank."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
