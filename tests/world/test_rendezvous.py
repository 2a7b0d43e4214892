"""Joining: ranks find the living of their own start, whatever the dead of earlier ones left in the store.

Ranks are processes without a model, forked from one that has torch imported: 10 ms each instead of two seconds.
"""

import gc
import os
import pickle
import random
import re
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Event, Semaphore
from typing import Any

import psutil
import pytest
import torch
from ranks import FORKS
from torch.distributed import HashStore, TCPStore

from paceline.base.errors import PacelineError, RunError
from paceline.world import alike, peer, process_group, rendezvous
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.errors import PeerLost
from paceline.world.runtime import World, open_world

NUM_RESTARTS = 5


def on_gpu(hello: alike.Hello, gpu: str) -> alike.Hello:
    return replace(hello, peer=replace(hello.peer, gpu=gpu))


def be_a_rank(results: Any, env: Environment, after_s: float, options: dict[str, Any]) -> None:
    """Joins, reduces once, tells what it saw; or the error that it ended with."""
    gc.freeze()  # what the server imported (see ranks.py)
    time.sleep(after_s)
    began = time.monotonic()
    rendezvous._SETTLED_S = options.get("settled_s", rendezvous._SETTLED_S)
    rendezvous._REFUSE_S = options.get("refuse_s", rendezvous._REFUSE_S)
    if ahead_s := options.get("clock_of", {}).get(env.rank):
        real = time.time
        time.time = lambda: real() + ahead_s
    if env.rank in options.get("shares_gpu", ()):
        os.environ["PACELINE_SHARE_GPU"] = "1"
    if gpu := options.get("gpu"):
        rendezvous.this_rank = lambda *rest: on_gpu(alike.this_rank(*rest), gpu)
    if backend := options.get("backend_of", {}).get(env.rank):
        process_group._choose_backend = lambda *_: backend
    try:
        config = ParallelConfig(device="cpu", threads=1, interface="lo", timeout_s=options.get("timeout_s", 20.0))
        with open_world(config, env) as world:
            ones = torch.ones(1)
            world.group.all_reduce(ones)
            seen = options["look"](world) if "look" in options else None
            peers = [(peer.rank, peer.pid) for peer in world.peers]
            results.put((env.rank, world.generation, peers, ones.item(), seen))
    except PacelineError as error:
        results.put((env.rank, type(error).__name__, str(error), time.monotonic() - began, os.getpid()))
    os._exit(0)  # torch's own farewell costs a tenth of a second


class Ranks:
    """Some processes of one start."""

    def __init__(self, *envs: Environment, after_s: tuple[float, ...] = (), **options: Any):
        self._results = FORKS.SimpleQueue()
        delays = after_s or (0.0,) * len(envs)
        self.processes = [
            FORKS.Process(target=be_a_rank, args=(self._results, env, delay, options), daemon=True)
            for env, delay in zip(envs, delays, strict=True)
        ]
        for process in self.processes:
            process.start()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def ended(self, deadline_s: float = 40.0) -> list[Any]:
        """What each of them told, by rank."""
        deadline = time.monotonic() + deadline_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        self.kill()
        return sorted(found, key=lambda row: row[0])


