"""Opening and closing: groups are gone after every way out, and a lost rank is noticed at once."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks

from paceline.base.errors import RunError
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.group import LocalGroup, PeerLost
from paceline.world.runtime import open_world


class Deliberate(Exception):
    """Raised by the tests inside a world."""


def test_one_process_is_a_world_of_one_without_a_process_group() -> None:
    with open_world(ParallelConfig(device="cpu", threads=1), Environment()) as world:
        assert (world.rank, world.world_size, world.backend, world.is_main) == (0, 1, "none", True)
        assert isinstance(world.group, LocalGroup)
        assert not dist.is_initialized()
        assert torch.get_num_threads() == 1


def success_then_failure(config: ParallelConfig, env: Environment) -> dict[str, Any]:
    """One world closed after success, then an error on rank 1 in another."""
    saw: dict[str, Any] = {}
    with open_world(config, env) as world:
        saw["place"] = (world.rank, world.world_size, world.backend, world.threads, dist.is_initialized())
        world.group.barrier()
    saw["open after success"] = dist.is_initialized()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # as the agent says it to a second attempt: keys of their own
    started = time.monotonic()
    try:
        with open_world(config, env) as world:
            if world.rank == 1:
                raise Deliberate
            world.group.all_reduce(torch.ones(3))
    except (Deliberate, PeerLost) as error:
        saw["error"] = type(error).__name__
        saw["message"] = str(error)
    saw["took_s"] = time.monotonic() - started
    saw["open after failure"] = dist.is_initialized()
    return saw


def test_a_process_group_is_gone_after_success_and_after_an_exception() -> None:
    rows = run_ranks(success_then_failure, 2, opened=False)
    assert [row["place"] for row in rows] == [(rank, 2, "gloo", 1, True) for rank in range(2)]
    assert [row["error"] for row in rows] == ["PeerLost", "Deliberate"]
    for row in rows:
        assert not row["open after success"]
        assert not row["open after failure"]
        assert row["took_s"] < 10
    assert "rank 0 lost the other ranks in a all-reduce" in rows[0]["message"].replace(" an ", " a ")


def dies(config: ParallelConfig, env: Environment) -> tuple[str, float]:
    """Rank 1 dies without a word; returns what the others saw, and how long after."""
    try:
        with open_world(config, env) as world:
            world.group.barrier()
            if world.rank == 1:
                os._exit(9)
            started = time.monotonic()
            while True:
                world.group.all_reduce(torch.ones(1000))
    except RunError as error:
        return type(error).__name__, time.monotonic() - started


def test_a_rank_that_dies_makes_all_others_raise_peer_lost_promptly() -> None:
    config = ParallelConfig(device="cpu", threads=1, timeout_s=50)
    with pytest.raises(RanksFailed) as failure:
        run_ranks(dies, 3, config=config, opened=False)
    outcomes = failure.value.outcomes
    assert outcomes[1].status == 9
    assert not outcomes[1].has_result
    for rank in (0, 2):
        name, took_s = outcomes[rank].result
        assert name == "PeerLost"
        assert took_s < 10  # the timeout is 50 s


def raises_on_one_rank(world: Any) -> int:
    if world.rank == 1:
        raise Deliberate("said by rank 1")
    world.group.barrier()
    return world.rank


def sleeps(world: Any) -> None:
    time.sleep(60)


def test_the_helper_shows_every_ranks_traceback() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0.*PeerLost.*rank 1.*Deliberate: said by rank 1"):
        run_ranks(raises_on_one_rank, 2)


def test_the_helper_ends_ranks_at_the_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="not done within 4 s"):
        run_ranks(sleeps, 1, timeout_s=4)
    assert time.monotonic() - started < 8
