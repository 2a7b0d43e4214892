"""Simulates a training step: how much of the communication overlaps with compute, for each strategy and wire.

A step is played through as events: forward waits for each stage's weights, backward finishes gradients one by one, and
messages pass the link one after the other in each direction, in latency + bytes / bandwidth. Ranks that compute alike
are one load; a collective begins when the slowest load is ready. So a world of any size costs the same to simulate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.sync.wire import WireBits
from paceline.world.config import SHARDS_WEIGHTS, StrategyName

Kind = Literal["exact", "rounding", "another algorithm"]
_STEPS = 4  # until steps repeat


@dataclass(frozen=True)
class Stage:
    """A part of the model, such as a block. Times are of one micro-batch."""

    forward_s: float
    backward_s: float
    elements: tuple[int, ...]  # of its parameters, in the order in which backward finishes their gradients
    is_embedding: bool = False  # read in float32, so that `exact` sends it so


@dataclass(frozen=True)
class Load:
    """Ranks that compute alike."""

    num_micro_batches: int
    slowness: float = 1.0  # the time of a micro-batch in units of the stages' times


@dataclass(frozen=True)
class Job:
    """What a rank computes in a step, and its link."""

    stages: tuple[Stage, ...]  # in forward order
    num_micro_batches: int
    update_s: float  # of all weights by one rank
    num_ranks: int
    num_hosts: int  # the ranks of a host reduce inside it, so a host sends the bytes of one rank
    latency_s: float
    bytes_per_s: float  # each way
    burst_s: float = 0.0  # of the rate, which a shaped link saves up in a pause and then sends at once
    compute_bits: int = 16  # of the compute dtype
    inner_bytes_per_s: float = 1e15  # each way, between the ranks of a host; JSON has no infinity
    # Of a step, measured between ranks of one host over a link of inner_bytes_per_s: all but passes and the update.
    # With sharded weights the stages' times have their gathers then. None: not measured.
    exchange_s: float | None = None
    is_across: bool = True  # the ranks are on several hosts
    shares_memory: bool = False  # of the ranks, which then send nothing rounded
    slower: tuple[Load, ...] = ()  # other ranks' loads; num_micro_batches is that of rank 0

    @property
    def loads(self) -> tuple[Load, ...]:
        """Of rank 0, and of the ranks that differ from it."""
        return Load(self.num_micro_batches), *self.slower

    @property
    def micro_batch_s(self) -> float:
        return sum(stage.forward_s + stage.backward_s for stage in self.stages)

    @property
    def compute_s(self) -> float:
        """All micro-batches of a step."""
        return self.num_micro_batches * self.micro_batch_s

    @property
    def slowest(self) -> float:
        """How many of rank 0's micro-batches take as long as those of the slowest rank."""
        return max(load.num_micro_batches * load.slowness for load in self.loads)

    @property
    def ideal_s(self) -> float:
        """A step over a link without cost, if each rank updates its part."""
        return self.compute_s + self.update_s / self.num_ranks

    @property
    def num_elements(self) -> int:
        return sum(sum(stage.elements) for stage in self.stages)

    @property
    def hop_s(self) -> float:
        """Latency of a collective: a tree of messages over the hosts."""
        return self.latency_s * math.ceil(math.log2(self.num_hosts))

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather without its latency. The levels of the hierarchy overlap."""
        inner = self.num_ranks / self.num_hosts
        outer_s = (1 - 1 / self.num_hosts) * num_bytes / self.bytes_per_s
        return max(outer_s, (1 - 1 / inner) * num_bytes / self.inner_bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Path:
    """A way of exchanging gradients and weights."""

    flags: str
    bits: WireBits
    kind: Kind = "exact"
    strategy: StrategyName = "zero"
    is_layered: bool = False  # all micro-batches pass a block before the next block
    encode_s: float = 0.0  # codec time for each element of the model: before the reduce-scatter
    update_codec_s: float = 0.0  # and around the all-gather
    bucket_bytes: int  # of gradients


@dataclass(frozen=True)
class Prediction:
    """A step on one path. Parts are those of rank 0, and add up to the step."""

    path: Path
    wire_bytes: float  # sent by a host in a step
    step_s: float
    efficiency_frac: float  # of the speed that a link without cost would give
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def exposed_s(self) -> float:
        """Waiting for other ranks, for the link, and processor time of messages."""
        return max(0.0, self.step_s - self.forward_s - self.backward_s - self.update_s)


@dataclass
class _Bucket:
    stages: set[int] = field(default_factory=set)
    ready_s: float = 0.0  # in backward
    elements: int = 0
    gradient_bytes: float = 0.0
    weight_bytes: float = 0.0
    arrived_s: float = 0.0  # its weights


@dataclass
class _Link:
    """Passes messages one after the other. What a shaped link saved up in a pause it sends at once: a token bucket, as
    its virtual schedule (GCRA, ITU-T I.371, annex A)."""

    job: Job
    free_s: float = 0.0  # when it has passed all so far
    due_s: float = 0.0  # when it would have at its rate

    def send(self, at_s: float, transfer_s: float) -> float:
        """Returns when a message that is ready at a time has arrived everywhere."""
        begun = max(self.free_s, at_s)
        self.due_s = max(self.due_s, begun) + transfer_s
        self.free_s = max(begun, self.due_s - self.job.burst_s) + self.job.hop_s
        return self.free_s


def num_shards(strategy: str, num_ranks: int, ranks_per_host: int) -> int:
    """Returns how many ranks divide the optimizer's state."""
    return {"zero": num_ranks, "fsdp": num_ranks, "hsdp": ranks_per_host}.get(strategy, 1)


