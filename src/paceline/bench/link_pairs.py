"""Latency and bandwidth between two ranks: of the link, by a plain TCP connection, and of the backend's messages.

One pair after the other; the other ranks wait meanwhile. All figures are payload: what the program sends, without the
headers of the network.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations

import torch

from paceline.bench.link_tcp import Door, come_in, drain, let_in, open_door, pour
from paceline.world.device import DeviceClock
from paceline.world.group import Group
from paceline.world.join import Peer

_PING_BYTES = 8
_PING_S = 0.3  # of round trips
_FEW_PINGS, _MOST_PINGS = 20, 2000
_PROBE_BYTES, _PROBES = 1 << 20, 4
_MESSAGE_S = 0.1  # what one message of a bandwidth is to take, so that its hand-shake does not count
_LEAST_MESSAGE_BYTES, _MOST_MESSAGE_BYTES = 1 << 20, 1 << 26
_LEAST_MESSAGES = 4
_IN_FLIGHT = 2  # messages, so that the next one is there when the last has gone
_LEAST_STREAM_S = 0.5
_MOST_LOCAL = 4  # ranks of which all pairs are measured where all are on one host


@dataclass(frozen=True)
class Pair:
    """Between two ranks, in bytes a second of payload. The TCP figures are None where the backend is not Gloo, since
    NCCL may use another network."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_s: float  # half of the median round trip of 8 bytes through the backend
    tcp_there_bytes_per_s: float | None  # from the first to the second
    tcp_back_bytes_per_s: float | None
    there_bytes_per_s: float  # through the backend, one way alone
    back_bytes_per_s: float
    both_bytes_per_s: float  # through the backend, each way, both ways at once; the slower of them
    message_bytes: int
    seconds: float  # that each of these was measured for, about

    @property
    def link_bytes_per_s(self) -> float:
        """What the link itself carries in its slower direction."""
        ways = (self.tcp_there_bytes_per_s, self.tcp_back_bytes_per_s)
        known = [way for way in ways if way is not None]
        return min(known) if known else min(self.there_bytes_per_s, self.back_bytes_per_s)


def pairs_to_measure(peers: Sequence[Peer]) -> list[tuple[int, int]]:
    """Returns every pair of hosts, by the first rank of each; where all ranks are on one host, pairs of its first."""
    first: dict[str, int] = {}
    for peer in peers:
        first.setdefault(peer.host, peer.rank)
    ranks = list(first.values()) if len(first) > 1 else [peer.rank for peer in peers[:_MOST_LOCAL]]
    return list(combinations(ranks, 2))


def time_pairs(
    group: Group,
    device: torch.device,
    peers: Sequence[Peer],
    address: str,
    budget_s: float,
    tell: Callable[[Pair], None] = lambda _: None,
) -> list[Pair]:
    """Returns the times between all pairs, in about budget_s, or longer where there are many. Collective.

    address is that of this rank's interface, for plain TCP; empty: not measured. `tell` hears of each as it is known.
    Raises RunError on a rank that cannot reach another, or loses it.
    """
    todo = pairs_to_measure(peers)
    stream_s = max(_LEAST_STREAM_S, budget_s / (5 if address else 3) / len(todo))
    found = []
    with ExitStack() as stack:
        listener, door = stack.enter_context(open_door(address)) if address else (None, Door("", 0, ""))
        doors = [Door(**json.loads(text)) for text in group.share_text(json.dumps(dataclasses.asdict(door)))]
        for first, second in todo:
            group.barrier()
            link = [0.0, 0.0]
            if address and group.rank == first:
                assert listener is not None
                with let_in(listener, door) as connection:
                    pour(connection, stream_s)
                    link[1] = drain(connection)
            elif address and group.rank == second:
                with come_in(doors[first], address) as connection:
                    link[0] = drain(connection)
                    pour(connection, stream_s)
            numbers = [0.0] * 6
            if group.rank in (first, second):
                numbers = _between(group, device, first, second, stream_s)
            rows = group.share([*link, *numbers])
            pair = _pair((first, second), peers, rows[first], rows[second], has_tcp=bool(address))
            tell(pair)
            found.append(pair)
    group.take_traffic()
    return found


