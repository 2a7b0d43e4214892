"""Samples dealt out at the source: each rank draws its own part of every batch and nothing else.

    batches = paceline.share(loader, world)            # a DataLoader, a data set, or a function that makes lanes
    for batch in batches:                              # a pass is an epoch; the next pass is the next
        for x, y in replica.micro_batches(batch):      # this rank's micro-batches of the step

A wrapper that draws whole batches and keeps its own costs every rank the work of all. Here a rank knows beforehand
which samples are its own. Of a data set with numbers for samples it is arithmetic: the order of an epoch is a keyed
permutation (data/order.py), evaluated at this rank's places only, and the plan (data/plan.py) says which those are. A
sampler is asked for all numbers of a batch on every rank, since nobody can know what it does, and the data is read for
this rank's alone. A stream has no numbers: there each place in the batch is a lane with a generator of its own, and a
rank runs the generators of its places.

In all three a step takes the same samples at any number of ranks, and where micro-batches begin and end does not
depend on it either.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.base.errors import UserError
from paceline.script.dealing import Arithmetic, Deal, Feed, Ranks, Sampled, kind, short
from paceline.script.drawing import Collate, Indexed, Lanes, Source
from paceline.script.workers import Generators, Telling, Told, moved, warn_of_alike
from paceline.world.calls import place


def share(
    source: Any,
    world: Ranks,
    *,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    collate_fn: Collate | None = None,
) -> "Share":
    """Returns this rank's part of the source's batches. Every rank calls it with the same arguments.

    source: one of

    - a DataLoader over a map-style data set. Its batch_size is that of the whole world. Workers, collate_fn,
      pin_memory, timeout and the rest are kept; each rank has as many workers as it says, and no two are seeded alike
      (a warning where the script's worker_init_fn undoes that). Shuffled or in order, the numbers of the samples are
      computed; another sampler or batch_sampler is asked on every rank, with random numbers that are the same on all,
      and what it answers is compared at each step.
    - a map-style data set: whatever has a length and an item for each number below it, also a list, an array or a
      tensor of rows. Read in this process.
    - a function (lane, num_lanes) -> iterator of samples, for what has no numbers: streams, packing, generation. It is
      called for each place in the batch, `num_lanes` in all, and place b of every batch is the next sample of lane b,
      so that nothing depends on the number of ranks. A parameter named `epoch` or `seed` is given those. Where a lane
      ends before others batches get smaller; the pass ends with the last of them.

    batch_size: samples in a step of the whole world; needed for all but a DataLoader, which has its own.
    micro_batch_size: samples in a micro-batch, the last of a batch excepted; None: the batch divided by the ranks.
    shuffle: whether each epoch has an order of its own, a function of (seed, epoch); None: yes for a data set.
    drop_last: whether what is left at the end of an epoch and fills no batch is left out; None: no. A DataLoader says
    both itself.
    collate_fn: makes a micro-batch of a list of samples; None: torch's default. A DataLoader has its own.

    Collective: the ranks compare what they were given. What a rank draws is the same in a world of any size, but for a
    sampler's numbers (measured by bench/share.py). Raises UserError, with the script's line, for a source that can not
    be shared, saying what to give instead; for arguments that do not go together; and on all ranks where they differ.
    """
    asked = _Asked(batch_size, micro_batch_size, shuffle, seed, drop_last, collate_fn)
    for name in ("batch_size", "micro_batch_size"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise UserError(f"{place()}: {name} is {value}; it is at least 1")
    world.calls.note("share")
    made = _source(source, world, asked)
    _require_same_everywhere(world, {**made.facts, "micro_batch_size": micro_batch_size})
    return Share(made, world)


class Share:
    """This rank's micro-batches, step by step; one pass of `for` is one epoch, and the next pass is the next.

    A pass that was left by `break` is gone on with by the next `for`. What was yielded counts as done: the position
    saved in the body of the loop is that of the following step.
    """

    def __init__(self, source: Source, world: Ranks) -> None:
        """By `share`."""
        self._source, self._world = source, world
        self._epoch = self._step = 0
        self._pass = 0  # number of the pass that may go on: an older one has lost its place
        self._is_compared = False

    @property
    def epoch(self) -> int:
        """Passes that are complete."""
        return self._epoch

    @property
    def step(self) -> int:
        """Steps that were yielded in the current pass."""
        return self._step

    def __len__(self) -> int:
        """Steps in a whole pass. Raises TypeError where nobody knows: of a function's lanes, of some samplers."""
        if self._source.num_steps is None:
            raise TypeError("how many steps a pass has is known at its end: the source does not say it")
        return self._source.num_steps

    def __iter__(self) -> Iterator[list[Any]]:
        """Yields, for each step, the list of this rank's micro-batches, which may be empty.

        Collective for samplers and lanes: 16 bytes a rank and step; and once at the first step of all.
        """
        self._pass += 1
        number = self._pass
        steps = self._source.steps(self._epoch, self._step)
        while (batch := self._next(steps)) is not None:
            self._step += 1
            yield batch
            if number != self._pass:
                raise UserError(f"{place()}: this pass lost its place: another one over the same batches was begun")
        self._epoch, self._step = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and what it is a position in; JSON. The same on all ranks at the same step."""
        return {"epoch": self._epoch, "step": self._step, "of": dict(self._source.facts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next pass begin where the state was taken, in a world and with micro-batches of any size.

        With lanes, samples up to there are drawn once more by whoever has the lane now, and passed over; with a
        sampler their numbers are. Raises UserError, naming the difference, for the position in another source, batch
        size or seed.
        """
        try:
            epoch, step, of = int(state["epoch"]), int(state["step"]), dict(state["of"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{place()}: this is not the position of a share: {short(state)}") from error
        for name, mine in self._source.facts.items():
            if of.get(name) != mine:
                raise UserError(
                    f"{place()}: the saved position is one with {name} {short(of.get(name))}, here it is "
                    f"{short(mine)}: the order would be another; give what was given then, or begin anew"
                )
        self._epoch, self._step = epoch, step
        self._pass += 1

    def _next(self, steps: Iterator[list[Any]]) -> list[Any] | None:
        """The next step; at the first of all the ranks also compare the generators that it was drawn with."""
        if self._is_compared:
            return next(steps, None)
        source, generators = self._source, Generators(self._source.data)
        before = generators.digests(source.data)
        batch = next(steps, None)
        if batch is not None:
            self._is_compared = True
            here = [moved(before, generators.digests(source.data))]
            told = source.told() or Told(generators.names, False, here)
            warn_of_alike(self._world.group, told, source.data, source.init)
        return batch


def num_rows(batch: Any) -> int | None:
    """Returns how many samples a micro-batch holds: the first dimension of the first tensor found in it, in a tuple,
    list, mapping or whatever has keys; of a list of samples its length. None where neither is there."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, list) and batch and all(type(item) is tuple for item in batch):
        return len(batch)  # samples that nobody collated: torch's own way of doing it leaves lists, not tuples, inside
    if isinstance(batch, str | bytes):
        return None
    if isinstance(batch, tuple | list):
        items: Iterable[Any] = batch
    elif hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        items = (batch[name] for name in batch.keys())  # noqa: SIM118 -- not only mappings have them
    else:
        return None
    found = next((rows for rows in map(num_rows, items) if rows is not None), None)
    return len(batch) if found is None and isinstance(batch, list) else found


# ---- what is shared ----


@dataclass(frozen=True)
class _Asked:
    """The arguments of `share`."""

    batch_size: int | None
    micro_batch_size: int | None
    shuffle: bool | None
    seed: int
    drop_last: bool | None
    collate_fn: Collate | None

    def refuse(self, why: str, *names: str) -> None:
        """Raises UserError where one of these was given."""
        for name in names:
            if getattr(self, name) is not None:
                raise UserError(f"{place()}: share was given {name}={getattr(self, name)!r}, and {why}")


def _source(source: Any, world: Ranks, asked: _Asked) -> Source:
    if isinstance(source, DataLoader):
        return _from_loader(source, world, asked)
    if isinstance(source, IterableDataset):
        raise UserError(f"{place()}: {kind(source)} is an IterableDataset: {_AS_LANES}")
    if isinstance(source, Share):
        raise UserError(f"{place()}: this source was shared before; give share the data set or the DataLoader itself")
    if isinstance(source, Mapping | str | bytes):
        raise UserError(
            f"{place()}: a {kind(source)} is no list of samples: give what has an item for each number from 0 on, "
            "such as a torch TensorDataset of the columns, or one split of several"
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, type):
        return _from_dataset(source, world, asked)
    if callable(source):
        asked.refuse("the order of lanes is the function's own", "shuffle")
        return Lanes(
            source,
            world,
            batch_size=_need_batch_size(asked),
            micro_batch_size=asked.micro_batch_size,
            seed=asked.seed,
            drop_last=bool(asked.drop_last),
            collate=asked.collate_fn or default_collate,
        )
    raise UserError(
        f"{place()}: a {kind(source)} can not be shared: it has no length and no item for each number, so every rank "
        f"would draw all of it. {_AS_LANES[0].upper()}{_AS_LANES[1:]}"
    )


_AS_LANES = (
    "what has no numbers is given as a function, `def samples(lane, num_lanes)`, which returns an iterator over every "
    "num_lanes-th file or document from the lane-th on, and with it batch_size="
)


def _from_dataset(dataset: Any, world: Ranks, asked: _Asked) -> Indexed:
    batch_size = _need_batch_size(asked)
    shuffle = asked.shuffle is None or asked.shuffle
    order = Arithmetic(len(dataset), batch_size, bool(asked.drop_last), shuffle, asked.seed)
    deal, feed = Deal(world, asked.micro_batch_size, batch_size), Feed()
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=feed, collate_fn=asked.collate_fn or default_collate)
    return Indexed(order, deal, world, asked.seed, feed, loader)


def _need_batch_size(asked: _Asked) -> int:
    if asked.batch_size is None:
        raise UserError(f"{place()}: share needs batch_size=, the samples in a step of the whole world")
    return asked.batch_size


def _from_loader(loader: DataLoader[Any], world: Ranks, asked: _Asked) -> Indexed:
    asked.refuse("a DataLoader says that itself: set it there", "shuffle", "drop_last", "collate_fn")
    if isinstance(loader.dataset, IterableDataset):
        raise UserError(f"{place()}: the DataLoader is over {kind(loader.dataset)}, an IterableDataset: {_AS_LANES}")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"{place()}: {kind(loader)} has an __iter__ of its own, which sharing at the source would pass by; give a "
            "torch DataLoader, or its data set"
        )
    if loader.batch_sampler is None:
        raise UserError(
            f"{place()}: the DataLoader has batch_size=None, so nobody knows what is a sample: give it a batch_size, "
            "or the sampler of batches as batch_sampler="
        )
    _refuse_distributed(loader.batch_sampler)
    order = _order_of(loader, asked.seed)
    if asked.batch_size not in (None, order.batch_size):
        asked.refuse(f"the DataLoader has batch_size={order.batch_size}, that of the whole world", "batch_size")
    deal, feed = Deal(world, asked.micro_batch_size, order.batch_size), Feed()
    return Indexed(order, deal, world, asked.seed, feed, *_fed(loader, feed))


def _refuse_distributed(sampler: Any) -> None:
    while sampler is not None:
        if isinstance(sampler, DistributedSampler):
            raise UserError(
                f"{place()}: the DataLoader has a {kind(sampler)}, which deals samples out to ranks, and so does "
                "share: take it away, with batch_size= as that of the whole world and shuffle=True where it shuffled"
            )
        sampler = getattr(sampler, "sampler", None)


def _order_of(loader: DataLoader[Any], seed: int) -> Arithmetic | Sampled:
    """Numbers computed where it is known how the sampler orders them, else the sampler's."""
    batches, sampler = loader.batch_sampler, loader.sampler
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    in_order = type(sampler) is SequentialSampler and len(sampler) == num_samples
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == num_samples
    if type(batches) is BatchSampler and batches.sampler is sampler and (in_order or shuffled):
        return Arithmetic(num_samples, batches.batch_size, batches.drop_last, shuffled, seed)
    return Sampled(batches, num_samples, seed)


def _fed(loader: DataLoader[Any], feed: Feed) -> tuple[DataLoader[Any], Telling | None]:
    """The same DataLoader with other numbers to read, and with workers that tell of their generators."""
    more: dict[str, Any] = {"collate_fn": loader.collate_fn}
    telling = None
    if loader.num_workers:
        telling = Telling(loader.dataset, loader.worker_init_fn, loader.collate_fn, loader.num_workers)
        more = {
            "collate_fn": telling.collate,
            "worker_init_fn": telling.init,
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    if loader.pin_memory_device:
        more["pin_memory_device"] = loader.pin_memory_device
    fed: DataLoader[Any] = DataLoader(
        loader.dataset, batch_sampler=feed, num_workers=loader.num_workers, pin_memory=loader.pin_memory, **more
    )
    return fed, telling


# ---- ranks that must have been given the same ----


def _require_same_everywhere(world: Ranks, facts: dict[str, Any]) -> None:
    """Raises UserError on all ranks where one shares something else. Collective."""
    texts = world.group.share_text(json.dumps(facts))
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        here, there = json.loads(texts[0]), json.loads(text)
        name = next(name for name in [*here, *there] if here.get(name) != there.get(name))
        raise UserError(
            f"{place()}: ranks share different things: {name} is {short(here.get(name))} on rank 0 and "
            f"{short(there.get(name))} on rank {rank}; all ranks give share the same, and it gives each its part",
            reach="world",
        )
