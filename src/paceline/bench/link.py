"""`paceline bench link`: what crosses between ranks, how fast, and what that makes of a model's all-reduce.

facts         the interface, the backend, the versions (link_interface.py)
pairs         latency and bandwidth between two hosts at a time (link_pairs.py; link_tcp.py without the backend)
collectives   the project's own, from 1 KiB up (link_times.py), and a line through each (link_fit.py)
model         its gradients, as training sends them (link_model.py)

link_show.py makes tables and a plot of it.
"""

import json
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline import __version__
from paceline.base import units
from paceline.bench.link_fit import COLLECTIVES, Fit, fit
from paceline.bench.link_interface import Interface, interface_in_use
from paceline.bench.link_model import ModelTimes, time_model
from paceline.bench.link_pairs import Pair, time_pairs
from paceline.bench.link_times import CollectiveTime, Stopwatch, time_sizes
from paceline.config import Config
from paceline.world.runtime import World

# Of the time budget; the model's part is what its all-reduce may take, and most often it takes less.
_PAIRS_SHARE, _COLLECTIVE_SHARE, _MODEL_SHARE = 0.2, 0.11, 0.45


@dataclass(frozen=True)
class Host:
    """One host of the world."""

    name: str
    ranks: tuple[int, ...]
    interface: Interface


@dataclass(frozen=True)
class CollectiveReport:
    """One collective at all sizes that fit into the budget."""

    name: str
    times: tuple[CollectiveTime, ...]
    left_out_bytes: tuple[int, ...]  # for lack of time
    fit: Fit


@dataclass(frozen=True)
class LinkReport:
    """All that was measured, with what it was measured on. Bandwidths are payload, in bytes a second."""

    world_size: int
    backend: str
    versions: dict[str, str]
    hosts: tuple[Host, ...]
    pairs: tuple[Pair, ...]
    collectives: tuple[CollectiveReport, ...]
    model: ModelTimes

    @property
    def slowest(self) -> Pair:
        """The pair that a ring waits for."""
        return min(self.pairs, key=lambda pair: pair.link_bytes_per_s)

    @property
    def payload_share(self) -> float | None:
        """The share of an Ethernet link's bits that can be payload, by the smallest MTU; None: not known."""
        shares = [host.interface.payload_share for host in self.hosts]
        known = [share for share in shares if share is not None]
        return min(known) if len(known) == len(shares) else None

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists, text and numbers; with the bandwidths that are computed from times."""
        found = asdict(self)
        for collective, report in zip(found["collectives"], self.collectives, strict=True):
            for row, time in zip(collective["times"], report.times, strict=True):
                row["algorithm_bytes_per_s"] = time.algorithm_bytes_per_s
                row["bus_bytes_per_s"] = time.bus_bytes_per_s
            if math.isinf(report.fit.beta_bytes_per_s):  # JSON has no infinity
                collective["fit"]["beta_bytes_per_s"] = None
        for row, pair in zip(found["pairs"], self.pairs, strict=True):
            row["link_bytes_per_s"] = pair.link_bytes_per_s
        found["model"]["predicted_s"] = self.model.predicted_s
        found["payload_share"] = self.payload_share
        return found


def measure(
    world: World,
    config: Config,
    *,
    max_bytes: int,
    budget_s: float,
    tell: Callable[[str], None] = lambda _: None,
) -> LinkReport:
    """Returns everything about this world's links, in about budget_s; equal on all ranks. Collective.

    `tell` hears what is being measured. Raises RunError where a rank is lost or not reached.
    """
    mine = interface_in_use(world.backend)
    shared = [json.loads(text) for text in world.group.share_text(json.dumps(asdict(mine)))]
    hosts = _hosts(world, [Interface(**values) for values in shared])

    def tell_pair(pair: Pair) -> None:
        tell(f"ranks {pair.ranks[0]} and {pair.ranks[1]}: {pair.link_bytes_per_s / 1e6:.1f} MB/s")

    tell("messages between ranks")
    address = mine.address if world.backend == "gloo" else ""
    device = torch.device("cpu") if address else world.device  # Gloo's messages begin and end in the host's memory
    pairs = time_pairs(world.group, device, world.peers, address, _PAIRS_SHARE * budget_s, tell_pair)
    watch = Stopwatch(world.group, world.device)
    collectives = []
    for name in COLLECTIVES:
        tell(f"{name}, 1 KiB to {units.size(max_bytes)}")
        times, left_out = time_sizes(watch, name, max_bytes, _COLLECTIVE_SHARE * budget_s)
        line = fit([time.num_bytes for time in times], [time.seconds for time in times])
        collectives.append(CollectiveReport(name, tuple(times), tuple(left_out), line))
    tell("the model's gradients")
    link = min(pair.link_bytes_per_s for pair in pairs)
    both = min(pair.both_bytes_per_s for pair in pairs)
    model = time_model(watch, config, collectives[0].fit, link, both, _MODEL_SHARE * budget_s)
    return LinkReport(
        world_size=world.world_size,
        backend=world.backend,
        versions=_versions(world.backend),
        hosts=hosts,
        pairs=tuple(pairs),
        collectives=tuple(collectives),
        model=model,
    )


def _hosts(world: World, interfaces: list[Interface]) -> tuple[Host, ...]:
    """The hosts in the order of their first ranks, each with its first rank's interface."""
    ranks: dict[str, list[int]] = {}
    for peer in world.peers:
        ranks.setdefault(peer.host, []).append(peer.rank)
    return tuple(Host(name, tuple(own), interfaces[own[0]]) for name, own in ranks.items())


def _versions(backend: str) -> dict[str, str]:
    found = {"paceline": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if backend == "nccl":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
