"""`paceline bench link`: latency and bandwidth between hosts, times of collectives, of a model's all-reduce, and of a
training step by path.

It uses the `Group` that training uses. The number of repetitions follows from times that all ranks share, so that it is
the same on all. Bandwidths are bytes of payload a second, without network headers.
"""

import itertools
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from paceline import __version__
from paceline.base import units
from paceline.base.ownership import borders
from paceline.config import Config
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT
from paceline.sync.layout import backward_order, cut
from paceline.tools.bench.link_compute import measured_job
from paceline.tools.plan.calibrate import COLLECTIVES, Fit, bus_factor, fit, sizes
from paceline.tools.plan.paths import paths
from paceline.tools.plan.schedule import Job, Prediction, predict
from paceline.tools.plan.stopwatch import LEAST_RUNS, Run, Stopwatch
from paceline.train.resolve import resolve
from paceline.world.env import interface_of, transfer_address
from paceline.world.group import Group
from paceline.world.peer import Peer
from paceline.world.runtime import World

_PAIRS_SHARE, _COLLECTIVE_SHARE, _MODEL_SHARE = 0.2, 0.15, 0.2  # of the time budget; there are four collectives
_ELEMENT_BYTES = 4  # float32, as gradients are
_PING_BYTES, _PING_S = 8, 0.3
_PROBE_BYTES, _MOST_MESSAGE_BYTES = 1 << 20, 1 << 26
_MESSAGE_S = 0.1  # approximate duration of a message, so that latency does not affect bandwidth
_LEAST_STREAM_S = 0.5
_MOST_LOCAL_RANKS = 4  # on one host, pairs of the first four ranks are measured


@dataclass(frozen=True)
class Host:
    name: str
    ranks: tuple[int, ...]
    interface: str  # in use: name, address and MTU; empty if the backend does not say


@dataclass(frozen=True)
class Pair:
    """Two ranks that exchange messages by the backend."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float  # of 8 bytes in each direction
    bytes_per_s: float  # in each direction, while both are busy, as in a ring


@dataclass(frozen=True)
class Time:
    """One collective at one size. A repetition counts the time of its slowest rank."""

    num_bytes: int  # of the buffer
    iterations: int
    seconds: float  # median
    bus_bytes_per_s: float  # of the busiest link: comparable with its bandwidth for any number of ranks


@dataclass(frozen=True)
class Collective:
    """One collective at all sizes that the time budget allowed."""

    name: str
    times: tuple[Time, ...]
    left_out_bytes: tuple[int, ...]  # because of the time budget
    fit: Fit


@dataclass(frozen=True)
class ModelTimes:
    """Seconds of the all-reduce of a model's float32 gradients, once a step, strategy ddp."""

    shape: str  # of the model
    parameters: int
    gradient_bytes: int
    bucket_bytes: tuple[int, ...]
    wire_bytes: float  # sent by each rank
    computed_s: float  # wire_bytes / bandwidth of the slowest link: an ideal ring
    fitted_s: float  # by the fit, one bucket after another
    alone_s: float | None  # measured without compute, all buckets at once; None: no time left
    predicted_s: float  # alone_s, else fitted_s


@dataclass(frozen=True)
class LinkReport:
    """All measurements and their setup. Equal on all ranks."""

    world_size: int
    backend: str
    versions: dict[str, str]
    hosts: tuple[Host, ...]
    pairs: tuple[Pair, ...]
    collectives: tuple[Collective, ...]
    model: ModelTimes
    job: Job
    paths: tuple[Prediction, ...]
    shares_memory: bool = False  # training of these ranks adds in shared memory and sends nothing

    @property
    def slowest(self) -> Pair:
        return min(self.pairs, key=lambda pair: pair.bytes_per_s)