def predict(job: Job, path: Path) -> Prediction:
    """Returns the duration of a step once steps repeat."""
    embeddings = sum(sum(stage.elements) for stage in job.stages if stage.is_embedding)
    ends = embeddings + (sum(job.stages[-1].elements) if len(job.stages) > 1 else 0)
    wire_bytes = path.bits.bytes_sent(job.num_hosts, job.num_elements, embeddings, ends)
    per_host = job.num_ranks // job.num_hosts if job.is_across else job.num_ranks
    update_s = job.update_s / num_shards(path.strategy, job.num_ranks, per_host)
    if job.exchange_s is not None and not (job.is_across and path.strategy == "local"):
        step_s = _measured_step_s(job, path, update_s, wire_bytes)
    elif path.strategy == "local":  # a fragment's all-reduce overlaps with the whole next step
        sent_s = job.hop_s + wire_bytes / job.bytes_per_s if wire_bytes else 0.0
        codec_s = path.update_codec_s * job.num_elements
        step_s = max(job.slowest * job.micro_batch_s + update_s + codec_s, sent_s)
    elif path.strategy == "hsdp" and job.is_across:
        inner = replace(job, num_hosts=1, num_ranks=per_host, burst_s=0.0)
        step_s = _sharded_step_s(inner, between=job) + update_s
    elif path.strategy in SHARDS_WEIGHTS:
        step_s = _sharded_step_s(job) + update_s
    else:
        step_s = _Play(job, path, update_s).step_s()
    return Prediction(
        path=path,
        wire_bytes=wire_bytes,
        step_s=step_s,
        efficiency_frac=job.ideal_s / step_s,
        forward_s=job.num_micro_batches * sum(stage.forward_s for stage in job.stages),
        backward_s=job.num_micro_batches * sum(stage.backward_s for stage in job.stages),
        update_s=update_s + (path.encode_s + path.update_codec_s) * job.num_elements,
    )


def _measured_step_s(job: Job, path: Path, update_s: float, wire_bytes: float) -> float:
    """A step whose exchange was measured on one host. Over a slower link what it takes of the processor stays, but for
    the share of the bytes for which ranks only wait."""
    assert job.exchange_s is not None
    own_s = job.slowest * job.micro_batch_s + update_s
    if not job.is_across:
        return own_s + job.exchange_s
    if path.strategy in SHARDS_WEIGHTS:  # on CPUs its collectives overlap with nothing
        link_s, here_s = wire_bytes / job.bytes_per_s, wire_bytes / job.inner_bytes_per_s
        num_collectives = (2 * job.num_micro_batches + 1) * len(job.stages)
        link_s -= min(link_s, num_collectives * job.burst_s)  # there is a pause before each
        return own_s + job.exchange_s + num_collectives * job.hop_s + max(0.0, link_s - here_s)
    played_s = _Play(job, replace(path, encode_s=0.0, update_codec_s=0.0), update_s).step_s()
    waiting_frac = (played_s - own_s) * job.bytes_per_s / wire_bytes
    return played_s + job.exchange_s * (1 - min(1.0, max(0.0, waiting_frac)))


