"""Forward passes over this rank's micro-batches, in a step or an evaluation."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from paceline.replica.batch import Batch, moved, num_rows
from paceline.replica.share import Share
from paceline.sync.strategy import Strategy
from paceline.world.calls import mistake
from paceline.world.runtime import World

_NONE = object()
_LOSS = ""  # the name of a single returned number


class Pass(NamedTuple):
    micro_batch: Any  # on the rank's device
    rows: range | None  # of the global batch; None: not known
    num_rows: int | None  # if `rows` is None a guess: the first dimension
    is_real: bool  # False: a dummy of weight 0, so that all ranks make equally many fsdp passes
    is_last: bool


def passes(batch: Batch, sync: Strategy, world: World) -> Iterator[Pass]:
    """Yields this rank's micro-batches; with fsdp then dummies, until all ranks have made equally many passes.
    Collective then, unless the batch knows how many."""
    count = _count(batch, world) if sync.lockstep else len(batch)
    drawn = batch.draw()
    for index in range(count):
        is_real = index < len(batch)
        micro_batch = next(drawn, _NONE) if is_real else batch.stand_in() if batch.stand_in else _NONE
        if micro_batch is _NONE:
            raise mistake(
                "another step went through this batch before: for a second model keep what the first "
                "one is to see, or made, in a list, and say replica.step(batch.like(that_list))"
            )
        size, rows = num_rows(micro_batch), None
        if batch.rows is not None:
            rows = batch.rows[index] if is_real else range(size or 0)
            size = len(rows)
        yield Pass(moved(micro_batch, world.device), rows, size, is_real, index == count - 1)


def _count(batch: Batch, world: World) -> int:
    if batch.passes is not None:
        return batch.passes
    rows = world.group.share_integers([len(batch), int(batch.stand_in is not None)])
    most = max(count for count, _ in rows)
    if any(count < most and not has_stand_in for count, has_stand_in in rows):
        raise mistake(
            f"ranks have {[count for count, _ in rows]} micro-batches, and with strategy fsdp, whose "
            "forward communicates, each rank needs one at least: share the data by replica.steps(loader), or take "
            "strategy zero",
            reach="world",
        )
    return most


def call(function: Callable[..., Any], micro_batch: Any) -> tuple[Any, float | None]:
    """Calls a script's function with the items of a tuple or list as arguments. Returns (value, weight); weight is None
    if the function returns none."""
    is_unpacked = isinstance(micro_batch, list | tuple) and not hasattr(micro_batch, "_fields")
    found = function(*micro_batch) if is_unpacked else function(micro_batch)
    return (found[0], float(found[1])) if isinstance(found, tuple) else (found, None)


def evaluate(model: nn.Module, batches: Share, measure: Callable[..., Any], sync: Strategy, world: World) -> Any:
    """Returns the means of `measure` over one pass of all ranks' micro-batches. Collective."""
    sums: dict[str, float] = {}
    total = 0.0
    with _in_eval_mode(model):
        for one in _all_passes(batches, sync, world):
            found, weight = call(measure, one.micro_batch)
            if not one.is_real:
                continue
            weight = float(one.num_rows or 1) if weight is None else weight
            total += weight
            for name, value in (found if isinstance(found, Mapping) else {_LOSS: found}).items():
                sums[name] = sums.get(name, 0.0) + float(value) * weight
    # A rank without a micro-batch does not know the names.
    rows = world.group.share_json([sums, total])
    total = math.fsum(theirs for _, theirs in rows) or math.nan
    names = dict.fromkeys(name for found, _ in rows for name in found)
    means = {name: math.fsum(found.get(name, 0.0) for found, _ in rows) / total for name in names}
    return means.get(_LOSS, means)


def _all_passes(batches: Share, sync: Strategy, world: World) -> Iterator[Pass]:
    for batch in batches:
        yield from passes(batch, sync, world)
        if batches.is_endless:  # a function that draws: its evaluation is one step
            return


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
