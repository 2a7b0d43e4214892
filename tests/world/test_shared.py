"""Collectives in shared memory. test_group.py compares their results with numpy, test_strategies.py with Gloo's."""

import gc
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Call, RanksFailed, run_calls, run_ranks

from paceline.base.ownership import borders
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import World, open_world

NUM_ELEMENTS = 3 * (1 << 15) + 5  # several chunks for each rank


def contribution(rank: int) -> torch.Tensor:
    return torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def mapped() -> list[str]:
    """The last words of this process's mappings of shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "paceline" in line.split("/")[-1]]


def sums(world: World) -> dict[str, Any]:
    """An all-reduce and a reduce-scatter, and what is mapped while the tensor lives and afterwards."""
    group, edges = world.group, borders(NUM_ELEMENTS, range(world.world_size))
    flat = group.zeros(NUM_ELEMENTS, torch.zeros(1)).copy_(contribution(world.rank))
    group.all_reduce(flat)
    reduced = flat.clone()
    flat.copy_(contribution(world.rank))
    group.start_reduce_scatter(flat, edges).wait()
    mine = slice(edges[world.rank], edges[world.rank + 1])
    scattered, names = (mine, flat[mine].clone()), mapped()
    del flat
    gc.collect()
    return {"reduced": reduced, "scattered": scattered, "mapped": names, "left": mapped()}


def one_does_not(config: ParallelConfig, env: Environment) -> tuple[bool, float]:
    own = ParallelConfig(device="cpu", threads=1, timeout_s=config.timeout_s, shared_memory=env.rank != 1)
    with open_world(own, env) as world:
        flat = world.group.zeros(4, torch.zeros(1)).fill_(1)
        world.group.all_reduce(flat)
        return world.group.shares_memory, float(flat.sum())


def adds_float8(world: World) -> str:
    flat = world.group.zeros(8, torch.zeros(1, dtype=torch.float8_e4m3fn))
    with pytest.raises(Exception) as caught:
        world.group.all_reduce(flat)
    return str(caught.value)


def without_memfd(config: ParallelConfig, env: Environment) -> bool:
    def refuse(name: str) -> int:
        raise PermissionError(1, "a seccomp profile refuses it")

    with pytest.MonkeyPatch.context() as patch:
        if env.rank == 1:
            patch.setattr(os, "memfd_create", refuse)
        with open_world(config, env) as world:
            return world.group.shares_memory


@pytest.fixture(scope="module")
def on_three_ranks() -> dict[str, list[Any]]:
    calls = {
        "sums": Call(sums),
        "one does not": Call(one_does_not, opened=False),
        "float8": Call(adds_float8),
        "without memfd": Call(without_memfd, opened=False),
    }
    return run_calls(calls, 3)


def test_sums_are_made_in_the_order_of_ranks_in_memory_that_has_no_name_and_ends_with_the_tensor(
    on_three_ranks: dict[str, list[Any]],
) -> None:
    total = contribution(0) + contribution(1) + contribution(2)
    for row in on_three_ranks["sums"]:
        part, mine = row["scattered"]
        assert torch.equal(row["reduced"], total)
        assert torch.equal(mine, total[part])
        assert row["mapped"] == ["/memfd:paceline (deleted)"] * 3  # no file that a killed rank could leave
        assert row["left"] == []


def test_all_ranks_use_sockets_if_one_cannot_share_memory(on_three_ranks: dict[str, list[Any]]) -> None:
    assert on_three_ranks["one does not"] == [(False, 12.0)] * 3
    assert on_three_ranks["without memfd"] == [False] * 3  # one may not make anonymous files


def test_an_error_of_the_addition_itself_reaches_the_caller(on_three_ranks: dict[str, list[Any]]) -> None:
    for said in on_three_ranks["float8"]:
        assert "not implemented" in said


def breaks(world: World, how: str) -> None:
    flats = [world.group.zeros(8, torch.zeros(1)) for _ in range(2)]
    world.group.all_reduce(flats[0])
    if how == "late":
        world.group.set_timeout(0.5)
    elif world.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and how != "order":
        signal.pause()
    for flat in flats[:: -1 if how == "order" and world.rank == 1 else 1]:
        world.group.start_all_reduce(flat).wait()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", "Connection closed by rank 1"),
        ("late", "Timed out after 0.5 s"),
        ("order", "another rank is in another collective"),
    ],
)
def test_a_rank_that_is_lost_or_elsewhere_ends_the_wait_of_the_others(how: str, says: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(breaks, 3, how, last_words_s=2)
    # One of the others may see the end of the other one first.
    lost = f"lost the other ranks during an all-reduce: {says}"
    assert any(re.search(lost, each.said) for each in caught.value.outcomes)
