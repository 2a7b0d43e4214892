"""One optimizer step, top to bottom: tokens -> loss -> gradients -> all-reduce -> update."""

import math
from dataclasses import dataclass, field

import torch

from paceline.base import seeds
from paceline.base.clock import Interval, clip_intervals, union_ms
from paceline.data.loader import Loader, MicroBatch
from paceline.data.prefetch import Prefetcher
from paceline.model.gpt import GPT
from paceline.optim.clip import clip_
from paceline.optim.optimizer import Optimizer
from paceline.sync.strategy import Strategy
from paceline.train.scaler import LossScaler
from paceline.world.device import DeviceClock, Stamp
from paceline.world.group import Group


@dataclass
class Replica:
    """This rank's copy of what learns. After every step it is bit-identical on all ranks."""

    model: GPT
    sync: Strategy
    optimizer: Optimizer
    scaler: LossScaler
    dropout_seed: int


@dataclass
class StepTimes:
    """Where one rank's step went, in milliseconds; filled at the end of the step."""

    data_ms: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    comm_ms: float = 0.0
    exposed_comm_ms: float = 0.0
    optim_ms: float = 0.0
    comm_bytes: int = 0

    @property
    def compute_ms(self) -> float:
        """What the rank did before it first waited for others."""
        return self.data_ms + self.forward_ms + self.backward_ms


@dataclass
class StepResult:
    """What one rank knows after its step, before the ranks exchange it."""

    loss_sum: float  # nats over this rank's tokens, not yet summed over ranks
    grad_norm: float
    skipped: bool
    times: StepTimes = field(default_factory=StepTimes)


def train_step(
    replica: Replica,
    loader: Loader | Prefetcher,
    group: Group,
    clock: DeviceClock,
    *,
    step: int,
    lr: float,
    max_norm: float,
) -> StepResult:
    """Makes the update of `step` (from 0) on this rank; every rank of the world calls it with the same arguments.

    Collective: the gradients' all-reduces. A gradient that is not finite is so on every rank after them, so all skip
    the update together without asking.
    """
    sync, scaler = replica.sync, replica.scaler
    marks = StepMarks(clock)
    num_tokens = loader.plan.global_batch_size * loader.seq_len  # of the whole world's step, known before backward
    micro_batches = loader.micro_batches(step)
    marks.end("data")
    loss_sum = torch.zeros((), device=loader.device)
    for i, micro_batch in enumerate(micro_batches):
        with sync.accumulate(last=i == len(micro_batches) - 1):  # communicate on the last micro-step only
            keys = dropout_keys(replica, micro_batch)
            loss = replica.model(micro_batch.tokens, micro_batch.targets, keys, micro_batch.documents)
            marks.end("forward")
            (loss * (scaler.scale / num_tokens)).backward()  # gradients are summed over ranks: no mean of means
            marks.end("backward")
        loss_sum += loss.detach()
    computed = clock.stamp()
    gradients = sync.reduce()
    marks.end("wait")
    grad_norm = clip_(gradients, max_norm, scaler.scale)
    skipped = not math.isfinite(grad_norm)
    if not skipped:
        replica.optimizer.update(lr)
    scaler.observe(skipped)
    marks.end("optim")
    sync.publish()
    result = StepResult(float(loss_sum), grad_norm, skipped)
    clock.finish()
    result.times = marks.times(group, computed)
    return result


def dropout_keys(replica: Replica, micro_batch: MicroBatch) -> torch.Tensor | None:
    """Returns (batch,) int64: a key for each sequence, from the run's seed and the sequence's place in the run.

    So a mask belongs to a sequence, not to the rank that happens to compute it.
    """
    if replica.model.config.dropout == 0.0:
        return None
    return micro_batch.positions + replica.dropout_seed


def dropout_seed(seed: int) -> int:
    """Returns the offset of a run's dropout keys."""
    return seeds.key(seed, "dropout") >> 8  # room for positions: keys stay in 63 bits


class StepMarks:
    """Stamps at the borders of a step's parts, read only when the step is over."""

    def __init__(self, clock: DeviceClock):
        self._clock = clock
        self._start = clock.stamp()
        self._marks: list[tuple[str, Stamp]] = []

    def end(self, part: str) -> None:
        """Says that since the last mark this rank was in `part`."""
        self._marks.append((part, self._clock.stamp()))

    def times(self, group: Group, computed: Stamp) -> StepTimes:
        """Returns the sums by part, and of the group's transfers what lies inside this step.

        Exposed is what a collective was under way after backward had ended, and no update ran: nothing hid it.
        """
        spent = {"data": 0.0, "forward": 0.0, "backward": 0.0, "wait": 0.0, "optim": 0.0}
        before = self._start
        waits: list[Interval] = []
        for part, stamp in self._marks:
            spent[part] += self._clock.ms(before, stamp)
            if part == "wait":
                waits.append((self._clock.ms(self._start, computed), self._clock.ms(self._start, stamp)))
            before = stamp
        transfers = group.take_transfers()
        intervals = [
            (self._clock.ms(self._start, t.start), self._clock.ms(self._start, t.end))
            for t in transfers
            if t.end is not None
        ]
        return StepTimes(
            data_ms=spent["data"],
            forward_ms=spent["forward"],
            backward_ms=spent["backward"],
            comm_ms=union_ms(intervals),
            exposed_comm_ms=sum(union_ms(clip_intervals(intervals, *wait)) for wait in waits),
            optim_ms=spent["optim"],
            comm_bytes=sum(t.num_bytes for t in transfers),
        )
