"""What summing a model's gradients takes: computed, fitted, measured alone, and measured beside backward.

The gradients travel as the `ddp` strategy sends them: cut into buckets by the model's real shapes, each all-reduced as
one, all begun before the first is waited for. Beside backward they share the processors with it, and a rank that comes
to a bucket later than another makes that one wait: both lengthen what training calls `comm_ms`, so a few real steps,
on random tokens, say what that will be.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.bench.link_fit import Fit, bus_factor
from paceline.bench.link_times import Stopwatch
from paceline.config import Config
from paceline.data.loader import Loader, MicroBatch
from paceline.data.plan import BatchPlan
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build
from paceline.optim.optimizer import Optimizer
from paceline.sync.buckets import backward_order, cut
from paceline.sync.ddp import BucketedSync
from paceline.train.scaler import LossScaler
from paceline.train.step import Replica, dropout_seed, train_step
from paceline.train.tell import Exchanged
from paceline.world.device import DeviceClock, choose_dtype

_CPU_MICRO_BATCH_TOKENS = 4096  # train/resolve.py's choice, for a CPU
_LEAST_RUNS = 2
_MOST_STEPS = 40
_LR, _MAX_NORM = 1e-6, 1.0


@dataclass(frozen=True)
class ModelTimes:
    """Seconds that the all-reduce of a model's gradients takes, once a step. None: not measured, for lack of time.

    alone_s is the sum of computed_s, messages_s, copies_s, latency_s and together_s.
    """

    parameters: int
    gradient_bytes: int
    bucket_bytes: tuple[int, ...]
    wire_bytes: float  # that each rank sends
    computed_s: float  # wire_bytes over the link's bandwidth: an ideal ring
    messages_s: float  # what the backend's messages, both ways at once, add to that
    copies_s: float  # what the all-reduce adds to messages for each byte: copies, additions, its algorithm
    latency_s: float  # alpha, once a bucket
    fitted_s: float  # the four together: each bucket by the fit, one after the other
    alone_s: float | None  # measured: all buckets begun, then waited for
    together_s: float | None  # alone_s - fitted_s: below zero where buckets under way together help each other
    whole_s: float | None  # measured: one all-reduce of everything
    beside_s: float | None  # measured: `comm_ms` of steps on random tokens; what training is predicted to show
    exposed_s: float | None  # the part of it that backward did not hide
    num_steps: int  # behind these two; medians
    tokens_per_rank: int  # of a micro-batch in these steps

    @property
    def predicted_s(self) -> float:
        """The best there is: measured beside backward, else alone, else by the fit."""
        return next(seconds for seconds in (self.beside_s, self.alone_s, self.fitted_s) if seconds is not None)


def resolved_model(config: Config) -> ModelConfig:
    """Returns the model's config with positions from the sequence, and the vocabulary that text would be given.

    No data is read for it: a vocabulary that comes from token shards has to be named. Raises UserError for no model.
    """
    resolved = config.replace(
        "model",
        vocab_size=config.model.vocab_size or config.data.tokenizer_vocab,
        n_positions=config.model.n_positions or config.data.seq_len,
    )
    resolved.model.check()
    return resolved.model


def bucket_elements(model: ModelConfig, bucket_mb: float) -> list[int]:
    """Returns the elements of each bucket, in the order in which they travel. No memory is taken for the model."""
    with torch.device("meta"):
        members = backward_order(GPT(model))
    return [sum(parameter.numel() for _, parameter in chunk) for chunk in cut(members, int(bucket_mb * 2**20))]


def time_model(watch: Stopwatch, config: Config, fit: Fit, link: float, both: float, budget_s: float) -> ModelTimes:
    """Returns the times of this model's all-reduce; what would not fit in the budget is left out. Collective.

    link and both: bytes/s of the link in one direction, and of messages in each direction, both ways at once.
    """
    group = watch.group
    model = resolved_model(config)
    elements = bucket_elements(model, config.parallel.bucket_mb)
    num_bytes = 4 * sum(elements)
    wire_bytes = bus_factor("all-reduce", group.size) * num_bytes
    fitted = sum(fit.seconds(4 * count) for count in elements)
    alone = whole = None
    if fitted * _LEAST_RUNS <= 0.3 * budget_s:
        alone = _seconds_of(watch, elements, budget_s / 8)
        whole = _seconds_of(watch, [sum(elements)], budget_s / 8)
    steps = _Rehearsal(watch, config, model).measure(alone or fitted, budget_s / 2)
    latency, rate = len(elements) * fit.alpha_s, fit.beta_bytes_per_s
    return ModelTimes(
        parameters=sum(elements),
        gradient_bytes=num_bytes,
        bucket_bytes=tuple(4 * count for count in elements),
        wire_bytes=wire_bytes,
        computed_s=wire_bytes / link,
        messages_s=wire_bytes / both - wire_bytes / link,
        copies_s=num_bytes / rate - wire_bytes / both,
        latency_s=latency,
        fitted_s=fitted,
        alone_s=alone,
        together_s=None if alone is None else alone - fitted,
        whole_s=whole,
        beside_s=steps.comm_s,
        exposed_s=steps.exposed_s,
        num_steps=steps.num_steps,
        tokens_per_rank=steps.tokens_per_rank,
    )


def _seconds_of(watch: Stopwatch, elements: Sequence[int], enough_s: float) -> float:
    """The median time of these all-reduces, begun one after the other and then waited for."""
    flats = [torch.empty(count, dtype=torch.float32, device=watch.device).fill_(0) for count in elements]

    def run() -> None:
        for transfer in [watch.group.start_all_reduce(flat) for flat in flats]:
            transfer.wait()

    return statistics.median(watch.enough(run, enough_s, _LEAST_RUNS))


# ---- beside backward ----


@dataclass(frozen=True)
class _Steps:
    """Medians over some steps, of rank 0, as metrics.jsonl has them."""

    comm_s: float | None
    exposed_s: float | None
    num_steps: int
    tokens_per_rank: int


class _SameTokens(Loader):
    """Reads nothing: the same random tokens in every step, a micro-batch for each rank."""

    def __init__(self, plan: BatchPlan, rank: int, seq_len: int, vocab_size: int, device: torch.device):
        self.plan, self.rank, self.device, self._seq_len = plan, rank, device, seq_len
        generator = torch.Generator().manual_seed(rank)
        block = torch.randint(vocab_size, (plan.device_batch_size, seq_len + 1), generator=generator).to(device)
        positions = torch.arange(plan.device_batch_size, device=device)
        self._batch = MicroBatch(block[:, :-1].contiguous(), block[:, 1:].contiguous(), positions, None)

    @property
    def seq_len(self) -> int:
        return self._seq_len

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return [self._batch]


class _Rehearsal:
    """Training's own steps, of one micro-batch a rank: forward, backward with its buckets, update, exchange."""

    def __init__(self, watch: Stopwatch, config: Config, model: ModelConfig):
        self._watch, self._group, self._config, self._model = watch, watch.group, config, model
        self._clock = DeviceClock(watch.device)
        micro = config.train.device_batch_size or max(1, _CPU_MICRO_BATCH_TOKENS // config.data.seq_len)
        if config.train.global_batch_size:
            micro = min(micro, math.ceil(config.train.global_batch_size / self._group.size))
        self._plan = BatchPlan(micro * self._group.size, micro, self._group.size)

    def measure(self, expected_s: float, budget_s: float) -> _Steps:
        """Returns what the steps took that fit in the budget, after one to warm up; nothing where too few do."""
        tokens = self._plan.device_batch_size * self._config.data.seq_len
        if expected_s * (1 + _LEAST_RUNS) > budget_s:
            return _Steps(None, None, 0, tokens)
        replica, loader = self._replica(), self._loader()
        (_, _, first_s), *_ = self._steps(replica, loader, 1)
        count = min(_MOST_STEPS, max(_LEAST_RUNS, int(budget_s / first_s) - 1))
        rows = self._steps(replica, loader, count)
        comm, exposed, _ = (statistics.median(values) for values in zip(*rows, strict=True))
        return _Steps(comm, exposed, count, tokens)

    def _steps(self, replica: Replica, loader: Loader, count: int) -> list[tuple[float, float, float]]:
        """Rank 0's comm_ms and exposed_comm_ms of each step, in seconds, and the slowest rank's whole step."""
        self._group.barrier()
        self._group.take_traffic()
        mine: list[float] = []
        for number in range(count):
            began = time.perf_counter()
            result = train_step(
                replica, loader, self._group, self._clock, _no_fault, step=number, lr=_LR, max_norm=_MAX_NORM
            )
            self._group.share([0.0] * len(Exchanged._fields))
            result.times.add(self._group.take_traffic(), self._clock)
            mine += [result.times.comm_ms / 1e3, result.times.exposed_comm_ms / 1e3, time.perf_counter() - began]
        rows = self._group.share(mine)
        self._group.take_traffic()
        slowest = [max(values) for values in zip(*(row[2::3] for row in rows), strict=True)]
        self._watch.spent_s += sum(slowest)
        return list(zip(rows[0][0::3], rows[0][1::3], slowest, strict=True))

    def _replica(self) -> Replica:
        model = build(self._model, self._config.train.seed, self._watch.device)
        dtype, _ = choose_dtype(self._config.train.dtype, self._watch.device)
        model.compute_dtype = dtype
        sync = BucketedSync(model, self._group, int(self._config.parallel.bucket_mb * 2**20))
        optim = self._config.optim
        return Replica(
            model=model,
            sync=sync,
            optimizer=Optimizer(sync.pieces(), optim, lr=_LR, weight_decay=optim.weight_decay, compute_dtype=dtype),
            scaler=LossScaler.for_dtype(dtype),
            dropout_seed=dropout_seed(self._config.train.seed),
        )

    def _loader(self) -> Loader:
        length, vocab = self._config.data.seq_len, self._model.vocab_size
        return _SameTokens(self._plan, self._group.rank, length, vocab, self._watch.device)


def _no_fault(_: str) -> None:
    """What a step is told to do beside its own work: nothing."""
