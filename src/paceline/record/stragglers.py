"""Finds the ranks that others wait for, what they are slow in, and what the waiting costs.

Step times do not show it: all ranks wait for the slowest, so their steps take equally long. A rank's own work does
(data, forward, backward and update, without waits), compared with the median rank's. A rank that computes more
sequences may take proportionally longer.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from paceline.base import units

PER_SEQUENCE = ("data", "forward", "backward")  # phases that grow with the number of sequences
PER_STEP = ("optimizer", "other")
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


@dataclass
class _Excess:
    """How much one rank exceeded the median rank in one step, by phase."""

    step: int
    ms: Mapping[str, float]
    median_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

    def is_above(self, share: float) -> bool:
        return self.total_ms > max(share * sum(self.median_ms.values()), _LEAST_MS)


def _excess_windows() -> dict[_Test, deque[_Excess]]:
    return {test: deque(maxlen=_WINDOW) for test in (_OF_STEPS, _OF_MEANS)}


@dataclass
class _Rank:
    windows: dict[_Test, deque[_Excess]] = field(default_factory=_excess_windows)
    reported_by: _Test | None = None
    num_slow_steps: int = 0
    cost_ms: float = 0.0  # while it was reported
    stretch_ms: float = 0.0  # since the last report
    by_phase: dict[str, float] = field(default_factory=dict)

    def add(self, excess: _Excess) -> None:
        """Adds one step's."""
        self.windows[_OF_STEPS].append(excess)
        if self.reported_by and excess.total_ms > 0:
            self.cost_ms += excess.total_ms
            self.stretch_ms += excess.total_ms
            self.num_slow_steps += excess.is_above(self.reported_by.over_at[0])
            for phase, ms in excess.ms.items():
                self.by_phase[phase] = self.by_phase.get(phase, 0.0) + ms

    def report(self) -> list[_Excess]:
        """Begins to report the rank if it is slow. Returns what is above the median rank's time; nothing otherwise."""
        for test, excesses in self.windows.items():
            for share, least, window in test.report_at:
                above = [excess for excess in list(excesses)[-window:] if excess.is_above(share)]
                if len(above) >= least:
                    self.reported_by, self.stretch_ms = test, 0.0
                    return above
        return []

    def ends_report(self) -> bool:
        """Returns whether the report ends now."""
        assert self.reported_by is not None
        share, most, window = self.reported_by.over_at
        if sum(excess.is_above(share) for excess in list(self.windows[self.reported_by])[-window:]) > most:
            return False
        self.reported_by = None
        self.windows[_OF_MEANS].clear()  # they would report it again for what is over
        return True


class Stragglers:
    """Watches all ranks' own times, step by step. All ranks find the same from the same numbers."""

    def __init__(self, num_ranks: int):
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._unaveraged: list[tuple[Sequence[int], Mapping[str, Sequence[float]]]] = []  # at most _MEAN_STEPS steps
        self.num_steps = 0
        self.cost_ms = 0.0  # by which reported ranks made steps longer

    def observe(
        self, step: int, num_sequences: Sequence[int], parts: Mapping[str, Sequence[float]]
    ) -> list[Slow | Over]:
        """Adds one step: the sequences that each rank computed, and milliseconds by phase (PER_SEQUENCE and PER_STEP)
        and rank. Returns what is new."""
        self.num_steps += 1
        for rank, excess in zip(self._ranks, _excesses(step, num_sequences, parts), strict=True):
            rank.add(excess)
        self.cost_ms += max([0.0, *(rank.windows[_OF_STEPS][-1].total_ms for rank in self._ranks if rank.reported_by)])
        self._average(step, num_sequences, parts)
        found: list[Slow | Over] = []
        for index, rank in enumerate(self._ranks):
            if rank.reported_by:
                if rank.ends_report():
                    found.append(Over(index, rank.stretch_ms / 1e3))
            elif slow := rank.report():
                found.append(_slow(index, slow, parts))
        return found

    def _average(self, step: int, num_sequences: Sequence[int], parts: Mapping[str, Sequence[float]]) -> None:
        """Adds the means of the last _MEAN_STEPS steps, once there are so many."""
        self._unaveraged.append((num_sequences, parts))
        if len(self._unaveraged) < _MEAN_STEPS:
            return
        counts, rows = zip(*self._unaveraged, strict=True)
        mean_parts = {phase: _means([row[phase] for row in rows]) for phase in (*PER_SEQUENCE, *PER_STEP)}
        excesses = _excesses(step - _MEAN_STEPS + 1, _means(counts), mean_parts)
        for rank, excess in zip(self._ranks, excesses, strict=True):
            rank.windows[_OF_MEANS].append(excess)
        self._unaveraged.clear()

    def summary(self) -> list[tuple[int, int, str, float]]:
        """Returns for each rank that was ever reported: the rank, its number of slow steps since, their most frequent
        phase, and the seconds that the median rank would not have needed."""
        return [
            (index, rank.num_slow_steps, max(rank.by_phase, key=lambda p: rank.by_phase[p]), rank.cost_ms / 1e3)
            for index, rank in enumerate(self._ranks)
            if rank.by_phase
        ]


def none_named(work_ms: Mapping[int, float], when: str) -> str:
    """Returns the sentence to show of ranks of which none is reported. work_ms: of each rank in the mean step."""
    longest = max(work_ms, key=lambda rank: work_ms[rank])
    most, usual = units.milliseconds(work_ms[longest]), units.milliseconds(_lower_median(list(work_ms.values())))
    return f"No rank is named slow. {when} rank {longest} works longest, {most} of a step; the median rank {usual}."


def _excesses(step: int, counts: Sequence[float], parts: Mapping[str, Sequence[float]]) -> list[_Excess]:
    busy = [rank for rank, count in enumerate(counts) if count]
    usual: dict[str, list[float]] = {}  # phase -> by rank
    for phase in PER_SEQUENCE:
        each = _lower_median([parts[phase][rank] / counts[rank] for rank in busy])
        # A rank that is ready with the median rank delays nobody, however few its sequences are.
        ready = _lower_median([parts[phase][rank] for rank in busy])
        usual[phase] = [max(each * count, ready) for count in counts]
    for phase in PER_STEP:
        usual[phase] = [_lower_median(parts[phase])] * len(counts)
    found = []
    for rank, count in enumerate(counts):
        median_ms = {phase: by_rank[rank] for phase, by_rank in usual.items()}
        own = {phase: parts[phase][rank] - ms for phase, ms in median_ms.items() if count or phase in PER_STEP}
        found.append(_Excess(step, own, median_ms))
    return found


def _slow(rank: int, slow: Sequence[_Excess], parts: Mapping[str, Sequence[float]]) -> Slow:
    totals = {phase: sum(excess.ms.get(phase, 0.0) for excess in slow) for phase in parts}
    phase = max(totals, key=lambda name: totals[name])
    median_ms = sum(excess.median_ms[phase] for excess in slow) / len(slow)
    return Slow(rank, phase, median_ms + totals[phase] / len(slow), median_ms, slow[0].step)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(by_rank) for by_rank in zip(*rows, strict=True)]


def _lower_median(values: Sequence[float]) -> float:
    """Returns the smaller of the middle two: of two ranks the slower is compared with the faster."""
    return sorted(values)[(len(values) - 1) // 2]
