"""Several ranks a host: the bytes between hosts are those of one rank each, and sums have the documented order."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Call, RanksFailed, run_calls, run_ranks

from paceline.base.ownership import borders
from paceline.world.group import DistributedGroup, PeerLost
from paceline.world.hierarchy import Hosts
from paceline.world.runtime import World

WORLDS = ["aabb", "abab", "aaab", "abca"]  # each rank's host
NUM_ELEMENTS, NUM_ROUNDS = 40_003, 4


def bytes_between_hosts(names: str) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Bytes from host to host of a reduce-scatter and of an all-gather of 1200 elements with equal parts."""
    hosts, size = Hosts.of(names), len(names)
    edges, flat = borders(1200, [1] * size), torch.empty(1200, dtype=torch.uint8)
    parts = [flat[a:b] for a, b in itertools.pairwise(edges)]
    found = []
    for phases_of in (hosts.reduce_scatter, hosts.all_gather):
        sent = dict.fromkeys(itertools.permutations(sorted(set(names)), 2), 0)
        for rank in range(size):
            for to, tensor in [message for phase in phases_of(rank, parts) for message in phase.sends]:
                if names[to] != names[rank]:
                    sent[names[rank], names[to]] += tensor.nbytes
        found.append(sent)
    return found[0], found[1]


@pytest.mark.parametrize("names", WORLDS)
def test_each_host_sends_each_part_of_another_host_once(names: str) -> None:
    scattered, gathered = bytes_between_hosts(names)
    owned = {host: 1200 * names.count(host) / len(names) for host in names}
    assert scattered == {(source, to): owned[to] for source, to in scattered}
    assert gathered == {(source, to): owned[source] for source, to in gathered}


def test_without_several_hosts_of_several_ranks_all_pairs_exchange() -> None:
    assert bytes_between_hosts("ab") == ({("a", "b"): 600, ("b", "a"): 600},) * 2
    assert [Hosts.of(names).has_levels for names in ("aaa", "abc", "a", "aab")] == [False, False, False, True]


def brought(rank: int, number: int) -> np.ndarray:
    return np.random.default_rng([rank, number]).standard_normal(NUM_ELEMENTS, dtype=np.float32)


def many_under_way(world: World, names: str) -> list[list[np.ndarray]]:
    """Rounds of an all-reduce, a reduce-scatter and its all-gather, all begun before the first is waited for."""
    group, edges = DistributedGroup(world.device, 30.0, names), borders(NUM_ELEMENTS, range(1, len(names) + 1))
    rounds = [[torch.from_numpy(brought(world.rank, number)) for _ in "rs"] for number in range(NUM_ROUNDS)]
    transfers = [
        (group.start_all_reduce(reduced), group.start_reduce_scatter(scattered, edges)) for reduced, scattered in rounds
    ]
    gathers = []
    for (_, scatter), (_, scattered) in zip(transfers, rounds, strict=True):
        scatter.wait()
        gathers.append(group.start_all_gather(scattered, edges))
    for transfer in [*(reduce for reduce, _ in transfers), *gathers]:
        transfer.wait()
    return [[tensor.numpy() for tensor in tensors] for tensors in rounds]


def channels_last(world: World, names: str) -> float:
    tensor = torch.ones(8, 16, 16, 16).contiguous(memory_format=torch.channels_last)  # a gradient of `naive`
    DistributedGroup(world.device, 30.0, names).all_reduce(tensor)
    return float(tensor.min())


@pytest.fixture(scope="module")
def on_four_ranks() -> dict[str, list[Any]]:
    calls = {names: Call(many_under_way, names) for names in WORLDS}
    return run_calls({**calls, "channels last": Call(channels_last, "aaab")}, 4)


@pytest.mark.parametrize("names", WORLDS)
def test_sums_are_those_of_hosts_in_rank_order_then_of_the_world_in_host_order(
    names: str, on_four_ranks: dict[str, list[Any]]
) -> None:
    answers = on_four_ranks[names]
    for number in range(NUM_ROUNDS):
        of_hosts = [sum(brought(r, number) for r, n in enumerate(names) if n == host) for host in dict.fromkeys(names)]
        for rank, found in itertools.product(range(len(names)), range(2)):
            np.testing.assert_array_equal(answers[rank][number][found], sum(of_hosts))


def test_a_tensor_that_is_not_contiguous_is_reduced_as_a_whole(on_four_ranks: dict[str, list[Any]]) -> None:
    assert on_four_ranks["channels last"] == [4.0] * 4


def dies(world: World, names: str) -> None:
    """Rank 3 ends; the others say how long that took them to see."""
    group = DistributedGroup(world.device, 30.0, names)
    flat = torch.ones(NUM_ELEMENTS)
    group.start_all_reduce(flat).wait()
    started = time.monotonic()
    if world.rank == 3:
        raise SystemExit(3)
    try:
        group.start_all_reduce(flat).wait()
    except PeerLost:
        raise PeerLost(f"after {time.monotonic() - started:.0f} s") from None


def test_a_dead_rank_is_noticed_by_all_also_by_those_that_send_it_nothing() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(dies, 4, "aabb")
    assert all("PeerLost: after 0 s" in outcome.said for outcome in caught.value.outcomes[:3])
