"""Times joint work of all ranks."""

import itertools
from collections.abc import Callable

import torch

from paceline.world.device_clock import DeviceClock
from paceline.world.group import Group

LEAST_RUNS, _MOST_RUNS = 3, 500
_WARM_UP_BELOW_S = 0.5  # a longer run needs no other warm-up
Run = Callable[[], object]


class Stopwatch:
    """Times joint work of all ranks; a repetition counts the time of its slowest rank."""

    def __init__(self, group: Group, device: torch.device):
        self.group, self.device = group, device
        self._clock = DeviceClock(device)
        self.spent_s = 0.0

    def seconds(self, run: Run, iterations: int) -> list[float]:
        """Returns the seconds of each iteration on its slowest rank. Ranks start the first together; each next one
        follows the last directly. Collective."""
        self.group.barrier()
        stamps = [self._clock.stamp()]
        for _ in range(iterations):
            run()
            stamps.append(self._clock.stamp())
        self._clock.finish()
        passed_s = [self._clock.ms(a, b) / 1e3 for a, b in itertools.pairwise(stamps)]
        slowest = [max(values) for values in zip(*self.group.share(passed_s), strict=True)]
        self.group.take_traffic()  # discard it
        self.spent_s += sum(slowest)
        return slowest

    def enough(self, run: Run, enough_s: float) -> list[float]:
        """Returns the times of enough iterations to fill enough_s, at least three, after a warm-up. Collective."""
        times_s = self.seconds(run, 1)
        if times_s[0] < _WARM_UP_BELOW_S:
            times_s = []
        batch = LEAST_RUNS - len(times_s)
        while len(times_s) < LEAST_RUNS or (sum(times_s) < enough_s and len(times_s) < _MOST_RUNS):
            times_s += self.seconds(run, batch)
            batch = len(times_s)  # doubles: a single time on a busy machine may be ten times too long
        return times_s
