"""Decides how many sequences of a step each rank computes, from the ranks' measured times. No clock, no communication:
all ranks decide the same from the same numbers.

A rank's own work takes a + b n ms for n sequences. b is measured as the median time of data, forward and backward over
n, a as the median of the rest (update). Sequences are assigned one at a time to the rank that would end first with one
more. The new shares are adopted if they make the longest own work shorter by at least 2%, and by more than noise
explains: large gains show in 8 steps, small ones in 128. If a link limits the step, this gains nothing and costs
nothing.

A rank's time is not always in proportion to its share: a container with a limit of CPU time runs at full speed until a
period's time is used up. So shares that go back and forth wait for more and more steps.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.replica.result import StepTimes

_LEAST_GAIN = 0.02  # of the longest own work
_SIGMAS = 3.0  # standard errors of the medians
_WARM_UP = 2  # steps after a change that are not measured: memory is new, compiled code may be
_WINDOWS = (8, 32, 128)  # steps
_EVERY = 4  # steps between two looks
_TURNS = 2  # after so many changes against the direction of the one before, decisions take 4 times the steps
_CALM = 512  # steps without a change after which the turns are forgotten

Floats = NDArray[np.float64]
Milliseconds = Sequence[float] | Floats  # by rank


class Change(NamedTuple):
    shares: tuple[int, ...]
    why: str


class Balancer:
    """Watches the steps of all ranks and proposes shares."""

    def __init__(self, shares: Sequence[int]) -> None:
        """shares: in force, sequences by rank."""
        self.shares = tuple(shares)
        self._move = np.zeros(len(shares))  # the last change
        self._turns = 0
        self._num_steps = -_WARM_UP  # measured with the current shares
        self._ms: list[list[tuple[float, float]]] = []  # by step and rank: data, forward, backward; other own work

    def observe(self, shares: Sequence[int], times: Sequence[StepTimes]) -> Change | None:
        """Adds a step: the shares it had, and its times, by rank. Returns shares for a later step, or None. They count
        as adopted: steps that still have the old ones are ignored."""
        if tuple(shares) != self.shares or min(shares) == 0 or len(shares) == 1:
            return None  # the speed of a rank without sequences is unknown
        self._num_steps += 1
        if self._num_steps <= 0:
            return None
        self._ms.append([(t.compute_ms, t.step_ms - t.compute_ms - t.exposed_comm_ms) for t in times])
        del self._ms[: -_WINDOWS[-1]]
        if self._num_steps > _CALM:
            self._turns = 0
        least = _WINDOWS[0] * 4 ** (self._turns // _TURNS)
        if self._num_steps % _EVERY or self._num_steps < least:
            return None
        windows = [window for window in _WINDOWS if min(least, _WINDOWS[-1]) <= window <= len(self._ms)]
        return next((change for window in windows if (change := self._better(window))), None)

    def _better(self, window: int) -> Change | None:
        """Adopts and returns better shares by what the last steps show."""
        shares = np.array(self.shares)
        computed, fixed = np.median(self._ms[-window:], axis=0).T
        cost = computed / shares
        divided = np.array(divide(sum(self.shares), cost, fixed))
        now, new = fixed + computed, fixed + cost * divided
        gain = float(now.max() - new.max())
        noise = self._noise() / window**0.5
        error = float(np.hypot(now.max() * noise[now.argmax()], new.max() * noise[new.argmax()]))
        if gain < max(_LEAST_GAIN * now.max(), _SIGMAS * error):
            return None
        self._turns += bool((divided - shares) @ self._move < 0)
        self.shares, self._move = tuple(divided.tolist()), divided - shares
        self._num_steps, self._ms = -_WARM_UP, []
        costs = ", ".join(f"{ms:.3g}" for ms in cost)
        why = f"a sequence takes {costs} ms by rank; own work of {new.max():.1f} ms predicted, now {now.max():.1f}"
        return Change(self.shares, why)

    def _noise(self) -> Floats:
        """Returns the standard error, by rank, of a median of one step: a fraction. Over all steps that are kept."""
        work = np.array(self._ms).sum(2)
        middle = np.median(work, axis=0)
        deviation = 1.4826 * np.median(np.abs(work - middle), axis=0)  # a normal distribution's standard deviation
        return np.asarray(1.2533 * deviation / middle)  # a median varies by sqrt(pi / 2) more than a mean


def divide(num_sequences: int, cost_ms: Milliseconds, fixed_ms: Milliseconds) -> tuple[int, ...]:
    """Returns shares, at least 1 each, of which the longest fixed_ms + cost_ms * share is the shortest possible."""
    shares = [1] * len(cost_ms)
    ends = [(fixed + 2 * cost, rank) for rank, (cost, fixed) in enumerate(zip(cost_ms, fixed_ms, strict=True))]
    heapq.heapify(ends)
    for _ in range(num_sequences - len(shares)):
        end, rank = ends[0]
        shares[rank] += 1
        heapq.heapreplace(ends, (end + float(cost_ms[rank]), rank))
    return tuple(shares)
