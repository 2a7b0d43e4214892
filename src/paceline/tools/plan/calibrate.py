"""Measures what a plan for this machine needs: training steps of the config's model with one and with three blocks, in
the real code, by as many ranks as will train. From them follow what a block and what the rest of the model takes in a
micro-batch, in an update, and in an exchange. No step of the config itself is timed: schedule.py puts it together."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from paceline.base.cores import cpu_name
from paceline.base.units import dtype_name, plural
from paceline.config import Config
from paceline.record.console import Console
from paceline.replica.batch import Batch
from paceline.sync.replicas import digests
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import ERROR_FRAC, PAYLOAD_FRAC, Device
from paceline.tools.plan.stopwatch import Stopwatch
from paceline.train.meet import make_replica
from paceline.train.resolve import Settings, resolve
from paceline.world.device import product_dtype
from paceline.world.group import Group
from paceline.world.processor import peak_flops
from paceline.world.runtime import World

_DEPTHS = (1, 3)  # blocks of the two models
_PASSES = (1, 3)  # micro-batches of the two kinds of steps
_LEAST_ROUNDS, _ROUNDS_S = 4, 3.0
_MOST_OF_QUICK = 1.5  # a round that took so many times as long as a quick one was interrupted, and does not count
_MESSAGES = (16 << 10, 256 << 10, 2 << 20, 10 << 20)  # bytes of an all-reduce; the largest are those of buckets
_LINK_ROUNDS = 5
_STEP_S = 5e-4  # for reading data and writing records


def measure(world: World, config: Config, console: Console, seconds: float = _ROUNDS_S) -> Device:
    """Returns a rank's device for this config, as all ranks of this world found it at once, in about so many seconds.
    Collective; one host."""
    if config.parallel.fixed_shares():  # maybe of another number of ranks
        config = config.replace("parallel", shares="equal")
    settings = resolve(config, config.data.expected_vocab, world.facts)
    cases = [_Case(world, settings, depth, console) for depth in _DEPTHS]
    allocating, first = ([case.once() for case in cases] for _ in range(2))
    # The same on all ranks, as these times are. Of two, since one may have been interrupted.
    round_s = min(map(_wall_s, (allocating, first)))
    num_rounds = max(_LEAST_ROUNDS, round(seconds / round_s))
    # The models in turn: a machine's speed drifts.
    rounds = _undisturbed([first, *([case.once() for case in cases] for _ in range(num_rounds))])
    blocks, ends = _divided(*map(_medians, zip(*rounds, strict=True)))
    walls = list(map(_wall_s, rounds))
    halves = [statistics.median(walls[number::2]) for number in range(2)]
    latency_s, bytes_per_s = link(world.group)
    arch, optimizer, num_tokens = settings.config.model.arch, settings.config.optim.name, cases[0].num_tokens
    dtype = product_dtype(settings.config.train.dtype)
    ranks = f"{plural(world.world_size, 'rank')} of {plural(world.threads, 'thread')}"
    num_shards = Cluster(ranks_per_host=world.world_size).num_shards(settings.config.parallel.strategy)
    return Device(
        name=cpu_name(),
        kind="cpu",
        dtype=dtype_name(dtype),
        peak_flops_per_s=peak_flops(world.device, dtype).flops_per_s or 0.0,
        memory_bytes=world.facts[0].free_bytes,
        forward={arch: {"block tokens": blocks.forward / num_tokens, "head tokens": ends.forward / num_tokens}},
        backward={arch: {"block tokens": blocks.backward / num_tokens, "embed tokens": ends.backward / num_tokens}},
        update={optimizer: {"blocks": num_shards * blocks.update, "ends": num_shards * ends.update}},
        exchange={"blocks": blocks.exchange, "ends": ends.exchange} if world.world_size > 1 else {},
        copy_bytes_per_s=_copy_bytes_per_s(),
        inner_latency_s=latency_s,
        inner_bytes_per_s=bytes_per_s,
        outer_frac=PAYLOAD_FRAC,
        step_s=_STEP_S,
        error_frac=max(ERROR_FRAC, max(halves) / min(halves) - 1),
        source=f"small models measured here, {ranks} at once",
    )


class _Times(NamedTuple):
    """Seconds of a model's steps, each a mean over the ranks."""

    forward: float  # of a micro-batch; with sharded weights with their gathers
    backward: float
    update: float
    exchange: float  # the rest of a step: sums over ranks, coding, sending weights, waiting for the slowest
    wall: float  # of this measurement


def _wall_s(times: Sequence[_Times]) -> float:
    return sum(each.wall for each in times)


