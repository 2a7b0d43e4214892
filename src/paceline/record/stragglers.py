"""Finds the ranks that others wait for, what they are slow in, and what the waiting costs.

Step times do not show it: all ranks wait for the slowest, so their steps take equally long. A rank's own work does
(data, forward, backward and update, without waits), compared with the median rank's. A rank that computes more
sequences may take proportionally longer.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
import numpy.typing as npt

from paceline.base import units
from paceline.record.rows import Floats

# Legend: P phases, R ranks.
Mask = npt.NDArray[np.bool_]

PER_SEQUENCE = ("data", "forward", "backward")  # phases that grow with the number of sequences
PER_STEP = ("optimizer", "other")
_PHASES = (*PER_SEQUENCE, *PER_STEP)
_LEAST_MS = 2.0  # less is noise
_MEAN_STEPS = 25


@dataclass(frozen=True, eq=False)
class _Test:
    """When to report a rank by its last excesses, and when the report ends."""

    report_at: tuple[tuple[float, int, int], ...]  # own time above the median rank's by `share` in `least` of `window`
    over_at: tuple[float, int, int]  # at most `most` of the last `window` are above `share`


# Twice as slow is clear at once. Slightly slower takes longer to tell from noise: another program on the core can
# double the time of a dozen short steps.
_OF_STEPS = _Test(((1.0, 7, 8), (0.15, 27, 30)), (0.15, 1, 8))
# Of means over _MEAN_STEPS steps. Of two equal ranks one is the slower in each step, by as much as their times scatter;
# in the mean of many steps only a rank that is slower (a hot or older GPU) is.
_OF_MEANS = _Test(((0.05, 7, 8),), (0.05, 4, 8))
_WINDOW = 30  # the longest of both


@dataclass(frozen=True)
class Slow:
    """A rank that was slower than the median rank for several steps."""

    rank: int
    phase: str
    ms: float  # of that phase, mean of the slow steps in the window
    median_ms: float  # what the median rank would need for as many sequences
    since_step: int


@dataclass(frozen=True)
class Over:
    """A reported rank that is as fast as the others again."""

    rank: int
    cost_s: float  # time that the others waited for it since the report


class _Excess:
    """By how much each rank exceeded the median rank in one step, or in the mean of some, and what that one would have
    needed. Milliseconds."""

    def __init__(self, step: int, excess_PR: Floats, median_PR: Floats):
        self.step, self.excess_PR, self.median_PR = step, excess_PR, median_PR  # the first step
        self.total_R: Floats = excess_PR.sum(0)
        self._usual_R: Floats = median_PR.sum(0)

    def is_above(self, share: float) -> Mask:
        is_above_R: Mask = self.total_R > np.maximum(share * self._usual_R, _LEAST_MS)
        return is_above_R

    def forget(self, rank: int) -> None:
        self.excess_PR[:, rank] = self.total_R[rank] = 0.0


class Stragglers:
    """Watches all ranks' own times, step by step."""

    def __init__(self, num_ranks: int):
        self._windows = {test: deque[_Excess](maxlen=_WINDOW) for test in (_OF_STEPS, _OF_MEANS)}
        self._reported_by = {test: np.zeros(num_ranks, dtype=bool) for test in self._windows}
        self._unaveraged: list[tuple[Floats, Floats]] = []  # numbers of sequences and times, at most _MEAN_STEPS steps
        # While a rank was reported:
        self._num_slow_R = np.zeros(num_ranks, dtype=np.int64)
        self._cost_ms_PR = np.zeros((len(_PHASES), num_ranks))
        self._stretch_ms_R = np.zeros(num_ranks)  # since the last report
        self.num_steps = 0
        self.cost_ms = 0.0  # by which reported ranks made steps longer

    def observe(
        self, step: int, num_sequences: Sequence[int], parts: Mapping[str, Sequence[float] | Floats]
    ) -> list[Slow | Over]:
        """Adds one step: the sequences that each rank computed, and milliseconds by phase (PER_SEQUENCE and PER_STEP)
        and rank. Returns what is new. A step in which no rank computed a sequence does not count."""
        if not any(num_sequences):
            return []
        self.num_steps += 1
        counts_R, ms_PR = np.array(num_sequences, dtype=float), np.array([parts[phase] for phase in _PHASES])
        now = _compared(step, counts_R, ms_PR)
        self._windows[_OF_STEPS].append(now)
        if self._is_reported().any():
            self._add_cost(now)
        self._average(step, counts_R, ms_PR)
        is_reported_R = self._is_reported()
        ended: list[Slow | Over] = [self._end(rank) for rank in self._ends_of_reports()]
        begun: list[Slow | Over] = []
        for test, excesses in self._windows.items():
            for share, least, window in test.report_at:
                if not excesses or not excesses[-1].is_above(share).any():
                    continue  # no rank's number has grown
                slow_R = (self._num_above(test, share, window) >= least) & ~is_reported_R
                begun += [self._begin(int(rank), test, share, window) for rank in np.flatnonzero(slow_R)]
                is_reported_R |= slow_R
        return sorted(ended + begun, key=lambda news: news.rank)

    @property
    def reported(self) -> list[int]:
        """The ranks that are named slow now."""
        return [int(rank) for rank in np.flatnonzero(self._is_reported())]

    def _is_reported(self) -> Mask:
        is_reported_R: Mask = np.logical_or.reduce(list(self._reported_by.values()))
        return is_reported_R

    def summary(self) -> list[tuple[int, int, str, float]]:
        """Returns for each rank that was ever reported: the rank, its number of slow steps since, their most frequent
        phase, and the seconds that the median rank would not have needed."""
        cost_s_R, phase_R = self._cost_ms_PR.sum(0) / 1e3, self._cost_ms_PR.argmax(0)
        return [
            (int(rank), int(self._num_slow_R[rank]), _PHASES[phase_R[rank]], float(cost_s_R[rank]))
            for rank in np.flatnonzero(cost_s_R)
        ]

    def _add_cost(self, now: _Excess) -> None:
        """Adds what waiting for the reported ranks cost in this step."""
        longer_R = now.total_R > 0
        for test, reported_R in self._reported_by.items():
            waited_for_R = reported_R & longer_R
            self._num_slow_R += waited_for_R & now.is_above(test.over_at[0])
            self._cost_ms_PR += now.excess_PR * waited_for_R
            self._stretch_ms_R += now.total_R * waited_for_R
        self.cost_ms += float(np.max(now.total_R, where=self._is_reported(), initial=0.0))

    def _average(self, step: int, counts_R: Floats, ms_PR: Floats) -> None:
        """Adds the means of the last _MEAN_STEPS steps, once there are so many."""
        self._unaveraged.append((counts_R, ms_PR))
        if len(self._unaveraged) == _MEAN_STEPS:
            counts, times = zip(*self._unaveraged, strict=True)
            mean = _compared(step - _MEAN_STEPS + 1, np.mean(counts, axis=0), np.mean(times, axis=0))
            self._windows[_OF_MEANS].append(mean)
            self._unaveraged.clear()

    def _num_above(self, test: _Test, share: float, window: int) -> npt.NDArray[np.uint8]:
        """(R,): in how many of the last `window` a rank exceeded the median rank by this share."""
        num_above_R = np.zeros(len(self._stretch_ms_R), dtype=np.uint8)  # windows are short
        for excess in list(self._windows[test])[-window:]:
            num_above_R += excess.is_above(share)
        return num_above_R

    def _ends_of_reports(self) -> list[int]:
        """Returns the ranks whose reports end now."""
        over: set[int] = set()
        for test, reported_R in self._reported_by.items():
            share, most, window = test.over_at
            if reported_R.any():
                over.update(np.flatnonzero(reported_R & (self._num_above(test, share, window) <= most)).tolist())
        return sorted(over)

    def _end(self, rank: int) -> Over:
        for reported_R in self._reported_by.values():
            reported_R[rank] = False
        for mean in self._windows[_OF_MEANS]:  # they would report it again for what is over
            mean.forget(rank)
        return Over(rank, float(self._stretch_ms_R[rank]) / 1e3)

    def _begin(self, rank: int, test: _Test, share: float, window: int) -> Slow:
        """Begins a report, and describes the rank by those of the last that are above."""
        self._reported_by[test][rank] = True
        self._stretch_ms_R[rank] = 0.0
        slow = [excess for excess in list(self._windows[test])[-window:] if excess.is_above(share)[rank]]
        excess_ms_P = np.mean([excess.excess_PR[:, rank] for excess in slow], axis=0)
        median_ms_P = np.mean([excess.median_PR[:, rank] for excess in slow], axis=0)
        phase = int(excess_ms_P.argmax())
        median_ms = float(median_ms_P[phase])
        return Slow(rank, _PHASES[phase], median_ms + float(excess_ms_P[phase]), median_ms, slow[0].step)


