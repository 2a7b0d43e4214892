"""What ranks must have alike besides the sums of gradients: the numbers that a step uses (learning rates, betas, the
norm to clip to), and from time to time the weights and buffers.

A digest of each travels in the exchange that a step makes anyway. If digests differ, all ranks see it, and share the
values to say which ones.
"""

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from paceline.base.errors import RunError
from paceline.base.units import listed
from paceline.replica.model import ReplicatedModel
from paceline.replica.result import Exchanged
from paceline.sync.replicas import compared, digests
from paceline.world.calls import mistake, place
from paceline.world.facts import unequal_kinds
from paceline.world.runtime import World

# Of a parameter group: how the update is computed, not which; a rank with another device may have others.
HOW_COMPUTED = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})


# ---- numbers ----


def digest_of_numbers(replica: ReplicatedModel, max_norm: float) -> int:
    values = [max_norm, *[value for *_, value in _numbers(replica)]]
    return zlib.crc32(struct.pack(f"{len(values)}d", *values))


def require_equal_numbers(rows: Sequence[Exchanged], replica: ReplicatedModel, max_norm: float) -> None:
    """Raises UserError on all ranks if their numbers differ. Collective then."""
    if len({row.settings for row in rows}) == 1:
        return
    several = len(replica.optimizers) > 1
    numbers = {"max_norm": [max_norm]}
    for optimizer, group, key, value in _numbers(replica):
        of = f" of {type(replica.optimizers[optimizer]).__name__}" if several else ""
        numbers.setdefault(f"{key} of group {group}{of}", []).append(value)
    by_rank = replica.world.group.share_json(numbers)
    texts = [{name: ", ".join(map(str, values)) for name, values in row.items()} for row in by_rank]
    names = dict.fromkeys(name for row in texts for name in row)
    different = [name for name in names if len({row.get(name) for row in texts}) > 1]
    values = [row.get(different[0], "missing") for row in texts]
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    more = f", and {len(different) - 1} other numbers, too" if len(different) > 1 else ""
    raise mistake(
        f"{different[0]} differs by rank: {values[0]} on rank 0, {values[other]} on rank {other}{more}. Ranks would "
        "make different updates. Agree on what it is computed from, such as a rank's own clock: "
        "`progress = world.mean(progress)`",
        reach="world",
    )


def _numbers(replica: ReplicatedModel) -> list[tuple[int, int, str, float]]:
    """Returns (optimizer, group, key, value) of the numbers of all parameter groups."""
    numbers: list[tuple[int, int, str, float]] = []
    for number, optimizer in enumerate(replica.optimizers):
        if replica.sync.diverges and not type(optimizer).__module__.startswith(("torch.", "paceline.")):
            continue  # local: it may adapt its numbers to this rank's own gradients
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if type(value) is float:
                    numbers.append((number, index, key, value))
                elif value is not None and key not in HOW_COMPUTED:
                    for item in value if isinstance(value, tuple | list) else (value,):
                        is_number = isinstance(item, Tensor) and item.numel() == 1
                        if is_number or isinstance(item, int | float | np.number):
                            numbers.append((number, index, key, float(item)))
    return numbers


# ---- weights and buffers ----

Digests = Mapping[str, int]  # by name; empty: not compared in this step


def digests_before(replica: ReplicatedModel) -> Digests:
    """Returns digests of what all ranks must have alike before a step, if it compares them: the second step of this
    process, and then each one after a hundred more. The same on all ranks."""
    every = replica.compare_every
    if not every or not replica.num_steps or (replica.has_compared and replica.num_steps % every):
        return {}
    return _digests(replica)


def overall(weights: Digests) -> int:
    """Returns one digest over all, exact as a float; 0 if there are none."""
    return int.from_bytes(hashlib.sha256(repr(sorted(weights.items())).encode()).digest()[:6]) + 1 if weights else 0


def require_equal_weights(rows: Sequence[Exchanged], replica: ReplicatedModel, before: Digests) -> None:
    """Raises RunError on all ranks if weights or buffers differed before the step. before: of `digests_before`.
    Collective then."""
    if len({row.weights for row in rows}) > 1:
        raise RunError(f"{place()}: {_difference(replica, before)}", reach="world")
    replica.has_compared |= bool(before)


def require_equal_at_leaving(world: World) -> None:
    """Raises RunError on all ranks if weights of a replica differ that all ranks still have. One whose weights a script
    changed after its last step, such as to export an average, is not compared. Collective."""
    replicas = {str(each.number): each for each in world.calls.replicas if each.compare_every and each.is_as_left()}
    here = {number: _digests(replica) for number, replica in replicas.items()}
    by_rank = world.group.share_json({number: overall(each) for number, each in here.items()})
    for number in sorted(by_rank[0], key=int):
        values = [row.get(number) for row in by_rank]
        if None not in values and len(set(values)) > 1:
            raise RunError(_difference(replicas[number], here[number]), reach="world")


def _digests(replica: ReplicatedModel) -> Digests:
    """Of weights that every rank holds, and of buffers, but for the statistics that the end of a step makes equal.
    Unequal processors round differently what each computes in a buffer."""
    tensors = dict(replica.sync.on_all_ranks())
    if not unequal_kinds(replica.world.facts):
        tensors |= {name: b.detach() for name, b in replica.buffers().items() if b not in replica.statistics}
    return digests(tensors)


def _difference(replica: ReplicatedModel, here: Digests) -> str:
    """Says which weight or buffer differs between ranks, and what to do. Collective."""
    step, group = f"after step {replica.num_steps}", replica.world.group
    by_rank = group.share_json(list(here))
    for name in dict.fromkeys(name for row in by_rank for name in row):
        ranks = [rank for rank, row in enumerate(by_rank) if name in row]
        if len(ranks) < group.size:
            return (
                f"{step} only rank {listed(ranks)} has {name}: make it in __init__, not in forward, which a rank "
                "without a micro-batch does not call"
            )
    first = compared(here, group)[0]
    if first.name in dict(replica.model.named_parameters()):
        return (
            f"replicas are not equal {step}: {first}. What a script changes in weights, it must change on all ranks "
            "alike"
        )
    return (
        f"buffers are not equal {step}: {first}. Each rank changes it by its own rows: make it equal after "
        f"step.finish(), for instance by model.{first.name}.copy_(world.mean(model.{first.name}))"
    )