def _undisturbed(rounds: list[list[_Times]]) -> list[list[_Times]]:
    """Returns the rounds but those that were interrupted."""
    most_s = _MOST_OF_QUICK * np.percentile(list(map(_wall_s, rounds)), 25)
    return [times for times in rounds if _wall_s(times) <= most_s]


def _medians(times: Sequence[_Times]) -> _Times:
    return _Times(*map(statistics.median, zip(*times, strict=True)))


def _divided(shallow: _Times, deep: _Times) -> tuple[_Times, _Times]:
    """Returns what one block takes, and what the model without blocks takes."""
    few, many = _DEPTHS
    blocks = _Times(*(max(0.0, (b - a) / (many - few)) for a, b in zip(shallow, deep, strict=True)))
    return blocks, _Times(*(max(0.0, a - few * block) for a, block in zip(shallow, blocks, strict=True)))


class _Case:
    """The config's model with another number of blocks, on all ranks."""

    def __init__(self, world: World, settings: Settings, num_blocks: int, console: Console):
        # A plan adds the second forward pass of activation checkpoints itself.
        config = settings.config.replace("model", n_layer=num_blocks).replace("train", activation_checkpoint=False)
        size = settings.plan.device_batch_size, config.data.seq_len
        self.num_tokens = size[0] * size[1]
        self._tokens = torch.randint(config.model.vocab_size, size, device=world.device)
        self._replica = make_replica(replace(settings, config=config), world, console, is_new=False)
        self._group, self._grad_clip = world.group, config.optim.grad_clip
        # What zero sends depends on whether a step has one pass. With fsdp ranks count their passes.
        self._passes = 1 if settings.plan.passes == 1 else None

    def once(self) -> _Times:
        """Makes steps of one and of three micro-batches. Collective."""
        begun = time.perf_counter()
        self._step(_PASSES[0])  # with zero the weights of its update arrive in the next step
        few, many = (self._step(num_passes) for num_passes in _PASSES)
        added = [(b - a) / (_PASSES[1] - _PASSES[0]) for a, b in zip(few, many, strict=True)]
        step_s, forward_s, backward_s, _ = added
        in_forward = forward_s / (forward_s + backward_s)
        update_s = (few[3] + many[3]) / 2
        parts_s = [in_forward * step_s, (1 - in_forward) * step_s, update_s, few[0] - step_s - update_s]
        rows = self._group.share([*parts_s, time.perf_counter() - begun])
        return _Times(*map(statistics.fmean, zip(*rows, strict=True)))

    def _step(self, num_passes: int) -> list[float]:
        """Returns the seconds of a step, and of its forward, backward and update."""
        begun = time.perf_counter()
        batch = Batch(lambda: [self._tokens] * num_passes, count=num_passes)
        batch.passes = num_passes if self._replica.sync.shards_weights else self._passes  # not the number there are
        step = self._replica.step(batch, total=float(num_passes * self._tokens.numel() * self._group.size))
        for tokens in step:
            step.backward(self._replica.model(tokens, tokens), weight=float(tokens.numel()), is_sum=True)
        times = step.finish(max_norm=self._grad_clip).times
        return [time.perf_counter() - begun, times.forward_ms / 1e3, times.backward_ms / 1e3, times.optim_ms / 1e3]


def link(group: Group) -> tuple[float, float]:
    """Returns latency, and bytes a second of a link each way, of all-reduces. Collective."""
    if group.size == 1:
        return 0.0, 1e12  # nobody to send to
    watch, times = Stopwatch(group, torch.device("cpu")), []
    for num_bytes in _MESSAGES:
        flat = group.zeros(num_bytes // 4, torch.zeros(1))
        run = partial(_all_reduce, group, flat)
        times.append(statistics.median(watch.seconds(run, 1)[0] for _ in range(_LINK_ROUNDS)))
    # The two largest messages: a token bucket passes the first bytes at once.
    (less, more), (sooner, later) = _MESSAGES[-2:], times[-2:]
    bytes_per_s = (more - less) / max(later - sooner, 1e-9)
    latency_s = max(0.0, times[0] - _MESSAGES[0] / bytes_per_s)
    return latency_s / (group.size - 1).bit_length(), bus_factor("all-reduce", group.size) * bytes_per_s


def _all_reduce(group: Group, flat: torch.Tensor) -> None:
    group.start_all_reduce(flat).wait()


def _copy_bytes_per_s() -> float:
    """Returns how fast state is read for a digest."""
    tensor = torch.zeros(4 << 20)
    begun = time.perf_counter()
    for _ in range(3):
        digests({"": tensor})
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