def none_named(work_ms: Mapping[int, float], when: str) -> str:
    """Returns the sentence to show of ranks of which none is reported. work_ms: of each rank in the mean step."""
    longest = max(work_ms, key=lambda rank: work_ms[rank])
    most, usual = units.milliseconds(work_ms[longest]), units.milliseconds(median_low(work_ms.values()))
    return f"No rank is named slow. {when} rank {longest} works longest, {most} of a step; the median rank {usual}."


def _compared(step: int, counts_R: Floats, ms_PR: Floats) -> _Excess:
    """Compares each rank's times with what the median rank would need for as many sequences."""
    num, busy_R = len(PER_SEQUENCE), counts_R > 0
    each_P1 = _lower_median(ms_PR[:num, busy_R] / counts_R[busy_R])
    # A rank that is ready with the median rank delays nobody, however few its sequences are.
    ready_P1 = _lower_median(ms_PR[:num, busy_R])
    median_PR = np.empty_like(ms_PR)
    median_PR[:num] = np.maximum(each_P1 * counts_R, ready_P1)
    median_PR[num:] = _lower_median(ms_PR[num:])
    excess_PR = ms_PR - median_PR
    excess_PR[:num, ~busy_R] = 0.0
    return _Excess(step, excess_PR, median_PR)


def _lower_median(values_PR: Floats) -> Floats:
    """(P, 1): of each phase, the smaller of the middle two: of two ranks the slower is compared with the faster."""
    return np.sort(values_PR, axis=1)[:, (values_PR.shape[1] - 1) // 2, None]