class _Play:
    """A step of ddp, naive or zero, played until steps repeat."""

    def __init__(self, job: Job, path: Path, update_s: float):
        self.job, self.path, self.update_s = job, path, update_s
        self.buckets = _cut(job, path)
        self.needed: list[list[_Bucket]] = [[] for _ in job.stages]
        for bucket in self.buckets:
            for number in bucket.stages:
                self.needed[number].append(bucket)
        self.now, self.link = 0.0, _Link(job)

    def step_s(self) -> float:
        begun = 0.0
        for _ in range(_STEPS):
            begun = self.now
            ends, readies = zip(*(self._compute(load) for load in self.job.loads), strict=True)
            self._reduce([max(times) for times in zip(*readies, strict=True)])
            self.now = max(*ends, self.link.free_s) + self.job.hop_s
            if self.path.strategy == "zero":
                self._publish()
            else:
                self.now += self.update_s
        return self.now - begun

    def _compute(self, load: Load) -> tuple[float, list[float]]:
        """Returns when this load's ranks are through with backward, and when they have each bucket's gradients."""
        num_passes = min(1, load.num_micro_batches) if self.path.is_layered else load.num_micro_batches
        width = load.slowness * load.num_micro_batches / max(1, num_passes)
        now = backward = self.now
        for _ in range(num_passes):
            for stage, buckets in zip(self.job.stages, self.needed, strict=True):
                now = max([now, *(bucket.arrived_s for bucket in buckets)]) + width * stage.forward_s
            backward = now
            now += width * sum(stage.backward_s for stage in self.job.stages)
        now += self.path.encode_s * self.job.num_elements
        if self.path.strategy == "naive":
            return now, [now] * len(self.buckets)
        return now, [backward + width * bucket.ready_s for bucket in self.buckets]

    def _reduce(self, ready: Sequence[float]) -> None:
        """Sends the gradients; ddp's all-reduce has twice the bits of a reduce-scatter."""
        for bucket, at in zip(self.buckets, ready, strict=True):
            self.link.send(at, self.job.transfer_s(bucket.gradient_bytes))

    def _publish(self) -> None:
        """Updates and sends the weights bucket by bucket, in forward order."""
        job, path = self.job, self.path
        self.now += job.hop_s  # of the norm
        for bucket in reversed(self.buckets):
            self.now += bucket.elements / job.num_elements * self.update_s + bucket.elements * path.update_codec_s
            bucket.arrived_s = self.link.send(self.now, job.transfer_s(bucket.weight_bytes))


def _sharded_step_s(job: Job, between: Job | None = None) -> float:
    """fsdp: each stage's weights are gathered while the stage before computes, in forward and backward of every
    micro-batch; ranks wait for each other inside every pass. Gradients are scattered in the last one. between: the
    hosts of hsdp, which then add up what each of them has."""
    slowness = job.slowest / max(1, job.num_micro_batches)
    now, link = 0.0, _Link(job)
    for number in range(job.num_micro_batches):
        begun, is_last = now, number == job.num_micro_batches - 1
        for stages, scatters in ((job.stages, False), (job.stages[::-1], is_last)):
            for stage in stages:
                elements = sum(stage.elements)
                num_bytes = elements * (32 if stage.is_embedding else job.compute_bits) / 8
                if elements:
                    link.send(max(begun, now - slowness * stage.backward_s), job.transfer_s(num_bytes))
                pass_s = stage.forward_s if stages is job.stages else stage.backward_s
                now = max(now, link.free_s) + slowness * pass_s
                if scatters and elements:
                    across_s = 2 * (between.hop_s + between.transfer_s(4 * elements)) if between else 0.0
                    link.send(now, job.transfer_s(4 * elements) + across_s)
        now = max(now, link.free_s)
    return now + job.hop_s


def _cut(job: Job, path: Path) -> list[_Bucket]:
    """Returns the buckets in the order of backward. A stage's gradients are ready in proportion to their elements."""
    buckets: list[_Bucket] = []
    before = 0.0
    for number, stage in reversed(list(enumerate(job.stages))):
        done, weight_bits = 0, path.bits.embedding if stage.is_embedding else path.bits.weight
        is_end = stage.is_embedding or number == len(job.stages) - 1
        gradient_bits = path.bits.end_gradient if is_end else path.bits.gradient
        for elements in stage.elements:
            if not buckets or 4 * (buckets[-1].elements + elements) > path.bucket_bytes:
                buckets.append(_Bucket())
            bucket = buckets[-1]
            done += elements
            bucket.stages.add(number)
            bucket.ready_s = before + stage.backward_s * done / sum(stage.elements)
            bucket.elements += elements
            bucket.gradient_bytes += elements * gradient_bits / 8
            bucket.weight_bytes += elements * weight_bits / 8
        before += stage.backward_s
    return buckets