@pytest.fixture(scope="module")
def agents_store() -> TCPStore:
    """A store that outlives the ranks, as an agent's does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(rank: int, world_size: int, port: int, **changes: Any) -> Environment:
    known = {
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "local_world_size": world_size,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "agent_holds_store": True,
    }
    return Environment(**{**known, **changes})


@pytest.mark.long
def test_restarts_on_one_store_after_kills_while_joining(agents_store: TCPStore) -> None:
    draw = random.Random(0)
    generations = set()
    for restart in range(NUM_RESTARTS):
        envs = [place(rank, 3 - restart % 2, agents_store.port) for rank in range(3 - restart % 2)]
        killed = Ranks(*envs, after_s=tuple(draw.uniform(0, 0.05) for _ in envs))
        time.sleep(draw.uniform(0, 0.15))
        killed.kill()
        ranks = Ranks(*envs, after_s=tuple(draw.uniform(0, 0.05) for _ in envs))
        rows = ranks.ended()
        pids = [process.pid for process in ranks.processes]
        assert [row[2:4] for row in rows] == [([*enumerate(pids)], float(len(envs)))] * len(envs), (restart, rows)
        assert len({row[1] for row in rows}) == 1
        generations.add(rows[0][1])
    assert len(generations) == NUM_RESTARTS


def exchange_keys(world: World) -> Any:
    """Each rank leaves a key for the next one; a second connection sees the same."""
    assert world.store is not None
    world.store.set(f"from-{world.rank}", str(os.getpid()))
    before = (world.rank - 1) % world.world_size
    seen = int(world.store.clone().get(f"from-{before}"))
    return seen == world.peers[before].pid, [peer.is_alive for peer in world.peers], world.warnings


def test_ranks_of_a_world_have_a_store_of_their_own_and_know_whose_clock_is_wrong(agents_store: TCPStore) -> None:
    envs = [place(rank, 3, agents_store.port) for rank in range(3)]
    rows = Ranks(*envs, look=exchange_keys, clock_of={2: 20.0}).ended()
    warning = f"the clock of {socket.gethostname()} is 20.0 s ahead of that of {socket.gethostname()}"
    assert [row[4] for row in rows] == [(True, [True] * 3, (warning,))] * 3


def test_a_rank_that_does_not_come_is_named_within_the_timeout(agents_store: TCPStore) -> None:
    rows = Ranks(*[place(rank, 4, agents_store.port) for rank in (0, 2)], timeout_s=1.0).ended()
    assert [row[:2] for row in rows] == [(0, "RunError"), (2, "RunError")]
    for row in rows:
        assert "ranks 1, 3 of 4 did not come in time" in row[2]
        assert "still prepares its data, give a longer --parallel.timeout-s" in row[2]
        assert f"rank 0 ({socket.gethostname()}, pid {rows[0][4]}), rank 2 (" in row[2]
        assert row[3] < 20.0
    assert rows[0][3] >= 1.0


def test_without_rank_0_or_a_store_the_message_says_so(agents_store: TCPStore) -> None:
    """What earlier starts left in the store is no rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = held.getsockname()[1]
    rows = Ranks(place(1, 2, agents_store.port), place(2, 3, nobody), timeout_s=1.0).ended()
    assert [row[1] for row in rows] == ["RunError"] * 2
    assert "rank 0 of 2 did not come in time" in rows[0][2]
    assert "still prepares its data, give a longer --parallel.timeout-s" in rows[0][2]
    assert f"found no store at 127.0.0.1:{nobody} (127.0.0.1) for 1 s: Connection refused" in rows[1][2]
    assert all(row[3] < 1.0 + 2 * rendezvous._LAST_WORD_S + 15 for row in rows)


def test_two_processes_of_one_rank_are_both_refused(agents_store: TCPStore) -> None:
    twice = [place(rank, 3, agents_store.port) for rank in (0, 1, 1)]
    rows = Ranks(*twice, after_s=(0, 0, 0.3)).ended()
    assert [row[:2] for row in rows] == [(0, "UserError"), (1, "UserError"), (1, "UserError")]
    for row in rows:
        assert "two processes have come as rank 1" in row[2]
        assert all(f"pid {rows[i][4]} on {socket.gethostname()}" in row[2] for i in (1, 2))
        assert row[3] < 15, "not the timeout's 20 s"


def stay(here: Semaphore, over: Event, world: World) -> None:
    here.release()
    over.wait(40)


def complete(*envs: Environment) -> tuple["Ranks", Event]:
    """Ranks that have met, and stay until the event is set."""
    here, over = FORKS.Semaphore(0), FORKS.Event()
    ranks = Ranks(*envs, look=partial(stay, here, over))
    for _ in envs:
        assert here.acquire(timeout=40)
    return ranks, over


