"""Opening and closing: groups are gone after every way out, and a lost rank is noticed at once."""

import math
import os
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Call, RanksFailed, run_calls, run_ranks

from paceline.base.errors import UserError
from paceline.world.config import ParallelConfig
from paceline.world.cores import usable_cores
from paceline.world.env import Environment
from paceline.world.facts import RankFacts, unequal_kinds
from paceline.world.group import LocalGroup, PeerLost
from paceline.world.runtime import World, open_world


class Deliberate(Exception):
    """Raised by the tests inside a world."""


def test_one_process_is_a_world_of_one_without_a_process_group() -> None:
    with open_world(ParallelConfig(device="cpu", threads=1), Environment()) as world:
        assert (world.rank, world.world_size, world.backend, world.is_main) == (0, 1, "none", True)
        assert isinstance(world.group, LocalGroup)
        assert (world.store, world.generation, world.warnings) == (None, "", ())
        assert [(peer.rank, peer.pid, peer.is_alive) for peer in world.peers] == [(0, os.getpid(), True)]
        assert not dist.is_initialized()
        assert torch.get_num_threads() == 1


def test_a_world_of_another_size_than_expected_is_refused_before_anything_is_opened() -> None:
    config = ParallelConfig(device="cpu", threads=1, expect_ranks=2)
    with (
        pytest.raises(UserError, match=r"parallel\.expect-ranks is 2, and this world has 1 rank;"),
        open_world(config, Environment()),
    ):
        pass
    assert not dist.is_initialized()


def succeeds(config: ParallelConfig, env: Environment) -> tuple[Any, bool]:
    with open_world(config, env) as world:
        place = (world.rank, world.world_size, world.backend, world.threads, dist.is_initialized())
        world.group.barrier()
    return place, dist.is_initialized()


def who_is_first(world: World) -> tuple[bool, bool, bool]:
    """With all ranks alive, with rank 0 dead, and with rank 0 to blame."""
    dead = replace(world.peers[0], born_ticks=world.peers[0].born_ticks + 1)
    return world.is_first(), replace(world, peers=(dead, *world.peers[1:])).is_first(), world.is_first((0,))


def facts_of(world: World) -> tuple[RankFacts, ...]:
    return world.facts


def verbs_of_odd_values(world: World) -> tuple[list[bool], torch.Tensor, str]:
    """The maximum where one rank has no number; of a dtype that Gloo lacks; and what unlike tensors are told."""
    last = world.rank == world.world_size - 1
    short = world.max(torch.tensor([world.rank, 5], dtype=torch.int16))
    numbers = torch.full((world.world_size + 1,), float(world.rank), dtype=torch.bfloat16)
    numbers[world.rank] = math.nan
    has_nan = [math.isnan(world.max(math.nan if last else 1.0)), *world.max(numbers).isnan().tolist()]
    with pytest.raises(UserError) as caught:
        world.sum(torch.zeros(2, dtype=torch.int64 if last else torch.float32))
    return has_nan, short, str(caught.value)


def opens_by_a_wrong_variable(config: ParallelConfig, env: Environment) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo0,eth7")
        with pytest.raises(UserError) as caught, open_world(config, env):
            pass
    return str(caught.value)


def leaves_three_times(config: ParallelConfig, env: Environment) -> list[str]:
    for _ in range(3):
        with open_world(replace(config, shared_memory=False), env) as world:
            world.group.start_all_gather(torch.ones(9), [0, 3, 6, 9]).wait()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(5.0)
    return [thread.name for thread in threading.enumerate()]


def threads_of_two_launchers(config: ParallelConfig, env: Environment) -> list[int]:
    alone = replace(env, local_rank=0, local_world_size=1)  # as by two torchruns of one rank each
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with open_world(replace(config, threads=0), alone) as world:
            return [facts.threads for facts in world.facts]


