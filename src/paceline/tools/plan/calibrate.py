"""Measures this machine for plans, in about two minutes: micro-batches and updates of small models in the real code,
and the link between its ranks. Rates of each kind of work are fitted to all of them (work.py)."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from paceline.data.cache import cache_dir
from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.optim.clip import clip_
from paceline.optim.config import OptimConfig
from paceline.optim.optimizer import make_optimizers
from paceline.sync.ddp import BucketedSync
from paceline.sync.replicas import overall
from paceline.tools.plan import work
from paceline.tools.plan.devices import Device
from paceline.tools.plan.work import KINDS, Rates, Shape, Units
from paceline.world.config import ParallelConfig
from paceline.world.device import choose_dtype, cpu_name, peak_flops
from paceline.world.group import Group, LocalGroup
from paceline.world.runtime import World

# Layers, width, heads, sequence length, vocabulary, sequences of a micro-batch.
_SHAPES = (
    (4, 64, 4, 64, 512, 32),
    (2, 128, 4, 128, 1024, 16),
    (2, 256, 4, 256, 4096, 8),
    (3, 384, 6, 256, 1024, 8),
    (1, 512, 8, 512, 2048, 4),
    (2, 384, 12, 512, 512, 4),
    (2, 192, 6, 256, 8192, 4),
    (4, 256, 8, 128, 512, 2),
    (2, 384, 6, 256, 1024, 1),
    (2, 320, 5, 256, 1024, 6),
    (3, 192, 6, 128, 2048, 16),
    (1, 448, 7, 256, 512, 8),
)
_ROUNDS = 3
_PULL = 0.05
# Seconds a unit, of one core of a Xeon with AMX: where fits begin.
_PASSES = {"products": 2e-12, "attention": 6e-12, "scores": 1.5e-9, "bytes": 7e-11, "logits": 2e-9, "weights": 1e-10,
           "calls": 1.5e-3}  # fmt: skip
_ADAMW = {"elements": 1.5e-9, "tensors": 2e-5}
_MUON = {"products": 1.5e-12, "elements": 3e-9, "tensors": 1e-4}
_MESSAGES = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes of an all-reduce
_PAYLOAD_FRAC = 0.957  # of a link's bits: the rest is headers of Ethernet, IP and TCP


@dataclass
class _Measured:
    """One kind of measurement: units of work, and the seconds they took."""

    units: list[Units] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, units: Units, seconds: float) -> None:
        self.units.append(units)
        self.seconds.append(seconds)

    def fit(self, guesses: Rates) -> tuple[Rates, float]:
        """Returns the seconds a unit of these kinds, none negative, and the worst relative error."""
        kinds = list(guesses)
        matrix = np.array([[units.get(kind, 0.0) for kind in kinds] for units in self.units])
        rates = nonnegative(matrix, np.array(self.seconds), np.array([guesses[kind] for kind in kinds]))
        error = np.abs(matrix @ rates / np.array(self.seconds) - 1)
        return {kind: float(rate) for kind, rate in zip(kinds, rates, strict=True)}, float(error.max())


def nonnegative(matrix: np.ndarray, values: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """Returns x >= 0 with the least sum of squared relative errors of matrix @ x, drawn a little towards the guesses:
    kinds of work that always come together would else share their time at random. Tries every subset of columns."""
    rows = np.vstack([matrix * guesses / values[:, None], _PULL * np.eye(len(guesses))])  # unknown: x / guesses
    wanted = np.concatenate([np.ones(len(values)), np.full(len(guesses), _PULL)])
    best, least = np.zeros(len(guesses)), float("inf")
    for size in range(1, len(guesses) + 1):
        for columns in map(list, itertools.combinations(range(len(guesses)), size)):
            found = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0]
            error = float(((rows[:, columns] @ found - wanted) ** 2).sum())
            if found.min() >= 0 and error < least:
                least, best = error, np.zeros(len(guesses))
                best[columns] = found * guesses[columns]
    return best


def measure(world: World, say: Callable[[str], None] = lambda _: None) -> Device:
    """Returns a rank's device as all ranks of this world found it at once. Collective; one host."""
    dtype = choose_dtype("auto", world.device)[0]
    forward: dict[str, Rates] = {}
    backward: dict[str, Rates] = {}
    errors, scatter = [], []
    updates = {"adamw": _Measured(), "muon": _Measured()}
    families: tuple[Literal["gpt2", "llama"], ...] = ("gpt2", "llama")
    for arch in families:
        cases = [_Case(world, arch, sizes, dtype) for sizes in _SHAPES]
        # Shapes in turn in every round: a machine's speed drifts.
        rounds = []
        for number in range(_ROUNDS + 1):
            say(f"{arch}, round {number + 1} of {_ROUNDS + 1}")
            rounds.append([case.once() for case in cases])
        ahead, back = _Measured(), _Measured()
        for case, found in zip(cases, zip(*rounds[1:], strict=True), strict=True):  # the first one allocates
            columns = [statistics.median(column) for column in zip(*found, strict=True)]
            ahead.add(_whole(work.forward_units(case.shape, case.num_tokens), case.shape.model.n_layer), columns[0])
            back.add(_whole(work.backward_units(case.shape, case.num_tokens), case.shape.model.n_layer), columns[1])
            for name, seconds in zip(updates, columns[2:], strict=True):
                updates[name].add(work.update_units(case.shape.model, name), seconds)
            steps = [each[0] + each[1] for each in found]
            scatter.append(statistics.pstdev(steps) / statistics.fmean(steps))
        forward[arch], ahead_error = ahead.fit(_PASSES)
        backward[arch], back_error = back.fit(_PASSES)
        errors += [ahead_error, back_error]
    say("the link between ranks")
    latency_s, bytes_per_s, cpu_s = _link(world.group)
    update, update_error = updates["adamw"].fit(_ADAMW)
    muon, muon_error = updates["muon"].fit(_MUON)
    errors += [update_error, muon_error]
    copy = _copy_bytes_per_s()
    numbers = [
        max(column) for column in zip(*world.group.share([max(errors), statistics.median(scatter)]), strict=True)
    ]
    peak = peak_flops(world.device, dtype, kept_in=cache_dir()).flops_per_s
    return Device(
        name=cpu_name(),
        kind="cpu",
        dtype=str(dtype).removeprefix("torch."),
        peak_flops_per_s=peak or 0.0,
        memory_bytes=world.facts[0].free_bytes,
        forward=forward,
        backward=backward,
        update={"adamw": update, "muon": muon},
        copy_bytes_per_s=copy,
        inner_bytes_per_s=bytes_per_s,
        inner_latency_s=latency_s,
        outer_frac=_PAYLOAD_FRAC,
        transfer_cpu_s=cpu_s,
        jitter_frac=numbers[1],
        error_frac=numbers[0],
        source=f"measured here, {world.world_size} ranks of {world.threads} threads at once",
    )


