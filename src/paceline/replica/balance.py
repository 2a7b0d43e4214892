"""Decides how many sequences of a step each rank computes, from the ranks' measured times. No clock, no communication:
all ranks decide the same from the same numbers.

A rank's own work takes a + b n ms for n sequences. b is measured as the median time of data, forward and backward over
n, a as the median of the rest (update). Sequences are assigned one at a time to the rank that would end first with one
more. The new shares are adopted if they make a step shorter by at least 2%, and by more than noise explains. Then the
steps are measured: shares that did not make them shorter (a link may be what limits them) are taken back.

A rank's time is not always in proportion to its share: a container with a limit of CPU time runs at full speed until a
period's time is used up. So shares that go back and forth, or are taken back, wait for more and more steps.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.replica.result import StepTimes

_LEAST_GAIN = 0.02  # of a step
_WARM_UP = 2  # steps after a change that are not measured: memory is new, compiled code may be
# Large gains show in a few steps, small ones in many. A gain must exceed so many standard errors of the medians.
_WINDOWS = (16, 64, 256)
_SIGMAS = 4.0
_EVERY = 4  # steps between two looks
_TURNS = 2  # after so many better shares against the direction of the change before, decisions take 4 times the steps
_LONGEST_WAIT = 1024  # steps
_CALM = 4  # after so many windows without a change the turns before are forgotten
# A change that did not pay counts as so many turns, until the ranks' relative speeds have changed by this factor.
_OTHER_SPEED = 1.25

Floats = NDArray[np.float64]
Milliseconds = Sequence[float] | Floats  # by rank


class Change(NamedTuple):
    shares: tuple[int, ...]
    why: str


class _Trial(NamedTuple):
    """Shares that were left for better ones."""

    shares: tuple[int, ...]
    step_ms: float
    gain_ms: float  # predicted
    cost_ms: Floats  # of a sequence, by rank


class Balancer:
    """Watches the steps of all ranks and proposes shares."""

    def __init__(self, shares: Sequence[int]) -> None:
        """shares: in force, sequences by rank."""
        self.shares = tuple(shares)
        self._trial: _Trial | None = None  # while the current shares are judged
        self._refused: Floats | None = None  # `cost_ms` of a trial whose shares are in force again
        self._move = np.zeros(len(shares))  # the last change
        self._turns = 0  # one after another
        self._forget()

    def _forget(self) -> None:
        self._num_steps = -_WARM_UP  # measured with the current shares
        # By step and rank: ms in data, forward, backward; of other own work; of the longest rank's step.
        self._ms: list[list[tuple[float, float, float]]] = []

    def observe(self, shares: Sequence[int], times: Sequence[StepTimes]) -> Change | None:
        """Adds a step: the shares it had, and its times, by rank. Returns shares for a later step, or None. They count
        as adopted: steps that still have the old ones are ignored."""
        if tuple(shares) != self.shares or min(shares) == 0 or len(shares) == 1:
            return None  # the speed of a rank without sequences is unknown
        self._num_steps += 1
        if self._num_steps <= 0:
            return None
        longest = max(each.step_ms for each in times)
        computed = [each.compute_ms for each in times]
        other = [each.step_ms - each.compute_ms - each.exposed_comm_ms for each in times]
        self._ms.append([(ms, rest, longest) for ms, rest in zip(computed, other, strict=True)])
        del self._ms[: -_WINDOWS[-1]]
        if self._num_steps % _EVERY or self._num_steps < _WINDOWS[0]:
            return None
        cost, _, step_ms = self._medians(_WINDOWS[0])
        if self._trial is not None and (change := self._judge(self._trial, cost, step_ms)):
            return change
        if self._refused is not None and (cost / self._refused).max() > _OTHER_SPEED * (cost / self._refused).min():
            self._refused, self._turns = None, max(0, self._turns - _TURNS)
        least = min(_WINDOWS[0] * 4 ** (self._turns // _TURNS), _LONGEST_WAIT)
        if self._num_steps > _CALM * least:
            self._turns, least = 0, _WINDOWS[0]
        return None if self._num_steps < least else self._better(least, step_ms)

    def _judge(self, trial: _Trial, cost: Floats, step_ms: float) -> Change | None:
        """Returns the shares before if the current ones did not make steps shorter."""
        self._trial = None
        all_slower = max(1.0, float((cost / trial.cost_ms).min()))  # the shares did not cause what slows all ranks
        if step_ms <= all_slower * (trial.step_ms - trial.gain_ms / 4):
            return None
        self._refused, self._turns = trial.cost_ms, self._turns + _TURNS
        return self._adopt(
            trial.shares,
            f"taken back: steps of {step_ms:.1f} ms, {trial.step_ms - trial.gain_ms:.1f} predicted, "
            f"{trial.step_ms:.1f} before",
        )

    def _better(self, least: int, step_ms: float) -> Change | None:
        """Returns better shares by what at least so many steps show."""
        shares = np.array(self.shares)
        noise = self._noise()
        for window in _WINDOWS:
            if not min(least, _WINDOWS[-1]) <= window <= len(self._ms):
                continue
            cost, fixed, _ = self._medians(window)
            divided = np.array(divide(sum(self.shares), cost, fixed))
            now, new = fixed + cost * shares, fixed + cost * divided
            slowest, slowest_new = int(now.argmax()), int(new.argmax())
            gain = float(now[slowest] - new[slowest_new])
            error = float(np.hypot(now[slowest] * noise[slowest], new[slowest_new] * noise[slowest_new])) / window**0.5
            if gain < _LEAST_GAIN * step_ms or gain < _SIGMAS * error:
                continue
            self._trial = _Trial(self.shares, step_ms, gain, cost)
            self._turns += bool((divided - shares) @ self._move < 0)
            costs = ", ".join(f"{ms:.3g}" for ms in cost)
            return self._adopt(
                tuple(divided.tolist()),
                f"a sequence takes {costs} ms by rank; steps of {step_ms - gain:.1f} ms predicted, now {step_ms:.1f}",
            )
        return None

    def _adopt(self, shares: tuple[int, ...], why: str) -> Change:
        self._move = np.subtract(shares, self.shares)
        self.shares = shares
        self._forget()
        return Change(shares, why)

    def _medians(self, window: int) -> tuple[Floats, Floats, float]:
        """Returns, over the last steps, the ms of a sequence and of other work, by rank, and those of a step."""
        computed, other, longest = np.median(self._ms[-window:], axis=0).T
        return computed / np.array(self.shares), other, float(longest[0])

    def _noise(self) -> Floats:
        """Returns the standard error, by rank, of a median of one step: a fraction. Over all steps that are kept."""
        own = np.array(self._ms)[:, :, :2].sum(2)
        middle = np.median(own, axis=0)
        deviation = 1.4826 * np.median(np.abs(own - middle), axis=0)  # a normal distribution's standard deviation
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