def fails(config: ParallelConfig, env: Environment) -> dict[str, Any]:
    """Rank 1 raises while the others wait for it."""
    started = time.monotonic()
    try:
        with open_world(config, env) as world:
            if world.rank == 1:
                raise Deliberate
            world.group.all_reduce(torch.ones(3))
    except (Deliberate, PeerLost) as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "took_s": time.monotonic() - started,
            "open": dist.is_initialized(),
        }
    return {}


@pytest.fixture(scope="module")
def on_three_ranks() -> dict[str, list[Any]]:
    calls = {
        "threads": Call(leaves_three_times, opened=False),
        "success": Call(succeeds, opened=False),
        "first": Call(who_is_first),
        "facts": Call(facts_of),
        "verbs": Call(verbs_of_odd_values),
        "wrong variable": Call(opens_by_a_wrong_variable, opened=False),
        "cores": Call(threads_of_two_launchers, opened=False),
        "failure": Call(fails, opened=False),  # the last: its ranks are apart afterwards
    }
    return run_calls(calls, 3)


def test_the_first_rank_that_lives_prints_what_all_see(on_three_ranks: dict[str, list[Any]]) -> None:
    assert on_three_ranks["first"] == [(True, False, False), (False, True, True), (False, False, False)]


def test_every_rank_knows_the_facts_of_all(on_three_ranks: dict[str, list[Any]]) -> None:
    first, second, third = on_three_ranks["facts"]
    assert first == second == third
    assert [each.device for each in first] == ["cpu"] * 3
    assert [each.backend for each in first] == ["gloo"] * 3
    assert not unequal_kinds(first), "processes of one machine round alike"
    other = replace(first[1], rounding="other", host="b")
    text = unequal_kinds((first[0], other))
    assert f"{first[0].kind} on rank 0 ({first[0].host}); {other.kind} on rank 1 (b)" == text


def test_a_maximum_hides_no_nan_and_tensors_that_gloo_cannot_add_are_refused(
    on_three_ranks: dict[str, list[Any]],
) -> None:
    """Finds: a NaN that is lost, or not, by the rank that has it."""
    for has_nan, short, said in on_three_ranks["verbs"]:
        assert has_nan == [True, True, True, True, False]
        assert short.tolist() == [2, 5]
        assert "World.sum needs one dtype and shape, and got by rank: float32 [2], float32 [2], int64 [2]" in said


def test_an_interface_in_gloos_own_variable_is_checked_as_ours_is(on_three_ranks: dict[str, list[Any]]) -> None:
    for said in on_three_ranks["wrong variable"]:
        assert said.startswith("GLOO_SOCKET_IFNAME is 'lo0', and this machine (")
        assert "has no such interface (did you mean 'lo'?); it has: " in said


def test_no_thread_of_a_world_is_left(on_three_ranks: dict[str, list[Any]]) -> None:
    assert on_three_ranks["threads"] == [["MainThread"]] * 3


def test_a_process_group_is_gone_after_success(on_three_ranks: dict[str, list[Any]]) -> None:
    assert on_three_ranks["success"] == [((rank, 3, "gloo", 1, True), False) for rank in range(3)]


def test_ranks_of_several_launchers_share_the_cores_of_their_machine(on_three_ranks: dict[str, list[Any]]) -> None:
    """Each took all cores, and a step 18 times as long."""
    assert on_three_ranks["cores"] == [[max(1, usable_cores() // 3)] * 3] * 3


def test_a_process_group_is_gone_after_an_exception_and_the_peers_learn_of_it(
    on_three_ranks: dict[str, list[Any]],
) -> None:
    rows = on_three_ranks["failure"]
    assert [row["error"] for row in rows] == ["PeerLost", "Deliberate", "PeerLost"]
    assert not any(row["open"] for row in rows)
    assert all(row["took_s"] < 25 for row in rows)  # the timeout is 30 s
    assert "rank 0 lost the other ranks" in rows[0]["message"]
    assert "all-reduce" in rows[0]["message"]


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
    with pytest.raises(RanksFailed, match="not done within 1 s"):
        run_ranks(sleeps, 1, timeout_s=1)
