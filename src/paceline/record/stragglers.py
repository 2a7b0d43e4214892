"""Finds the ranks that others wait for, what they are slow in, and what the waiting costs.

Step times do not show it: all ranks wait for the slowest, so their steps take equally long. A rank's own work does
(data, forward, backward and update, without waits), compared with the median rank's. A rank that computes more
sequences may take proportionally longer.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PER_SEQUENCE = ("data", "forward", "backward")  # phases that grow with the number of sequences
PER_STEP = ("optimizer", "other")
# Report a rank whose own time exceeds the median rank's by `share` in `least` of the last `window` steps. Twice as slow
# is clear at once. Slightly slower (a hot or older GPU) takes longer to tell from noise: another program on the core
# can double the time of a dozen short steps.
_REPORT_AT = ((1.0, 7, 8), (0.15, 27, 30))
_OVER_AT = (0.15, 1, 8)  # the report ends when at most 1 of the last 8 steps is slow
_LEAST_MS = 2.0  # less is noise
_WINDOW = max(window for _, _, window in _REPORT_AT)


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


@dataclass
class _Rank:
    window: deque[_Excess] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    is_reported: bool = False
    num_slow_steps: int = 0
    cost_ms: float = 0.0  # while it was reported
    stretch_ms: float = 0.0  # since the last report
    by_phase: dict[str, float] = field(default_factory=dict)

    def add(self, excess: _Excess) -> None:
        self.window.append(excess)
        if self.is_reported and excess.total_ms > 0:
            self.cost_ms += excess.total_ms
            self.stretch_ms += excess.total_ms
            self.num_slow_steps += excess.is_above(_OVER_AT[0])
            for phase, ms in excess.ms.items():
                self.by_phase[phase] = self.by_phase.get(phase, 0.0) + ms

    def slow_steps(self) -> list[_Excess]:
        """Returns the steps for which to report the rank; none if it is not slow."""
        for share, least, window in _REPORT_AT:
            above = [excess for excess in list(self.window)[-window:] if excess.is_above(share)]
            if len(above) >= least:
                return above
        return []

    def is_over(self) -> bool:
        share, most, window = _OVER_AT
        return sum(excess.is_above(share) for excess in list(self.window)[-window:]) <= most


class Stragglers:
    """Watches all ranks' own times, step by step. All ranks find the same from the same numbers."""

    def __init__(self, num_ranks: int):
        self._ranks = [_Rank() for _ in range(num_ranks)]
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
        self.cost_ms += max([0.0, *(rank.window[-1].total_ms for rank in self._ranks if rank.is_reported)])
        found: list[Slow | Over] = []
        for index, rank in enumerate(self._ranks):
            if rank.is_reported and rank.is_over():
                rank.is_reported = False
                found.append(Over(index, rank.stretch_ms / 1e3))
            elif not rank.is_reported and (slow := rank.slow_steps()):
                rank.is_reported, rank.stretch_ms = True, 0.0
                found.append(_slow(index, slow, parts))
        return found

    def summary(self) -> list[tuple[int, int, str, float]]:
        """Returns for each rank that was ever reported: the rank, its number of slow steps since, their most frequent
        phase, and the seconds that the median rank would not have needed."""
        return [
            (index, rank.num_slow_steps, max(rank.by_phase, key=lambda p: rank.by_phase[p]), rank.cost_ms / 1e3)
            for index, rank in enumerate(self._ranks)
            if rank.by_phase
        ]


def _excesses(step: int, counts: Sequence[int], parts: Mapping[str, Sequence[float]]) -> list[_Excess]:
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


def _lower_median(values: Sequence[float]) -> float:
    """Returns the smaller of the middle two: of two ranks the slower is compared with the faster."""
    return sorted(values)[(len(values) - 1) // 2]