def test_a_second_rank_that_comes_to_a_complete_world_is_refused_and_the_world_goes_on(agents_store: TCPStore) -> None:
    envs = [place(rank, 2, agents_store.port) for rank in (0, 1)]
    ranks, over = complete(*envs)
    for env in reversed(envs):
        refused = Ranks(env, settled_s=0.2, refuse_s=0.2).ended()
        assert refused[0][:2] == (env.rank, "UserError")
        assert f"two processes have come as rank {env.rank}" in refused[0][2]
        assert f"pid {ranks.processes[env.rank].pid} on" in refused[0][2]
    assert all(process.is_alive() for process in ranks.processes)
    over.set()
    assert [row[3] for row in ranks.ended()] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"world_size": 3}, r"rank 1 \(.*pid \d+\) was started with WORLD_SIZE 3, and rank 0 \(.*\) with 2"),
        ({"world_size": 3, "rank": 2, "local_rank": 2}, r"rank 2 \(.*pid \d+\) was started with WORLD_SIZE 3"),
        ({"job": "b"}, r"rank 1 \(.*pid \d+\) belongs to job 'b', and rank 0 \(.*\) to 'a'"),
    ],
    ids=["a larger world", "a rank too many", "another job"],
)
def test_ranks_that_were_told_different_things_are_refused(
    agents_store: TCPStore, others: dict[str, Any], says: str
) -> None:
    rows = Ranks(place(0, 2, agents_store.port, job="a"), replace(place(1, 2, agents_store.port), **others)).ended()
    assert [row[1] for row in rows] == ["UserError"] * 2
    assert all(re.search(says, row[2]) for row in rows), rows


def test_ranks_of_different_backends_are_refused_before_a_process_group_starts(agents_store: TCPStore) -> None:
    """C4: a host whose GPU is not visible took Gloo, the others NCCL, and after 300 s they "could not connect"."""
    rows = Ranks(*(place(rank, 2, agents_store.port) for rank in range(2)), backend_of={0: "nccl"}).ended()
    assert [row[1] for row in rows] == ["UserError"] * 2
    says = r"rank 1 \(.*\) computes on cpu and would communicate by gloo, and rank 0 \(.*\) on cpu by nccl: "
    assert all(re.search(says, row[2]) and row[3] < 10 for row in rows), rows


