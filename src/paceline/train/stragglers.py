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
_MARGIN_FRAC = 0.25  # of what the median rank does: slower by so much is slow
_MARGIN_MS = 2.0  # below it a step's noise is as long as the step
_WINDOW = 8  # steps that are looked at together,
_NAMED_AT = 6  # so many of them slow: named,
_OVER_AT = 1  # so few: as fast as the others again


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

    @property
    def is_slow(self) -> bool:
        return self.total_ms > max(_MARGIN_FRAC * sum(self.median_ms.values()), _MARGIN_MS)


@dataclass
class _Watched:
    window: deque[_Excess] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    is_named: bool = False
    num_slow_steps: int = 0
    cost_ms: float = 0.0
    by_phase: dict[str, float] = field(default_factory=dict)


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
                watched.num_slow_steps += excess.is_slow
                for phase, ms in excess.ms.items():
                    watched.by_phase[phase] = watched.by_phase.get(phase, 0.0) + ms
        self.cost_ms += max((w.window[-1].total_ms for w in self._watched if w.is_named), default=0.0)
        for rank, watched in enumerate(self._watched):
            slow = [excess for excess in watched.window if excess.is_slow]
            if not watched.is_named and len(slow) >= _NAMED_AT:
                watched.is_named = True
                found.append(_slow(rank, slow, parts))
            elif watched.is_named and len(watched.window) == _WINDOW and len(slow) <= _OVER_AT:
                watched.is_named = False
                found.append(Over(rank, watched.cost_ms / 1e3))
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
        found = []
        for rank, count in enumerate(self._num_sequences):
            usual = {phase: median * (count if phase in PER_SEQUENCE else 1) for phase, median in medians.items()}
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