def _pair(
    ranks: tuple[int, int], peers: Sequence[Peer], first: list[float], second: list[float], *, has_tcp: bool
) -> Pair:
    """Puts together what both ends saw: each knows what arrived there."""
    latency, there, back, both, message_bytes, seconds = second[2:]
    return Pair(
        ranks=ranks,
        hosts=(peers[ranks[0]].host, peers[ranks[1]].host),
        latency_s=latency,
        tcp_there_bytes_per_s=second[0] if has_tcp else None,
        tcp_back_bytes_per_s=first[1] if has_tcp else None,
        there_bytes_per_s=there,
        back_bytes_per_s=back,
        both_bytes_per_s=both,
        message_bytes=int(message_bytes),
        seconds=seconds,
    )


def _between(group: Group, device: torch.device, first: int, second: int, stream_s: float) -> list[float]:
    """The numbers of a pair through the backend, equal at both ends."""
    wire = _Wire(group, device, peer=second if group.rank == first else first, leads=group.rank == first)
    latency = wire.latency_s()
    rate = wire.agree(wire.stream(_PROBE_BYTES, _PROBES, there=True, back=True), min)
    message_bytes = min(max(int(rate * _MESSAGE_S), _LEAST_MESSAGE_BYTES), _MOST_MESSAGE_BYTES)
    count = max(_LEAST_MESSAGES, round(rate * stream_s / message_bytes))
    there = wire.agree(wire.stream(message_bytes, count, there=True, back=False))
    back = wire.agree(wire.stream(message_bytes, count, there=False, back=True))
    both = wire.agree(wire.stream(message_bytes, count, there=True, back=True), min)
    return [latency, there, back, both, float(message_bytes), count * message_bytes / rate]


class _Wire:
    """One end of a pair, through the backend."""

    def __init__(self, group: Group, device: torch.device, peer: int, leads: bool):
        self._group, self._device, self._peer, self._leads = group, device, peer, leads
        self._clock = DeviceClock(device)

    def latency_s(self) -> float:
        """Half of the median round trip. The leading end sends first."""
        ping = torch.zeros(_PING_BYTES, dtype=torch.uint8, device=self._device)
        mean = self.agree(statistics.mean(self._trips(ping, _FEW_PINGS)))
        rounds = min(_MOST_PINGS, max(_FEW_PINGS, int(_PING_S / mean)))
        return self.agree(statistics.median(self._trips(ping, rounds))) / 2

    def _trips(self, ping: torch.Tensor, rounds: int) -> list[float]:
        trips = []
        for _ in range(rounds):
            start = time.perf_counter()
            for sends in (self._leads, not self._leads):
                here, there = ({self._peer: ping}, {}) if sends else ({}, {self._peer: ping})
                self._group.start_messages(here, there).wait()
                self._clock.finish()
            trips.append(time.perf_counter() - start)
        return trips

    def stream(self, message_bytes: int, count: int, *, there: bool, back: bool) -> float:
        """Bytes a second that came to this end; 0 where only the other end receives.

        From the end of the first message to the end of the last: no hand-shake, no empty pipe, no full token bucket.
        """
        sends, receives = (there, back) if self._leads else (back, there)
        outgoing = torch.empty(message_bytes, dtype=torch.uint8, device=self._device).fill_(1)
        incoming = [torch.empty_like(outgoing).fill_(0) for _ in range(_IN_FLIGHT)]
        ends: list[float] = []
        under_way = []
        for i in range(count + 1 + _IN_FLIGHT):
            if i <= count:
                out = {self._peer: outgoing} if sends else {}
                under_way.append(
                    self._group.start_messages(out, {self._peer: incoming[i % _IN_FLIGHT]} if receives else {})
                )
            if len(under_way) == _IN_FLIGHT or (i > count and under_way):
                under_way.pop(0).wait()
                self._clock.finish()
                ends.append(time.perf_counter())
        return count * message_bytes / (ends[-1] - ends[0]) if receives else 0.0

    def agree(self, value: float, choose: Callable[[float, float], float] = max) -> float:
        """Returns the larger, or what `choose` takes, of both ends' values, on both."""
        mine = torch.tensor([value], dtype=torch.float64, device=self._device)
        other = torch.zeros_like(mine)
        self._group.start_messages({self._peer: mine}, {self._peer: other}).wait()
        return choose(value, float(other.item()))
