"""What a step reports: its loss, each rank's times, and gradients that were not finite."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from paceline.base.clock import clip_intervals, union_ms
from paceline.sync.strategy import Strategy
from paceline.world.device_clock import DeviceClock, Stamp
from paceline.world.group import Group


class StepTimes(NamedTuple):
    """The parts of one rank's step."""

    data_ms: float
    forward_ms: float
    backward_ms: float
    optim_ms: float  # clipping and update
    comm_ms: float  # with at least one collective under way
    exposed_comm_ms: float  # the rank waited for a collective
    comm_cpu_ms: float  # CPU time of the threads that carry transfers
    comm_bytes: float  # sent by this rank in transfers that began in this step
    step_ms: float  # from the step's beginning until the read
    codec_ms: float = 0.0  # CPU time of coding messages, in the background, too; the other parts contain it

    @property
    def compute_ms(self) -> float:
        """Time before the rank had to wait for other ranks' gradients."""
        return self.data_ms + self.forward_ms + self.backward_ms

    def with_update(self, update_ms: float) -> "StepTimes":
        """Returns times before the update, with this time for it."""
        return self._replace(optim_ms=self.optim_ms + update_ms, step_ms=self.step_ms + update_ms)


@dataclass(frozen=True)
class Trouble:
    """Why no rank updated: where a sum of gradients became not finite."""

    parameter: str | None  # the first with such a sum; None: only the norm overflowed
    ranks: list[int] | None  # with such gradients before the sum; None: not known
    is_empty: bool = False  # the gradients are finite: all weights of the step were 0

    def __str__(self) -> str:
        if self.is_empty:
            return "all weights of the step were 0"
        text = f"the gradient of {self.parameter}" if self.parameter else "the gradient's norm"
        if self.ranks is None:
            return text
        return text + (f", by rank {', '.join(map(str, self.ranks))}" if self.ranks else ", by no rank alone")


NO_WEIGHT = Trouble(None, None, is_empty=True)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step; the same on all ranks, except `times`."""

    loss: float
    """Mean over the whole global batch; not a number if all weights were 0."""
    grad_norm: float
    """Norm of the mean loss's gradient, before clipping."""
    weight: float
    """Weight of the global batch: samples, or the sum of the weights given to `backward`."""
    weights: list[float]
    """Of each rank's micro-batches, by rank."""
    skipped: Trouble | None
    """Set if a gradient was not finite, or all weights were 0, so that no rank updated."""
    stop_reason: str | None
    """Why to stop, once a rank's stop flag is set: "SIGTERM on rank 0". See Replica.steps."""
    numbers: list[list[float]]
    """Those given to `finish`, by rank."""
    times: StepTimes
    """Times of this rank."""
    by_rank: list[StepTimes]
    """Times of each rank, shared before the update; that of the step before stands for it."""


class Exchanged(NamedTuple):
    """What each rank all-gathers once a step, besides its times, the parameters it used, and `numbers`."""

    loss_sum: float  # sum of losses times weights
    weight: float
    vote: float  # stop flag
    least_rows: float  # of its unweighted micro-batches; -1: none
    most_rows: float
    digest: float  # of the first micro-batch of the first step
    drawn_from: float  # digest of the global generators after Step.draw; 0: not used
    total: float  # weight of the global batch, if the script gave it; 0: it did not
    num_losses: float  # that had a backward pass
    settings: float  # digest of learning rates and the like (agreement.py)
    weights: float  # digest of weights and buffers before the step; 0: not compared in this step


class Rows(NamedTuple):
    """What the ranks have all-gathered, by rank."""

    exchanged: list[Exchanged]
    times: list[StepTimes]
    used: list[list[float]]  # see Gradients.reduce; empty if the total was given
    numbers: list[list[float]]


def exchange(
    group: Group, exchanged: Exchanged, times: StepTimes, used: Sequence[float], numbers: Sequence[float]
) -> Rows:
    """Makes a step's one small all-gather, 8 bytes a number."""
    rows = [iter(row) for row in group.share([*exchanged, *times, *used, *map(float, numbers)])]
    return Rows(
        [Exchanged(*islice(row, len(exchanged))) for row in rows],
        [StepTimes(*islice(row, len(times))) for row in rows],
        [list(islice(row, len(used))) for row in rows],
        [list(row) for row in rows],
    )


def find_trouble(sync: Strategy, group: Group) -> Trouble:
    """Finds the parameter and the ranks of a gradient that is not finite. Collective, between reduce and publish."""
    rows = group.share_json(sync.not_finite())
    parameter = next((name for name, _ in rows if name), None)
    known = all(is_bad is not None for _, is_bad in rows)
    return Trouble(parameter, [rank for rank, (_, is_bad) in enumerate(rows) if is_bad] if known else None)


class StepClock:
    def __init__(self, clock: DeviceClock, group: Group, take_codec_ms: Callable[[], float]):
        self._clock, self._group, self._take_codec_ms = clock, group, take_codec_ms
        self._began_s = time.perf_counter()
        self._start = clock.stamp()
        self._marks: list[tuple[str, Stamp]] = []  # not read yet
        self._spent = dict.fromkeys(("data", "forward", "backward", "reduce", "optim"), 0.0)
        self._transfers: list[tuple[float, float]] = []
        self._waits: list[tuple[float, float]] = []
        self._read_ms = self._num_bytes = self._codec_ms = self._cpu_s = 0.0

    def end(self, part: str) -> None:
        self._marks.append((part, self._clock.stamp()))

    def times(self) -> StepTimes:
        """Returns the times until now, after waiting for the device. Waiting for other ranks counts as exposed
        communication only. Takes the group's traffic."""
        self._clock.finish()
        traffic = self._group.take_traffic()
        ms = partial(self._clock.ms, self._start)
        self._transfers += [(ms(each.start), ms(each.end)) for each in traffic.transfers if each.end is not None]
        waits = [(ms(start), ms(end)) for start, end in traffic.waits]
        self._waits += clip_intervals(waits, 0.0, math.inf)  # not what a script's own calls waited before this step
        self._num_bytes += traffic.num_bytes
        self._codec_ms += self._take_codec_ms()
        self._cpu_s += traffic.cpu_s
        for part, stamp in self._marks:
            before, self._read_ms = self._read_ms, ms(stamp)
            waited = clip_intervals(self._waits, before, self._read_ms)
            self._spent[part] += self._read_ms - before - sum([end - start for start, end in waited])
        self._marks.clear()
        spent = self._spent
        return StepTimes(
            data_ms=spent["data"],
            forward_ms=spent["forward"],
            backward_ms=spent["backward"],
            optim_ms=spent["reduce"] + spent["optim"],
            comm_ms=union_ms([*self._transfers, *self._waits]),  # a rank may wake a moment after a transfer ends
            exposed_comm_ms=sum([end - start for start, end in self._waits]),
            comm_cpu_ms=self._cpu_s * 1e3,
            comm_bytes=self._num_bytes,
            step_ms=(time.perf_counter() - self._began_s) * 1e3,
            codec_ms=self._codec_ms,
        )
