"""Times of collectives. Every rank calls these alike.

How often something is repeated is decided from times that the ranks have shared, so that all repeat it equally often;
no rank decides by its own clock.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.base.ownership import borders
from paceline.bench.link_fit import bus_factor
from paceline.world.device import DeviceClock
from paceline.world.group import Group, Transfer

ELEMENT_BYTES = 4  # float32, as gradients are
_ENOUGH_SHARE = 1 / 30  # of a collective's budget for one size: a third for small ones, whatever the large ones take
_MOST_ITERATIONS = 500
_WARM_UP_BELOW_S = 0.5  # what takes longer is its own warm-up
LEAST_ITERATIONS = 3


@dataclass(frozen=True)
class CollectiveTime:
    """One collective at one size: the median over iterations of the slowest rank's time."""

    collective: str
    num_bytes: int  # of the buffer: what nccl-tests call size
    num_ranks: int
    iterations: int
    seconds: float
    least_s: float
    most_s: float

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Buffer over time."""
        return self.num_bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """What the busiest link carried, at least; comparable with its bandwidth for any number of ranks."""
        return self.algorithm_bytes_per_s * bus_factor(self.collective, self.num_ranks)


Begin = Callable[[], None]


def starter(group: Group, collective: str, flat: torch.Tensor) -> Begin:
    """Returns what runs this collective of the project on a flat buffer, from its start until its result may be used.

    Reduce-scatter and all-gather give each rank an equal part, as nccl-tests do.
    """
    edges = borders(flat.numel(), [1] * group.size)
    begins: dict[str, Callable[[], Transfer | None]] = {
        "all-reduce": lambda: group.start_all_reduce(flat),
        "reduce-scatter": lambda: group.start_reduce_scatter(flat, edges),
        "all-gather": lambda: group.start_all_gather(flat, edges),
        "broadcast": lambda: group.broadcast(flat),
    }
    begin = begins[collective]

    def run() -> None:
        transfer = begin()
        if transfer is not None:
            transfer.wait()

    return run


class Stopwatch:
    """Times what all ranks do together, each repetition by its slowest rank."""

    def __init__(self, group: Group, device: torch.device):
        self.group, self.device = group, device
        self._clock = DeviceClock(device)
        self.spent_s = 0.0  # by the slowest rank, equal on all

    def seconds(self, run: Begin, iterations: int) -> list[float]:
        """Returns the seconds of each iteration on the rank that took longest. Collective.

        Ranks begin the first together, and each next one when they have ended the last.
        """
        self.group.barrier()
        stamps = [self._clock.stamp()]
        for _ in range(iterations):
            run()
            stamps.append(self._clock.stamp())
        self._clock.finish()
        mine = [self._clock.ms(a, b) / 1e3 for a, b in itertools.pairwise(stamps)]
        self.group.take_traffic()
        slowest = [max(values) for values in zip(*self.group.share(mine), strict=True)]
        self.group.take_traffic()
        self.spent_s += sum(slowest)
        return slowest

    def enough(self, run: Begin, enough_s: float, least: int = LEAST_ITERATIONS) -> list[float]:
        """Returns the times of as many iterations as fill enough_s, and at least so many, after a warm-up."""
        found = self.seconds(run, 1)
        if found[0] < _WARM_UP_BELOW_S:
            found = []
        batch = least
        while len(found) < least or (sum(found) < enough_s and len(found) < _MOST_ITERATIONS):
            found += self.seconds(run, batch if len(found) >= least else least - len(found))
            batch *= 2  # not from one probe: a single time on a busy machine is off by a factor of ten
        return found


def time_collective(watch: Stopwatch, collective: str, flat: torch.Tensor, enough_s: float) -> CollectiveTime:
    """Returns the time of one collective over this buffer, repeated for about enough_s. Collective."""
    found = watch.enough(starter(watch.group, collective, flat), enough_s)
    return CollectiveTime(
        collective=collective,
        num_bytes=flat.numel() * flat.element_size(),
        num_ranks=watch.group.size,
        iterations=len(found),
        seconds=statistics.median(found),
        least_s=min(found),
        most_s=max(found),
    )


def sizes(max_bytes: int) -> list[int]:
    """Returns 1 KiB and its multiples by 4, up to max_bytes."""
    found = [1024]
    while found[-1] * 4 <= max_bytes:
        found.append(found[-1] * 4)
    return found


def time_sizes(
    watch: Stopwatch, collective: str, max_bytes: int, budget_s: float
) -> tuple[list[CollectiveTime], list[int]]:
    """Returns the times at all sizes that fit into the budget, and the sizes that did not. Collective.

    A size is not begun where four times what the one before took, as often as it must be repeated, is more than what
    is left of the budget.
    """
    buffer = torch.empty(max_bytes // ELEMENT_BYTES, dtype=torch.float32, device=watch.device).fill_(0)
    found: list[CollectiveTime] = []
    until = watch.spent_s + budget_s
    left_out = sizes(max_bytes)
    while left_out:
        expected = 4 * found[-1].seconds * LEAST_ITERATIONS if found else 0.0
        if watch.spent_s + expected > until and len(found) >= 2:
            break
        size = left_out.pop(0)
        found.append(time_collective(watch, collective, buffer[: size // ELEMENT_BYTES], _ENOUGH_SHARE * budget_s))
    return found, left_out
