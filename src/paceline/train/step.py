"""One optimizer step, top to bottom: tokens -> loss -> gradients -> all-reduce -> update."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.base import seeds
from paceline.base.clock import clip_intervals, union_ms
from paceline.data.loader import Loader, MicroBatch
from paceline.data.prefetch import Prefetcher
from paceline.model.gpt import GPT
from paceline.optim.clip import clip_
from paceline.optim.optimizer import Optimizer
from paceline.sync.strategy import Strategy
from paceline.train.scaler import LossScaler
from paceline.train.trouble import Trouble, poison_a_gradient, whose_trouble
from paceline.world.device import DeviceClock, Stamp
from paceline.world.group import Group, Traffic

At = Callable[[str], str | None]  # told each phase as it begins; answers with a fault that is to be injected there


@dataclass
class Replica:
    """This rank's copy of what learns. After every step it is bit-identical on all ranks."""

    model: GPT
    sync: Strategy
    optimizer: Optimizer
    scaler: LossScaler
    dropout_seed: int
    before_update: Callable[[], None] = lambda: None  # returns when weights and state may change


@dataclass
class StepTimes:
    """Where one rank's step went, in milliseconds; filled at the end of the step."""

    data_ms: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optim_ms: float = 0.0
    comm_ms: float = 0.0
    exposed_comm_ms: float = 0.0
    comm_bytes: float = 0.0

    @property
    def compute_ms(self) -> float:
        """What the rank did for itself before it had to wait for others' gradients."""
        return self.data_ms + self.forward_ms + self.backward_ms

    def add(self, traffic: Traffic, clock: DeviceClock) -> None:
        """Counts what passed the group. Exposed is when this rank stood still for it: nothing hid it."""
        under_way = [(transfer.start, transfer.end) for transfer in traffic.transfers if transfer.end is not None]
        both = [*under_way, *traffic.waits]  # a rank may wake a moment after what it waited for has ended
        self.comm_ms += union_ms([(clock.ms(both[0][0], start), clock.ms(both[0][0], end)) for start, end in both])
        self.exposed_comm_ms += sum(clock.ms(start, end) for start, end in traffic.waits)
        self.comm_bytes += sum(transfer.num_bytes for transfer in traffic.transfers)


@dataclass
class StepResult:
    """What one rank knows after its step, before the ranks exchange it."""

    loss_sum: float  # nats over this rank's tokens, not yet summed over ranks
    grad_norm: float
    skipped: bool
    trouble: Trouble | None = None
    times: StepTimes = field(default_factory=StepTimes)


def train_step(
    replica: Replica,
    loader: Loader | Prefetcher,
    group: Group,
    clock: DeviceClock,
    at: At,
    *,
    step: int,
    lr: float,
    max_norm: float,
) -> StepResult:
    """Makes the update of `step` (from 0) on this rank; every rank of the world calls it with the same arguments.

    Collective: the gradients' sums. A gradient that is not finite makes the same norm not finite on every rank, so all
    skip the update together without asking.
    """
    sync, scaler = replica.sync, replica.scaler
    marks = StepMarks(clock)
    num_tokens = loader.plan.global_batch_size * loader.seq_len  # of the whole world's step, known before backward
    at("data")
    micro_batches = loader.micro_batches(step)
    num_passes = loader.plan.num_micro_batches(0) if sync.lockstep else len(micro_batches)
    marks.end("data")
    loss_sum = torch.zeros((), device=loader.device)
    for i in range(num_passes):
        micro_batch = micro_batches[i] if i < len(micro_batches) else stand_in(loader)
        weight = float(i < len(micro_batches))  # what only keeps others company counts for nothing
        with sync.accumulate(last=i == num_passes - 1):  # communicate on the last micro-step only
            at("forward")
            keys = dropout_keys(replica, micro_batch)
            loss = replica.model(micro_batch.tokens, micro_batch.targets, keys, micro_batch.documents)
            marks.end("forward")
            if at("backward") == "nan":
                poison_a_gradient(replica.model)
            (
                loss * (weight * scaler.scale / num_tokens)
            ).backward()  # gradients are summed over ranks: no mean of means
            marks.end("backward")
        loss_sum += weight * loss.detach()
    at("reduce")
    gradients = sync.reduce()
    grad_norm = clip_(gradients, max_norm, scaler.scale, sync.total)
    skipped = not math.isfinite(grad_norm)
    marks.end("reduce")
    at("update")
    if not skipped:
        replica.before_update()
        replica.optimizer.update(lr)
    trouble = whose_trouble(sync, group) if skipped else None
    scaler.observe(skipped)
    marks.end("optim")
    at("publish")
    sync.publish()
    result = StepResult(float(loss_sum), grad_norm, skipped, trouble)
    clock.finish()
    result.times = marks.times(group.take_traffic())
    return result


def dropout_keys(replica: Replica, micro_batch: MicroBatch) -> torch.Tensor | None:
    """Returns (batch,) int64: a key for each sequence, from the run's seed and the sequence's place in the run.

    So a mask belongs to a sequence, not to the rank that happens to compute it.
    """
    if replica.model.config.dropout == 0.0:
        return None
    return micro_batch.positions + replica.dropout_seed


def stand_in(loader: Loader | Prefetcher) -> MicroBatch:
    """Returns a sequence for a pass that is made because the other ranks make one."""
    tokens = torch.zeros(1, loader.seq_len, dtype=torch.int64, device=loader.device)
    return MicroBatch(tokens, tokens, tokens[:, 0], tokens.int())


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

    def times(self, traffic: Traffic) -> StepTimes:
        """Returns the sums by part, without what this rank waited for others in them, which counts as exposed
        communication."""
        spent = {"data": 0.0, "forward": 0.0, "backward": 0.0, "reduce": 0.0, "optim": 0.0}
        waits = [(self._clock.ms(self._start, a), self._clock.ms(self._start, b)) for a, b in traffic.waits]
        before = 0.0
        for part, stamp in self._marks:
            now = self._clock.ms(self._start, stamp)
            waited_ms = sum(end - start for start, end in clip_intervals(waits, before, now))
            spent[part] += now - before - waited_ms
            before = now
        times = StepTimes(
            data_ms=spent["data"],
            forward_ms=spent["forward"],
            backward_ms=spent["backward"],
            optim_ms=spent["reduce"] + spent["optim"],
        )
        times.add(traffic, self._clock)
        return times