def measure(
    world: World,
    config: Config,
    *,
    max_bytes: int,
    budget_s: float,
    compute_ms: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> LinkReport:
    """Returns all measurements of this world's links, in about budget_s, and predictions of a training step.
    compute_ms: forward and backward of a step; 0: measured. say: receives what is being measured. Collective. Raises
    PeerLost if a rank dies."""
    settings = resolve(config, config.data.expected_vocab, world.facts)  # of text: no data is read
    # Gloo's messages start and end in host memory.
    messages = Stopwatch(world.group, torch.device("cpu") if world.backend == "gloo" else world.device)
    ranks = pairs_to_measure(world.peers)
    pairs = []
    for first, second in ranks:
        say(f"messages between ranks {first} and {second}")
        pairs.append(
            _time_pair(messages, world.peers[first], world.peers[second], _PAIRS_SHARE * budget_s / len(ranks))
        )
    watch = Stopwatch(world.group, world.device)
    collectives = []
    for name in COLLECTIVES:
        say(f"{name}, 1 KiB to {units.size(max_bytes)}")
        collectives.append(_time_collective(watch, name, max_bytes, _COLLECTIVE_SHARE * budget_s))
    say("the model's gradients")
    slowest = min(pairs, key=lambda pair: pair.bytes_per_s)
    model = _time_model(watch, settings.config, collectives[0].fit, slowest.bytes_per_s, _MODEL_SHARE * budget_s)
    say("the model's forward, backward and update")
    job = measured_job(world, settings, compute_ms, slowest.latency_s, slowest.bytes_per_s)
    versions = {"paceline": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if world.backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return LinkReport(
        world_size=world.world_size,
        backend=world.backend,
        versions=versions,
        hosts=_hosts(world),
        pairs=tuple(pairs),
        collectives=tuple(collectives),
        model=model,
        job=job,
        paths=tuple(predict(job, path) for path in paths(job, by_gloo=world.backend == "gloo")),
        shares_memory=world.facts[0].shares_memory,
    )


def _hosts(world: World) -> tuple[Host, ...]:
    interfaces = world.group.share_text(interface_in_use(world.backend))
    ranks: dict[str, list[int]] = {}
    for peer in world.peers:
        ranks.setdefault(peer.host, []).append(peer.rank)
    return tuple(Host(name, tuple(ranks_there), interfaces[ranks_there[0]]) for name, ranks_there in ranks.items())


def interface_in_use(backend: str) -> str:
    """Returns name, address and MTU of this host's interface that the backend uses; empty if it does not say."""
    named = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "").partition(",")[0].lstrip("=")
    if backend == "nccl" and (not named or named.startswith("^")):  # or InfiniBand, NVLink, shared memory
        return ""
    address = transfer_address(named)
    name = named or interface_of(address)
    stats = psutil.net_if_stats().get(name)
    return f"{name} {address}" + (f", MTU {stats.mtu}" if stats else "")


# ---- between two ranks ----


def pairs_to_measure(peers: Sequence[Peer]) -> list[tuple[int, int]]:
    """Returns every pair of hosts, by the first rank of each; on a single host, pairs of its first ranks."""
    first: dict[str, int] = {}
    for peer in peers:
        first.setdefault(peer.host, peer.rank)
    ranks = list(first.values()) if len(first) > 1 else [peer.rank for peer in peers[:_MOST_LOCAL_RANKS]]
    return list(itertools.combinations(ranks, 2))


def _time_pair(watch: Stopwatch, first: Peer, second: Peer, budget_s: float) -> Pair:
    """Times messages between these two. Collective: the other ranks share the times."""
    ranks = first.rank, second.rank

    def seconds(num_bytes: int, enough_s: float) -> float:
        return statistics.median(watch.enough(_exchange(watch, ranks, num_bytes), enough_s))

    latency_s = seconds(_PING_BYTES, _PING_S)
    rate = _PROBE_BYTES / seconds(_PROBE_BYTES, 0.0)
    num_bytes = min(max(_PROBE_BYTES, int(rate * _MESSAGE_S)), _MOST_MESSAGE_BYTES)
    rate = num_bytes / seconds(num_bytes, max(_LEAST_STREAM_S, budget_s))
    return Pair(ranks, (first.host, second.host), latency_s, rate)


def _exchange(watch: Stopwatch, ranks: tuple[int, int], num_bytes: int) -> Run:
    """Returns a function that exchanges messages of this size between these two; on other ranks it does nothing."""
    peer = {ranks[0]: ranks[1], ranks[1]: ranks[0]}.get(watch.group.rank)
    if peer is None:
        return lambda: None
    outgoing, incoming = torch.ones(2, num_bytes, dtype=torch.uint8, device=watch.device)
    return lambda: watch.group.start_messages({peer: outgoing}, {peer: incoming}).wait()


# ---- collectives ----


def _time_collective(watch: Stopwatch, name: str, max_bytes: int, budget_s: float) -> Collective:
    """Returns the times at all sizes that fit the budget: it skips a size if three repetitions of four times the last
    size's time would exceed the rest. Two sizes are always measured. Collective."""
    times: list[Time] = []
    left_out = sizes(max_bytes)
    until = watch.spent_s + budget_s
    while left_out:
        expected_s = 4 * times[-1].seconds * LEAST_RUNS if times else 0.0
        if watch.spent_s + expected_s > until and len(times) >= 2:
            break
        num_bytes = left_out.pop(0)
        run = _collective(watch.group, name, torch.zeros(num_bytes // _ELEMENT_BYTES, device=watch.device))
        measured_s = watch.enough(run, budget_s / 30)  # the ten sizes up to 256 MiB: a third for small ones
        seconds = statistics.median(measured_s)
        bus = num_bytes / seconds * bus_factor(name, watch.group.size)
        times.append(Time(num_bytes, len(measured_s), seconds, bus))
    line = fit([time.num_bytes for time in times], [time.seconds for time in times])
    return Collective(name, tuple(times), tuple(left_out), line)


def _collective(group: Group, name: str, flat: torch.Tensor) -> Run:
    """Returns a function that runs a collective on a flat buffer and waits for it; all ranks' parts are equal."""
    edges = borders(flat.numel(), [1] * group.size)
    return {
        "all-reduce": lambda: group.start_all_reduce(flat).wait(),
        "reduce-scatter": lambda: group.start_reduce_scatter(flat, edges).wait(),
        "all-gather": lambda: group.start_all_gather(flat, edges).wait(),
        "broadcast": lambda: group.broadcast(flat),
    }[name]


# ---- a model ----


def bucket_elements(model: ModelConfig, bucket_bytes: int) -> list[int]:
    """Returns the elements of each bucket, in the order of transfer, without memory for the model."""
    with torch.device("meta"):
        members = backward_order(GPT(model))
    return [sum(parameter.numel() for _, parameter in chunk) for chunk in cut(members, bucket_bytes)]


def _time_model(watch: Stopwatch, config: Config, line: Fit, link: float, budget_s: float) -> ModelTimes:
    """Times the all-reduce of strategy ddp. link: bytes a second of the slowest pair, in one direction. Collective."""
    elements = bucket_elements(config.model, replace(config.parallel, strategy="ddp").bucket_bytes("cpu"))
    bucket_bytes = tuple(_ELEMENT_BYTES * count for count in elements)
    wire_bytes = bus_factor("all-reduce", watch.group.size) * sum(bucket_bytes)
    fitted_s = sum(map(line.seconds, bucket_bytes))
    alone_s = None
    if fitted_s * (1 + LEAST_RUNS) <= budget_s:
        flats = [torch.zeros(count, device=watch.device) for count in elements]

        def all_buckets() -> None:
            for transfer in [watch.group.start_all_reduce(flat) for flat in flats]:
                transfer.wait()

        alone_s = statistics.median(watch.enough(all_buckets, budget_s / 2))
    return ModelTimes(
        shape=f"{config.model.arch}, {config.model.n_layer} layers x {config.model.n_embd}",
        parameters=sum(elements),
        gradient_bytes=sum(bucket_bytes),
        bucket_bytes=bucket_bytes,
        wire_bytes=wire_bytes,
        computed_s=wire_bytes / link,
        fitted_s=fitted_s,
        alone_s=alone_s,
        predicted_s=fitted_s if alone_s is None else alone_s,
    )
