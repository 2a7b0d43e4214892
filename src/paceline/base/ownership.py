"""Which rank owns which slices of named tensors: for the sharded optimizer, checkpoints and estimates. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Slice:
    """Elements start .. stop-1 of the flattened (row-major) tensor `name`."""

    name: str
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def overlap(self, other: "Slice") -> "Slice | None":
        """Returns the elements in both slices; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Slice(self.name, start, stop) if self.name == other.name and start < stop else None


def borders(num_elements: int, weights: Sequence[float]) -> list[int]:
    """Returns len(weights) + 1 borders that split num_elements in proportion to the weights, to the nearest element.
    Part i is borders[i] .. borders[i+1]-1, and may be empty. If all weights are 0, parts are equal."""
    total = sum(weights)
    shares = [weight / total for weight in weights] if total > 0 else [1 / len(weights)] * len(weights)
    ends, reached = [0], 0.0
    for share in shares[:-1]:
        reached += share
        ends.append(min(num_elements, max(ends[-1], round(num_elements * reached))))
    return [*ends, num_elements]


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Returns the owner of each item. Assigns the costliest first, each to the least loaded rank (Graham, 1969: at most
    4/3 of the optimum). Ties go to the lower rank, so all ranks agree."""
    loads = [0.0] * num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def fill(loads: Sequence[float], amount: float) -> list[float]:
    """Returns how much of a divisible amount each rank gets, so that loads become as equal as possible."""
    order = sorted(range(len(loads)), key=lambda rank: loads[rank])
    level, rest = loads[order[0]], amount
    for count, rank in enumerate(order[1:], start=1):
        step = min(rest, (loads[rank] - level) * count)
        level, rest = level + step / count, rest - step
    level += rest / len(loads) if rest > 0 else 0.0
    return [max(0.0, level - load) for load in loads]


def cut(slices: Iterable[Slice], num_parts: int) -> list[list[Slice]]:
    """Splits the slices, in order, into num_parts lists of equally many elements; a slice may be cut."""
    items = list(slices)
    edges = borders(sum(item.num_elements for item in items), [1.0] * num_parts)
    parts: list[list[Slice]] = [[] for _ in range(num_parts)]
    passed = 0
    for item in items:
        for part, (low, high) in zip(parts, pairwise(edges), strict=True):
            start = item.start + max(0, low - passed)
            stop = item.start + min(item.num_elements, high - passed)
            if start < stop:
                part.append(Slice(item.name, start, stop))
        passed += item.num_elements
    return parts
