"""Predicts a training step over a link, for each way of exchanging gradients and weights.

A step is played through as events: forward waits for each stage's weights, backward finishes gradients one by one, and
messages pass the link one after the other in each direction, in latency + bytes / bandwidth. All ranks are alike.
Processor time that the network itself takes is not in the prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.sync.wire import WireBits, wire_bits
from paceline.world.config import ParallelConfig

Kind = Literal["exact", "rounding", "another algorithm"]
GOAL_FRAC = 0.97  # of the speed that a link without cost would give
_STEPS = 4  # until steps repeat


@dataclass(frozen=True)
class Stage:
    """A part of the model, such as a block. Times are of one micro-batch."""

    forward_s: float
    backward_s: float
    elements: tuple[int, ...]  # of its parameters, in the order in which backward finishes their gradients
    is_embedding: bool = False  # read in float32, so that `exact` sends it so


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
    compute_bits: int = 16  # of the compute dtype

    @property
    def compute_s(self) -> float:
        """All micro-batches of a step."""
        return self.num_micro_batches * sum(stage.forward_s + stage.backward_s for stage in self.stages)

    @property
    def ideal_s(self) -> float:
        """A step over a link without cost, if each rank updates its part."""
        return self.compute_s + self.update_s / self.num_ranks

    @property
    def num_elements(self) -> int:
        return sum(sum(stage.elements) for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Path:
    """A way of exchanging gradients and weights."""

    flags: str
    bits: WireBits
    kind: Kind = "exact"
    strategy: Literal["ddp", "zero", "local"] = "zero"
    is_layered: bool = False  # all micro-batches pass a block before the next block
    encode_s: float = 0.0  # codec time for each element of the model: before the reduce-scatter
    update_codec_s: float = 0.0  # and around the all-gather


@dataclass(frozen=True)
class Prediction:
    """A step on one path."""

    path: Path
    wire_bytes: float  # sent by a host in a step
    step_s: float
    efficiency_frac: float  # of the speed that a link without cost would give


@dataclass
class _Bucket:
    stages: set[int]
    ready_s: float = 0.0  # in backward
    elements: int = 0
    weight_bytes: float = 0.0
    arrived_s: float = 0.0  # its weights


def predict(job: Job, path: Path) -> Prediction:
    """Returns the duration of a step once steps repeat."""
    share = (job.num_hosts - 1) / job.num_hosts
    embeddings = sum(sum(stage.elements) for stage in job.stages if stage.is_embedding)
    wire_bytes = path.bits.bytes_sent(job.num_hosts, job.num_elements, embeddings)
    if path.strategy == "local":  # a fragment's all-reduce overlaps with the whole next step
        step_s = max(job.compute_s + job.update_s, job.latency_s + wire_bytes / job.bytes_per_s)
        return Prediction(path, wire_bytes, step_s, job.ideal_s / step_s)
    buckets = _cut(job, path)
    num_passes = 1 if path.is_layered else job.num_micro_batches
    width = job.num_micro_batches / num_passes
    now = link = begun = 0.0
    for _ in range(_STEPS):
        begun = now
        for _ in range(num_passes):
            for number, stage in enumerate(job.stages):
                now = max([now, *(bucket.arrived_s for bucket in buckets if number in bucket.stages)])
                now += width * stage.forward_s
            backward = now
            now += width * sum(stage.backward_s for stage in job.stages)
        now += path.encode_s * job.num_elements
        for bucket in buckets:
            link = max(link, backward + width * bucket.ready_s) + job.latency_s
            link += share * bucket.elements * path.bits.gradient / 8 / job.bytes_per_s
        now = max(now, link) + job.latency_s
        if path.strategy == "ddp":
            now += job.update_s
            continue
        now += job.latency_s  # of the norm
        for bucket in reversed(buckets):  # in forward order
            part = bucket.elements / job.num_elements
            now += part * job.update_s / job.num_ranks + bucket.elements * path.update_codec_s
            link = max(link, now) + job.latency_s + share * bucket.weight_bytes / job.bytes_per_s
            bucket.arrived_s = link
    return Prediction(path, wire_bytes, now - begun, job.ideal_s / (now - begun))


def _cut(job: Job, path: Path) -> list[_Bucket]:
    """Returns the buckets in the order of backward. A stage's gradients are ready in proportion to their elements."""
    buckets: list[_Bucket] = []
    before, most_bytes = 0.0, ParallelConfig(strategy=path.strategy).bucket_bytes("cpu")
    for number, stage in reversed(list(enumerate(job.stages))):
        done, weight_bits = 0, path.bits.embedding if stage.is_embedding else path.bits.weight
        for elements in stage.elements:
            if not buckets or 4 * (buckets[-1].elements + elements) > most_bytes:
                buckets.append(_Bucket(set()))
            bucket = buckets[-1]
            done += elements
            bucket.stages.add(number)
            bucket.ready_s = before + stage.backward_s * done / sum(stage.elements)
            bucket.elements += elements
            bucket.weight_bytes += elements * weight_bits / 8
        before += stage.backward_s
    return buckets


# For an element of the model, of which a rank encodes one half and decodes the other (two ranks, one thread of a Xeon).
_CODEC_NS = {"exact": (0.0, 0.0), "bf16": (0.5, 0.4), "int8": (1.8, 1.8), "int4": (2.2, 1.8)}


def paths(job: Job, sync_every: Sequence[int] = (8, 32)) -> list[Path]:
    """Returns all paths: the exact ones first, then those that round, then other algorithms."""
    found = [Path(flags="--parallel.strategy ddp", bits=wire_bits("ddp", "exact", 32), strategy="ddp")]
    layers = f" --train.layered-micro-batches {job.num_micro_batches}"
    for wire, (encode_ns, update_ns) in _CODEC_NS.items():
        path = Path(
            flags="--parallel.strategy zero" + (f" --parallel.wire {wire}" if wire != "exact" else ""),
            bits=wire_bits("zero", wire, job.compute_bits, ranks_per_host=job.num_ranks / job.num_hosts),
            kind="exact" if wire == "exact" else "rounding",
            encode_s=encode_ns * 1e-9,
            update_codec_s=update_ns * 1e-9,
        )
        found.append(path)
        if job.num_micro_batches > 1:
            found.append(replace(path, is_layered=True, flags=path.flags + layers))
    for every in sync_every:
        flags, bits = (
            f"--parallel.strategy local --parallel.sync-every {every}",
            wire_bits("local", "exact", 32, sync_every=every),
        )
        found.append(Path(flags=flags, bits=bits, kind="another algorithm", strategy="local"))
    return found


def first_good(predictions: Sequence[Prediction]) -> Prediction | None:
    """Returns the first path that reaches the goal; None: none does."""
    return next((found for found in predictions if found.efficiency_frac >= GOAL_FRAC), None)
