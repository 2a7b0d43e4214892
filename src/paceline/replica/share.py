"""A source of samples, sharded over ranks: each rank reads its own part of every batch and nothing else.

    batches = paceline.share(loader, world)            # a DataLoader, a data set, or a function
    for step in replica.steps(batches):                # one pass over the batches is an epoch
        for x, y in step:                              # this rank's micro-batches of the step
            ...

A step has the same samples at any number of ranks, and the same micro-batches if micro_batch_size is given. sources.py
and datasets.py read each kind of source.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index, length_hint
from typing import Any, Literal

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from paceline.data.plan import in_proportion
from paceline.replica.batch import Split
from paceline.replica.datasets import DatasetShare, LoaderOrder, SeededOrder, StreamShare, most_read_ahead, samplers_of
from paceline.replica.mistakes import warn
from paceline.replica.sources import Collate, FunctionShare, LaneShare, kind, short
from paceline.replica.sources import Share as Share
from paceline.world.calls import mistake
from paceline.world.runtime import World


def share(
    source: Any,
    world: World,
    *,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    micro_batches: int | None = None,
    shares: Sequence[int] | Literal["auto"] = (),
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    collate_fn: Collate | None = None,
) -> Share:
    """Returns this rank's part of the source's batches. Every rank calls it with the same arguments.

    source: one of

    - a DataLoader over a map-style data set. Its batch_size is that of all ranks together. Workers, collate_fn,
      pin_memory, timeout and the rest are kept; each rank has as many workers as it says, no two have the same seed,
      and worker_init_fn gets the worker's number among those of all ranks. The order is the loader's own, from the same
      draws of the global generator. Samplers other than torch's SequentialSampler and RandomSampler draw complete
      batches on every rank, with the same random numbers, and ranks compare them.
    - a map-style data set: anything with a length and an item for each number below it, also a list, an array or a
      tensor of rows. Read in this process. A shuffled order is a permutation computed from (seed, epoch).
    - an IterableDataset, or a DataLoader over one, with its workers. Every rank reads all of the stream and keeps its
      part, and a resume reads up to where it stopped. The stream must be the same on all ranks.
    - a function (lane, num_lanes) -> iterator of samples: for streams, packing, generation. It is called for each row
      of the batch, `num_lanes` in all; row b of every batch is the next sample of lane b, and a rank runs the lanes of
      its rows. A parameter named `epoch` or `seed` is given those. When a lane ends batches get smaller; the pass ends
      with the last lane. A resume draws the samples before it again.
    - a function without parameters that draws one micro-batch at random (nanoGPT's get_batch), with micro_batches= of a
      step over all ranks. Every rank draws all of them, with the same numbers, and keeps its own, so they should cost
      little. The first is drawn before the step begins, as by a loop that fetches one ahead. A pass never ends.

    batch_size: samples in a step, all ranks together; needed for all but a DataLoader, which has its own.
    micro_batch_size: samples in a micro-batch, but for the last of a batch; None: the batch divided by the ranks.
    shares: samples of a batch (of a function: micro-batches of a step) that each rank computes, such as (24, 8), in
    proportion for a smaller batch; "auto": by the ranks' measured speeds, for data sets and functions that draw; empty:
    equal. Auto depends on the clock, so a run with it does not repeat bit for bit.
    shuffle: whether each epoch has its own order, a function of (seed, epoch); None: yes for a data set.
    drop_last: whether an incomplete batch at the end of an epoch is left out; None: no.
    collate_fn: makes a micro-batch of a list of samples; None: torch's default.

    Collective: the ranks compare what they were given. Raises UserError, with the script's line, if a source cannot be
    shared, if arguments contradict each other, or, on all ranks, if ranks differ.
    """
    given = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "micro_batches": micro_batches}
    sizes = {name: None if value is None else _whole(name, value) for name, value in given.items()}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise mistake(f"{name} is {value}; it is at least 1")
    world.calls.record("share")
    _check_shares(shares, world)
    shares = shares if isinstance(shares, str) else tuple(shares)
    arguments = _Arguments(
        world,
        shares=shares,
        shuffle=shuffle,
        seed=_whole("seed", seed),
        drop_last=drop_last,
        collate_fn=collate_fn,
        **sizes,
    )
    made = _source(source, arguments)
    facts = {
        "num_steps": length_hint(made, -1),
        "micro_batch_size": sizes["micro_batch_size"],
        "shares": shares if isinstance(shares, str) else list(shares),
    }
    if shares == "auto" and isinstance(source, DataLoader):
        facts["num_workers"] = source.num_workers  # shares change after what workers have read ahead
    _require_same_everywhere(world, {**made.facts, **facts})
    return made


def _whole(name: str, value: Any) -> int:
    """Returns a whole number, of numpy or torch, too, as Python's. Raises UserError for what is none."""
    try:
        return index(value)
    except TypeError:
        raise mistake(f"{name} is {value!r}; it is a whole number") from None


def _check_shares(shares: Any, world: World) -> None:
    is_list = isinstance(shares, Sequence) and not isinstance(shares, str)
    are_numbers = is_list and all(isinstance(n, int) and n >= 0 for n in shares)
    if shares != "auto" and not (are_numbers and (not shares or (len(shares) == world.world_size and any(shares)))):
        expected = f'"auto", or one number of samples for each of {world.world_size} ranks'
        raise mistake(f"shares is {shares!r}; it is {expected}")


# ---- from arguments to a source ----

_LANES = (
    "`def samples(lane, num_lanes)`, which returns an iterator over every num_lanes-th file or document from the "
    "lane-th on, and with it batch_size="
)


@dataclass(frozen=True)
class _Arguments:
    world: World
    batch_size: int | None
    micro_batch_size: int | None
    micro_batches: int | None
    shares: Sequence[int] | Literal["auto"]
    shuffle: bool | None
    seed: int
    drop_last: bool | None
    collate_fn: Collate | None

    def refuse(self, why: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise mistake(f"share was given {name}={getattr(self, name)!r}, and {why}")

    def need_batch_size(self) -> int:
        if self.batch_size is None:
            raise mistake("share needs batch_size=, the samples in a step over all ranks")
        return self.batch_size

    def split(self, batch_size: int | None, read_ahead: int | None = None) -> Split:
        """Returns a Split for batches of this size. read_ahead: see Split; None: shares="auto" is not possible. Raises
        UserError if the arguments contradict the source."""
        if self.batch_size not in (None, batch_size):
            self.refuse(f"the DataLoader has batch_size={batch_size}, that of all ranks together", "batch_size")
        if self.shares != "auto":
            split = Split(self.world, self.micro_batch_size, batch_size, self.shares)
            if batch_size and self.micro_batch_size and not self.shares and 0 in split.plan(batch_size).num_sequences():
                warn(
                    f"a step has fewer micro-batches than the {self.world.world_size} ranks, so the last ranks compute "
                    "nothing: make the micro-batches smaller, or the batch larger",
                    self.world,
                )
            return split
        if read_ahead is None or batch_size is None:
            self.refuse("this source's rows cannot move between ranks while it is read: give numbers", "shares")
        assert batch_size is not None
        shares = in_proportion(batch_size, [1] * self.world.world_size)
        return Split(self.world, self.micro_batch_size, batch_size, shares, read_ahead)


def _source(source: Any, arguments: _Arguments) -> Share:
    is_dataset = hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, type)
    if isinstance(source, Share):
        raise mistake("this source was shared before; give share the data set or the DataLoader itself")
    if isinstance(source, Mapping | str | bytes):
        raise mistake(
            f"a {kind(source)} is not a list of samples: give what has an item for each number from 0 on, "
            "such as a torch TensorDataset of the columns, or one split of several"
        )
    if callable(source) and not is_dataset and not isinstance(source, DataLoader | IterableDataset):
        return _of_function(source, arguments)
    arguments.refuse("that goes with a function that draws micro-batches", "micro_batches")
    if isinstance(source, DataLoader):
        return _of_loader(source, arguments)
    if not is_dataset and not isinstance(source, IterableDataset):
        raise mistake(
            f"a {kind(source)} cannot be shared: it has no length and no item for each number, so every "
            f"rank would draw all of it. Give a function instead, {_LANES}"
        )
    size, drop_last = arguments.need_batch_size(), bool(arguments.drop_last)
    loader: DataLoader[Any] = DataLoader(source, size, drop_last=drop_last, collate_fn=arguments.collate_fn)
    if isinstance(source, IterableDataset):
        arguments.refuse("the order of a stream is its own", "shuffle")
        return _of_stream(loader, arguments)
    order = SeededOrder(len(source), size, drop_last, arguments.shuffle is not False, arguments.seed)
    split = arguments.split(size, most_read_ahead(loader))
    return DatasetShare(order, arguments.world, split, arguments.seed, loader)


def _of_function(function: Any, arguments: _Arguments) -> Share:
    parameters = inspect.signature(function).parameters.values()
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        arguments.refuse("that goes with a function that draws micro-batches", "micro_batches")
        arguments.refuse("the order of lanes is the function's own", "shuffle")
        size = arguments.need_batch_size()
        facts = {"batch_size": size, "drop_last": bool(arguments.drop_last), "seed": arguments.seed}
        return LaneShare(
            function, arguments.world, arguments.split(size), arguments.collate_fn or default_collate, **facts
        )
    arguments.refuse("a function without parameters draws micro-batches itself", "shuffle", "drop_last", "collate_fn")
    why = "a function draws complete micro-batches; micro_batches= says how many in a step"
    arguments.refuse(why, "batch_size", "micro_batch_size")
    if arguments.micro_batches is None:
        raise mistake(
            f"{kind(function)} takes no parameters, so each call draws a micro-batch: pass micro_batches=, "
            "their number in a step over all ranks (gradient accumulation steps times ranks)"
        )
    split = replace(arguments, micro_batch_size=1).split(arguments.micro_batches, read_ahead=0)
    return FunctionShare(function, arguments.world, split, arguments.micro_batches)


def _of_loader(loader: DataLoader[Any], arguments: _Arguments) -> Share:
    arguments.refuse("a DataLoader says that itself: set it there", "shuffle", "drop_last", "collate_fn")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise mistake(
            f"{kind(loader)} has an __iter__ of its own, which share would not use; give a torch "
            "DataLoader, or its data set"
        )
    if loader.batch_sampler is None:
        raise mistake(
            "the DataLoader has batch_size=None, so share cannot know what a sample is: give it a "
            "batch_size, or the sampler of batches as batch_sampler="
        )
    if isinstance(loader.dataset, IterableDataset):
        return _of_stream(loader, arguments)
    for sampler in samplers_of(loader.batch_sampler):
        if isinstance(sampler, DistributedSampler):
            raise mistake(
                f"the DataLoader has a {kind(sampler)}, which splits samples over ranks, and so does "
                "share: remove it, make batch_size= that of all ranks together, and set shuffle=True if it shuffled"
            )
    order = LoaderOrder(loader)
    split = arguments.split(order.batch_size, most_read_ahead(loader))
    return DatasetShare(order, arguments.world, split, arguments.seed, loader)


def _of_stream(loader: DataLoader[Any], arguments: _Arguments) -> Share:
    if arguments.world.world_size > 1:
        warn(
            f"{kind(loader.dataset)} is an IterableDataset, whose samples have no numbers: each of "
            f"{arguments.world.world_size} ranks reads all of it and keeps its part. To read it once give share a "
            f"function {_LANES}",
            arguments.world,
        )
    return StreamShare(loader, arguments.world, arguments.split(loader.batch_size))


def _require_same_everywhere(world: World, facts: dict[str, Any]) -> None:
    """Raises UserError on all ranks if one shares another source. Collective."""
    by_rank = world.group.share_json(facts)
    for rank, there in enumerate(by_rank):
        here = by_rank[0]
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                raise mistake(
                    f"ranks share different things: {name} is {short(here.get(name))} on rank 0 and "
                    f"{short(there.get(name))} on rank {rank}; give share the same on all ranks, and it splits it",
                    reach="world",
                )