class _Case:
    """A small model and its optimizers, with the buckets of a run and no transfer."""

    def __init__(self, world: World, arch: Literal["gpt2", "llama"], sizes: Sequence[int], dtype: torch.dtype):
        layers, width, heads, seq_len, vocab, sequences = sizes
        config = ModelConfig(
            arch=arch, n_layer=layers, n_embd=width, n_head=heads, n_positions=seq_len, vocab_size=vocab
        )
        self.shape = Shape(
            model=config, seq_len=seq_len, compute_bytes=dtype.itemsize, keeps_scores=dtype.itemsize == 2
        )
        self.num_tokens = seq_len * sequences
        self._group = world.group
        self._model = build(config, 0, world.device)
        self._model.compute_dtype = dtype
        self._tokens = torch.randint(vocab, (sequences, seq_len), device=world.device)
        self._optimizers = [
            make_optimizers(rule, self._model.named_parameters(), lr=1e-3, weight_decay=0.1, compute_dtype=dtype)
            for rule in (OptimConfig(name="adamw"), OptimConfig(name="muon"))
        ]
        self._sync = BucketedSync(self._model, LocalGroup(world.device), ParallelConfig().bucket_bytes("cpu"))

    def once(self) -> list[float]:
        """Returns the seconds of forward, backward, and each optimizer's update, each a mean over the ranks, which
        begin together. Collective."""
        self._group.barrier()
        stamps = [time.perf_counter()]
        loss = self._model(self._tokens, self._tokens) / self._tokens.numel()
        stamps.append(time.perf_counter())
        with self._sync.accumulate(last=True):
            loss.backward()
        gradients = self._sync.reduce()
        stamps.append(time.perf_counter())
        clip_(gradients, 1.0)
        stamps.append(time.perf_counter())
        for several in self._optimizers:
            for optimizer in several:
                optimizer.step()
            stamps.append(time.perf_counter())
        self._sync.publish()
        forward, backward, clip, *steps = (end - begin for begin, end in itertools.pairwise(stamps))
        own = [forward, backward, *(clip + step for step in steps)]
        return [statistics.fmean(column) for column in zip(*self._group.share(own), strict=True)]