def test_containers_that_share_loopback_and_not_their_pids_may_meet_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of one pod do."""
    here = alike.this_rank(place(0, 2, 1), "lo", "gloo", "cpu")
    readlink = os.readlink
    monkeypatch.setattr(peer.os, "readlink", lambda path: "of another" if path.endswith("pid") else readlink(path))
    other = alike.this_rank(place(1, 2, 1), "lo", "gloo", "cpu")
    assert here.peer.boot_id != other.peer.boot_id
    assert alike.difference([here, other]) == ""


def test_two_ranks_on_one_gpu_are_refused() -> None:
    me, other, third = (
        on_gpu(alike.this_rank(place(rank, 3, 1), "lo", "nccl", "cpu"), gpu) for rank, gpu in enumerate("aba")
    )
    assert alike.difference([me, other]) == ""
    says = alike.difference([me, other, third])
    assert re.search(r"rank 0 \(.*\) and rank 2 \(.*\) would compute on the same GPU, a: show each task its own", says)
    assert "for a test, PACELINE_SHARE_GPU=1 on all ranks lets them share it" in says
    assert alike.difference([replace(hello, may_share_gpu=True) for hello in (me, other, third)]) == ""


def test_ranks_that_disagree_about_sharing_a_gpu_are_refused(agents_store: TCPStore) -> None:
    """Finds: two ranks of which one alone was told so share a GPU, or wait for each other in NCCL."""
    rows = Ranks(*(place(rank, 2, agents_store.port) for rank in range(2)), shares_gpu=[1]).ended()
    assert [row[1] for row in rows] == ["UserError"] * 2
    says = r"rank 1 \(.*\) has PACELINE_SHARE_GPU=1, and rank 0 \(.*\) has not: set it for all ranks"
    assert all(re.search(says, row[2]) and row[3] < 10 for row in rows), rows


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_that_all_were_told_to_share_one_gpu_form_a_world(agents_store: TCPStore, is_shared: bool) -> None:
    """Finds: they are refused all the same, or without the variable are not. A pretended GPU, and Gloo."""
    envs = [place(rank, 2, agents_store.port) for rank in range(2)]
    rows = Ranks(*envs, gpu="one", shares_gpu=[0, 1] if is_shared else []).ended()
    if is_shared:
        assert [row[3] for row in rows] == [2.0, 2.0], rows
    else:
        assert all("would compute on the same GPU, one: show each task" in row[2] for row in rows), rows


def test_ranks_of_different_versions_are_refused() -> None:
    """Finds: ranks whose libraries round differently, each of which makes updates of its own."""
    here = alike.this_rank(place(0, 2, 1), "lo", "gloo", "cpu")
    other = replace(alike.this_rank(place(1, 2, 1), "lo", "gloo", "cpu"), versions={**here.versions, "torch": "1.0"})
    assert alike.difference([here, replace(other, versions=here.versions)]) == ""
    says = alike.difference([here, other])
    assert re.search(r"rank 1 \(.*\) has torch 1\.0, and rank 0 \(.*\) torch \d.*Install the same version", says)


def test_what_another_program_left_in_the_store_is_refused(agents_store: TCPStore) -> None:
    """Not read as anything else than JSON, and never run."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("paceline/hello/1", pickle.dumps(print))
    rows = Ranks(place(0, 2, store.port)).ended()
    assert rows[0][1] == "UserError"
    assert "holds 'hello/1' of another program" in rows[0][2]


def listening(world: World) -> list[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return sorted({(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN})


def test_a_store_that_rank_0_holds_listens_on_one_address(agents_store: TCPStore) -> None:
    with socket.create_server(("127.0.0.2", 0)) as held:
        port = held.getsockname()[1]
    envs = [place(rank, 2, port, master_addr="127.0.0.2", agent_holds_store=False) for rank in (0, 1)]
    rows = Ranks(*envs, look=listening).ended()
    assert ("127.0.0.2", port) in rows[0][4]
    assert all(port != other for _, other in rows[1][4])
    assert {address for row in rows for address, _ in row[4]} <= {"127.0.0.1", "127.0.0.2"}
    assert rows[0][4]


def test_restarts_need_no_agent(agents_store: TCPStore) -> None:
    """Rank 0 holds the store: the same port again, at once, after a kill."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    envs = [place(rank, 2, port, agent_holds_store=False) for rank in (0, 1)]
    killed, _ = complete(*envs)
    killed.kill()
    assert [row[3] for row in Ranks(*envs).ended()] == [2.0, 2.0]


def test_a_rank_that_died_with_the_store_of_the_open_group_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a traceback of torch's in the other ranks, where rank 0 died between init_process_group and join."""
    monkeypatch.setattr(process_group, "_num_joined", 0)
    held = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    store = TCPStore("127.0.0.1", held[0].port, is_master=False, wait_for_workers=False)

    def die() -> None:
        while not held[0].check(["paceline/1/peer/1"]):
            time.sleep(0.01)
        held.clear()

    dies = threading.Thread(target=die)
    dies.start()
    with pytest.raises(PeerLost, match=r"rank 1 lost the other ranks during paceline.join: "):
        process_group.join_open_group(store, 1, 2, 60.0)
    dies.join()


def test_ranks_that_do_not_join_an_open_group_in_time_are_named() -> None:
    """Mutation: the ranks that came are named as missing."""
    with pytest.raises(RunError, match="rank 0, 2 of 3 did not come to paceline"):
        process_group.join_open_group(HashStore(), 1, 3, 0.1)
