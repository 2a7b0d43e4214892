"""Who is slow, in what, and what waiting for it costs.

Step times cannot tell: everybody waits for the slowest, so all ranks' steps are equally long. What a rank did for
itself can: its data, forward, backward and update without the waits in them, compared with the median rank's. Ranks
that compute more sequences may take longer for them, in proportion.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.data.plan import BatchPlan

PER_SEQUENCE = ("data", "forward", "backward")  # what grows with the sequences a rank computes
PER_STEP = ("optimizer", "other")
# Named is who exceeds the median rank by this share of what that does, in so many of the last so many steps. Twice as
# slow shows at once. A little slower, a hot or an older GPU, takes longer to tell from the noise of a shared machine:
# another program that wants the same core for half a second makes a rank up to twice as slow for a dozen short steps.
_NAMED_AT = ((1.0, 7, 8), (0.15, 27, 30))
_OVER_AT = (0.15, 1, 8)  # as fast as the others again: in at most so many of the last so many steps
_LEAST_MS = 2.0  # below it a step's noise is as long as the step
_WINDOW = max(window for _, _, window in _NAMED_AT)


@dataclass(frozen=True)
class Slow:
    """A rank that has been slower than the median rank for several steps."""

    rank: int
    phase: str
    ms: float  # that phase took it, mean of the slow steps in the window
    median_ms: float  # and would have taken the median rank, with as many sequences
    since_step: int


@dataclass(frozen=True)
class Over:
    """A rank that was named, and is as fast as the others again."""

    rank: int
    cost_s: float  # what the others waited for it since it was named


@dataclass
class _Excess:
    """By how much one rank exceeded the median rank in one step, by phase."""

    step: int
    ms: Mapping[str, float]
    median_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

    def is_above(self, share: float) -> bool:
        """Whether it is more than this share of the median rank's time."""
        return self.total_ms > max(share * sum(self.median_ms.values()), _LEAST_MS)


@dataclass
class _Watched:
    window: deque[_Excess] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    is_named: bool = False
    num_slow_steps: int = 0
    cost_ms: float = 0.0  # in all stretches in which it was named
    stretch_ms: float = 0.0  # in this one
    by_phase: dict[str, float] = field(default_factory=dict)

    def slow_steps(self) -> list[_Excess]:
        """The steps for which the rank is to be named; none where it is not slow."""
        for share, least, window in _NAMED_AT:
            above = [excess for excess in list(self.window)[-window:] if excess.is_above(share)]
            if len(above) >= least:
                return above
        return []

    def is_over(self) -> bool:
        """Whether a rank that was named is as fast as the others again."""
        share, most, window = _OVER_AT
        return sum(excess.is_above(share) for excess in list(self.window)[-window:]) <= most


class Stragglers:
    """Watches every rank's own times, step by step. All ranks come to the same findings from the same numbers."""

    def __init__(self, plan: BatchPlan):
        ranks = range(plan.world_size)
        self._num_sequences = [sum(len(positions) for positions in plan.micro_batches(rank)) for rank in ranks]
        self._watched = [_Watched() for _ in ranks]
        self.num_steps = 0
        self.cost_ms = 0.0  # what steps were longer by, since ranks were named

    def observe(self, step: int, parts: Mapping[str, Sequence[float]]) -> list[Slow | Over]:
        """Takes in one step: milliseconds by phase (PER_SEQUENCE and PER_STEP) and rank. Returns what is new."""
        self.num_steps += 1
        found: list[Slow | Over] = []
        for watched, excess in zip(self._watched, self._excesses(step, parts), strict=True):
            watched.window.append(excess)
            if watched.is_named and excess.total_ms > 0:
                watched.cost_ms += excess.total_ms
                watched.stretch_ms += excess.total_ms
                watched.num_slow_steps += excess.is_above(_OVER_AT[0])
                for phase, ms in excess.ms.items():
                    watched.by_phase[phase] = watched.by_phase.get(phase, 0.0) + ms
        self.cost_ms += max([0.0, *(watched.window[-1].total_ms for watched in self._watched if watched.is_named)])
        for rank, watched in enumerate(self._watched):
            if watched.is_named and watched.is_over():
                watched.is_named = False
                found.append(Over(rank, watched.stretch_ms / 1e3))
            elif not watched.is_named and (slow := watched.slow_steps()):
                watched.is_named, watched.stretch_ms = True, 0.0
                found.append(_slow(rank, slow, parts))
        return found

    def summary(self) -> list[tuple[int, int, str, float]]:
        """Returns, for each rank that was ever named: (rank, steps in which it was slow since, the phase most of it
        was in, seconds that the median rank would not have needed)."""
        return [
            (
                rank,
                watched.num_slow_steps,
                max(watched.by_phase, key=lambda p: watched.by_phase[p]),
                watched.cost_ms / 1e3,
            )
            for rank, watched in enumerate(self._watched)
            if watched.by_phase
        ]

    def _excesses(self, step: int, parts: Mapping[str, Sequence[float]]) -> list[_Excess]:
        medians = {phase: _lower_median(parts[phase]) for phase in PER_STEP}
        for phase in PER_SEQUENCE:
            medians[phase] = _lower_median(
                [ms / count for ms, count in zip(parts[phase], self._num_sequences, strict=True) if count]
            )
        # Who is ready with the median rank keeps nobody waiting, however few its sequences: a pass costs something by
        # itself, and a rank may make one for company alone.
        ready = {
            phase: _lower_median([ms for ms, count in zip(parts[phase], self._num_sequences, strict=True) if count])
            for phase in PER_SEQUENCE
        }
        found = []
        for rank, count in enumerate(self._num_sequences):
            usual = {phase: max(median * count, ready[phase]) for phase, median in medians.items() if phase in ready}
            usual |= {phase: medians[phase] for phase in PER_STEP}
            own = {phase: parts[phase][rank] - ms for phase, ms in usual.items() if count or phase in PER_STEP}
            found.append(_Excess(step, own, usual))
        return found


def _slow(rank: int, slow: Sequence[_Excess], parts: Mapping[str, Sequence[float]]) -> Slow:
    totals = {phase: sum(excess.ms.get(phase, 0.0) for excess in slow) for phase in parts}
    phase = max(totals, key=lambda name: totals[name])
    median_ms = sum(excess.median_ms[phase] for excess in slow) / len(slow)
    return Slow(rank, phase, median_ms + totals[phase] / len(slow), median_ms, slow[0].step)


def _lower_median(values: Sequence[float]) -> float:
    """Of two the smaller: with two ranks the faster one is what the other is measured by."""
    return sorted(values)[(len(values) - 1) // 2]