def _whole(by_part: dict[str, Units], num_layers: int) -> Units:
    total = dict.fromkeys(KINDS, 0.0)
    for part, amounts in by_part.items():
        for kind, amount in amounts.items():
            total[kind] += amount * (num_layers if part == "block" else 1)
    return total


def _link(group: Group) -> tuple[float, float, float]:
    """Returns latency, bytes a second of a rank's link each way, and processor seconds a byte sent, of all-reduces."""
    if group.size == 1:
        return 0.0, 1e12, 0.0  # nobody to send to
    times, processor, sent = [], 0.0, 0.0
    for num_bytes in _MESSAGES:
        flat = group.zeros(num_bytes // 4, torch.zeros(1))
        found = []
        for number in range(_ROUNDS + 1):
            group.barrier()
            begun, spent = time.perf_counter(), time.process_time()
            group.start_all_reduce(flat).wait()
            found.append(time.perf_counter() - begun)
            if number:
                processor += time.process_time() - spent
                sent += bus_factor("all-reduce", group.size) * num_bytes
        times.append(max(row[0] for row in group.share([statistics.median(found[1:])])))
    line = fit(_MESSAGES, times)
    group.take_traffic()  # discard it
    factor = bus_factor("all-reduce", group.size)
    hops = (group.size - 1).bit_length()
    return line.alpha_s / hops, factor * line.beta_bytes_per_s, max(row[0] for row in group.share([processor / sent]))


def _copy_bytes_per_s() -> float:
    """Returns how fast state is read for a digest."""
    tensor = torch.zeros(4 << 20)
    begun = time.perf_counter()
    for _ in range(3):
        overall({"": tensor})
    return 3 * 4 * tensor.numel() / (time.perf_counter() - begun)


# ---- latency and bandwidth ----
#
# The line is Hockney's: s bytes take alpha + s / beta ("The communication challenge for MPP", Parallel Computing 20,
# 1994, equation 1). Sizes and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md there).

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")


def bus_factor(collective: str, num_ranks: int) -> float:
    """Returns how many times a buffer's bytes pass the busiest link. The buffer of a reduce-scatter is each rank's
    input, that of an all-gather each rank's output."""
    share = (num_ranks - 1) / num_ranks
    return {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "broadcast": 1.0}[collective]


def sizes(max_bytes: int) -> list[int]:
    """Returns 1 KiB times powers of 4, up to max_bytes."""
    return list(itertools.takewhile(lambda size: size <= max_bytes, (1024 * 4**i for i in itertools.count())))


@dataclass(frozen=True)
class Fit:
    """seconds = alpha_s + bytes / beta_bytes_per_s."""

    alpha_s: float
    beta_bytes_per_s: float
    residual_frac: float  # mean of |fitted - measured| / measured

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes / self.beta_bytes_per_s


def fit(num_bytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Returns the line with the least sum of absolute relative errors, with alpha >= 0 and beta > 0.

    Relative, because times span five orders of magnitude. Absolute, not squared, because some sizes are outliers: a
    token bucket passes the first bytes, an algorithm changes with the size. The best such line goes through two of the
    points, or one and the origin, so all of these are tried. Raises ValueError for a single size.
    """
    if len(set(num_bytes)) < 2:
        raise ValueError("a fit of latency and bandwidth needs two sizes")
    x, y = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    slopes = [(i, (y[i] - y[j]) / (x[i] - x[j])) for i in range(len(x)) for j in range(i) if x[i] != x[j]]
    lines = [(y[i] - slope * x[i], slope) for i, slope in slopes] + [(0.0, slope) for slope in y / x]

    def error(line: tuple[float, float]) -> float:
        return float(np.abs((line[0] + line[1] * x - y) / y).mean())

    alpha, slope = best = min(((a, b) for a, b in lines if a >= 0 and b > 0), key=error)
    return Fit(float(alpha), 1 / float(slope), error(best))
