"""The watchdog among real ranks that wait for each other in Gloo: who is to blame, and when all are gone.

Ranks are forked from a process that has torch imported: 10 ms each instead of two seconds. They spend their time
waiting, so the worlds that are to end by their timeout all stand still at the same time.
"""

import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import FORKS
from torch.distributed import HashStore, TCPStore

from paceline.base.errors import PacelineError, RunError
from paceline.base.process import start_ticks
from paceline.world.calls import Calls
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.group import LocalGroup
from paceline.world.peer import Peer, this_process
from paceline.world.runtime import World, open_world
from paceline.world.watchdog import Verdict, Watchdog

TIMEOUT_S = 2.0
LATEST_S = 50.0  # from the timeout to the end of all ranks: 2 on a quiet machine
PATIENCE_S = 60.0  # the group's own timeout, which never comes first here
PEER_LOST, OTHER_ERROR = 3, 4  # exit statuses


@dataclass
class Rank:
    """What a task is given."""

    world: World
    watchdog: Watchdog
    leave: Callable[[str, str], None]

    def send_beat(self) -> None:
        """Returns when a beat that began after this call is in the store."""
        for _ in range(2):  # the first round may have begun before
            before = self.watchdog._beats._answered_s
            while self.watchdog._beats._answered_s == before:
                time.sleep(0.005)

    def leave_here(self) -> None:
        """Leaves "here" when a beat has told what the task does next."""

        def leave() -> None:
            self.send_beat()
            self.leave("here", "")

        threading.Thread(target=leave, daemon=True).start()

    def reduce(self, step: int) -> None:
        self.watchdog.enter("reduce", step)
        self.world.group.all_reduce(torch.ones(1))


Task = Callable[[Rank], None]


def be_a_rank(folder: Path, env: Environment, task: Task, timeout_s: float) -> None:
    """Does a task under a watchdog; what is said, by whom ever, is left as files."""
    gc.freeze()  # what the server imported (see ranks.py)

    def leave(name: str, text: str) -> None:
        aside = folder / f".{name}-{env.rank}"
        aside.write_text(text)
        aside.rename(folder / f"{name}-{env.rank}")

    def on_verdict(verdict: Verdict) -> None:
        leave("verdict", json.dumps([verdict.message, verdict.culprits]))

    config = ParallelConfig(device="cpu", threads=1, interface="lo", timeout_s=PATIENCE_S)
    with open_world(config, env) as world, (folder / f"stacks-{env.rank}").open("w") as log:
        watchdog = Watchdog(
            world,
            timeout_s=timeout_s,
            on_verdict=on_verdict,
            log=log,
        )
        try:
            with watchdog:
                task(Rank(world, watchdog, leave))
        except PacelineError as error:
            os._exit(PEER_LOST if error.is_consequence else OTHER_ERROR)
    os._exit(0)


class Ranks:
    """The ranks of a world, all at the same task. `port` is that of their store; None: one that is held here, as
    torchrun's agent does."""

    def __init__(self, folder: Path, num_ranks: int, task: Task, port: int | None = None, timeout_s: float = TIMEOUT_S):
        self.folder = folder
        folder.mkdir()
        if port is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        env = Environment(
            rank=0,
            local_rank=0,
            world_size=num_ranks,
            local_world_size=num_ranks,
            master_addr="127.0.0.1" if num_ranks > 1 else "",
            master_port=port,
            agent_holds_store=True,
        )
        self.processes = [
            FORKS.Process(
                target=be_a_rank, args=(folder, replace(env, rank=rank, local_rank=rank), task, timeout_s), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()
        self.pids = [process.pid for process in self.processes]

    def wait_for(self, name: str) -> None:
        """Returns when every rank has left something of that name."""
        deadline = time.monotonic() + 60
        while any(not (self.folder / f"{name}-{rank}").exists() for rank in range(len(self.processes))):
            assert time.monotonic() < deadline, self.statuses()
            time.sleep(0.005)

    def said(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}-{rank}").read_text()

    def verdict(self, rank: int) -> tuple[str, list[int]]:
        message, culprits = json.loads(self.said("verdict", rank))
        return message, culprits

    def statuses(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def end(self, deadline: float) -> float:
        """Waits until all are gone; past the deadline (monotonic), kills and fails. Returns when the last one went."""
        while None in self.statuses() and time.monotonic() < deadline:
            time.sleep(0.005)
        now, statuses = time.monotonic(), self.statuses()
        for process in self.processes:
            process.kill()
            process.join()
        assert None not in statuses, f"still there: {statuses}"
        return now


# ---- worlds that stand still ----


def compute(seconds: float) -> None:
    time.sleep(seconds)


def rank_1_computes(rank: Rank) -> None:
    rank.reduce(1)
    rank.watchdog.enter("backward", 2)
    rank.leave_here()
    while rank.world.rank == 1:
        rank.watchdog.enter("backward", 2)
        compute(0.01)
    rank.reduce(2)


def rank_0_computes(rank: Rank) -> None:
    rank.reduce(1)
    rank.watchdog.enter("backward", 2)
    rank.leave_here()
    while rank.world.rank == 0:
        rank.watchdog.enter("backward", 2)
        compute(0.01)
    rank.reduce(2)


def rank_2_sleeps_in_its_data(rank: Rank) -> None:
    rank.reduce(1)
    rank.watchdog.enter("data", 2)
    rank.leave_here()
    if rank.world.rank == 2:
        compute(60)
    rank.reduce(2)


def rank_2_evaluates_and_the_others_check(rank: Rank) -> None:
    rank.watchdog.enter("evaluate" if rank.world.rank == 2 else "check", 2)
    rank.leave("here", "")
    if rank.world.rank == 2:
        rank.world.group.broadcast(torch.ones(1), source=0)
    else:
        rank.world.group.broadcast(torch.ones(1), source=2)


def rank_1_dies_and_its_worker_lives(rank: Rank) -> None:
    """The worker holds the connections of its parent, as one of a DataLoader does: no collective fails."""
    rank.reduce(1)
    rank.send_beat()
    rank.leave("here", "")
    if rank.world.rank == 1:
        worker = os.fork()
        if not worker:
            compute(120)
            os._exit(0)
        rank.leave("worker", str(worker))
        os.kill(os.getpid(), signal.SIGKILL)
    rank.reduce(2)


def sleep_alone(rank: Rank) -> None:
    rank.watchdog.enter("data", 7)
    rank.leave("here", "")
    compute(60)


def rank_1_is_slow(rank: Rank) -> None:
    rank.leave("here", "")
    for _ in range(35 if rank.world.rank == 1 else 0):
        rank.watchdog.enter("backward", 1)
        time.sleep(0.1)
    rank.reduce(1)


def hold_a_store(port: "multiprocessing.SimpleQueue[int]") -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    time.sleep(60)


STANDING: dict[str, tuple[Task, int]] = {
    "stopped": (rank_1_computes, 3),
    "judge": (rank_0_computes, 3),
    "asleep": (rank_2_sleeps_in_its_data, 3),
    "elsewhere": (rank_2_evaluates_and_the_others_check, 3),
    "storeless": (rank_2_sleeps_in_its_data, 3),
    "alone": (sleep_alone, 1),
    "slow": (rank_1_is_slow, 2),
}


STOPPED = {"stopped": 1, "judge": 0}  # the rank that a signal stops


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    """A world for each way to stand still, and a slow one, all gone in time."""
    folder = tmp_path_factory.mktemp("standing")
    port = FORKS.SimpleQueue()
    holder = FORKS.Process(target=hold_a_store, args=(port,), daemon=True)
    holder.start()
    frail = port.get()
    worlds, deadlines = {}, {}
    for name, (task, num_ranks) in STANDING.items():
        worlds[name] = Ranks(folder / name, num_ranks, task, frail if name == "storeless" else None)
        worlds[name].wait_for("here")
        if name in STOPPED or name == "storeless":
            os.kill(worlds[name].pids[STOPPED[name]] if name in STOPPED else holder.pid, signal.SIGSTOP)
        deadlines[name] = time.monotonic() + TIMEOUT_S + LATEST_S
    for name, deadline in deadlines.items():
        worlds[name].end(deadline)
    holder.kill()
    holder.join()
    return worlds


def test_a_stopped_rank_is_named_and_killed(standing: dict[str, Ranks]) -> None:
    ranks = standing["stopped"]
    assert ranks.statuses() == [1, -signal.SIGKILL, 1]
    message, culprits = ranks.verdict(0)
    assert ranks.verdict(2) == (message, culprits)
    assert culprits == [1]
    assert re.match(rf"rank 1 \(.*, pid {ranks.pids[1]}\) is stopped by a signal, and has not answered for", message)
    assert re.search(r"for at least \d+ s; last heard of up to 0\.2 s before that, in backward of step 2\n", message)
    assert re.search(r"\n    tests/world/test_watchdog\.py:\d+ compute\n", message)
    assert re.search(r"\nnoticed by rank [02] \(.*\), in reduce of step 2, waiting in an all-reduce$", message)


def test_a_dead_rank_whose_worker_holds_its_connections_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    """Mutation: only ranks under NCCL look for the dead; the others wait until the worker ends, or for the timeout."""
    ranks = Ranks(tmp_path / "ranks", 3, rank_1_dies_and_its_worker_lives, timeout_s=10 * LATEST_S)
    ranks.wait_for("here")
    try:
        ranks.end(time.monotonic() + LATEST_S)
        worker = int(ranks.said("worker", 1))
        assert start_ticks(worker), "it ended, and its connections with it"
    finally:
        with contextlib.suppress(ValueError, OSError):
            os.kill(int(ranks.said("worker", 1)), signal.SIGKILL)
    assert ranks.statuses() == [1, -signal.SIGKILL, 1]
    message, culprits = ranks.verdict(0)
    assert culprits == [1]
    assert re.match(rf"rank 1 \(.*, pid {ranks.pids[1]}\) is gone", message)


def test_rank_0_which_judges_is_named_by_the_others_when_it_is_stopped(standing: dict[str, Ranks]) -> None:
    """They agree, though each judges alone. Mutation: they wait for rank 0 to judge."""
    ranks = standing["judge"]
    assert ranks.statuses() == [-signal.SIGKILL, 1, 1]
    message, culprits = ranks.verdict(1)
    assert ranks.verdict(2) == (message, culprits)
    assert culprits == [0]
    assert re.match(rf"rank 0 \(.*, pid {ranks.pids[0]}\) is stopped by a signal, and has not answered for", message)


def test_a_rank_that_sleeps_in_its_data_is_named_and_all_write_their_stacks(standing: dict[str, Ranks]) -> None:
    ranks = standing["asleep"]
    assert ranks.statuses() == [1, 1, 1]
    message, culprits = ranks.verdict(0)
    assert [ranks.verdict(rank) for rank in (1, 2)] == [(message, culprits)] * 2
    assert culprits == [2]
    assert re.match(rf"rank 2 \(.*, pid {ranks.pids[2]}\) has made no progress for \d+ s", message)
    assert re.search(r"s; it is in data of step 2\n    tests/world/test_watchdog.py:\d+ compute\n", message)
    assert re.search(r'test_watchdog.py", line \d+ in compute\n', ranks.said("stacks", 2))
    assert "in all_reduce\n" in ranks.said("stacks", 0)


def test_a_rank_in_another_collective_is_named(standing: dict[str, Ranks]) -> None:
    message, culprits = standing["elsewhere"].verdict(0)
    assert culprits == [2]
    assert re.match(r"rank 2 \(.*\) is in evaluate of step 2, waiting in a broadcast, and most ranks in check", message)


def test_a_store_that_does_not_answer_is_named(standing: dict[str, Ranks]) -> None:
    """By each rank alone: there is nothing over which they could agree. Who is not the first may lose that one."""
    ranks = standing["storeless"]
    assert {1} <= set(ranks.statuses()) <= {1, PEER_LOST}
    for rank, status in enumerate(ranks.statuses()):
        if status == 1:
            message, culprits = ranks.verdict(rank)
            assert re.match(r"the store at 127\.0\.0\.1:\d+ does not answer", message)
            assert culprits == []


def test_a_world_of_one_stands_still_as_well(standing: dict[str, Ranks]) -> None:
    ranks = standing["alone"]
    assert ranks.statuses() == [1]
    message, culprits = ranks.verdict(0)
    assert culprits == [0]
    assert re.match(r"rank 0 \(.*\) has made no progress for \d+ s; it is in data of step 7\n.* compute\n", message)


def test_the_first_rank_that_is_not_to_blame_speaks_for_all() -> None:
    spoken = [Verdict(message="", culprits=culprits).speaker(3) for culprits in [(), (0,), (0, 1), (1,), (0, 1, 2)]]
    assert spoken == [0, 1, 2, 0, 0]


# ---- worlds that come on ----


def rank_1_takes_a_second(rank: Rank) -> None:
    rank.watchdog.enter("backward", 1)
    rank.leave("here", "")
    if rank.world.rank == 1:
        time.sleep(1)
    rank.reduce(1)


def test_a_slow_rank_is_left_alone(standing: dict[str, Ranks]) -> None:
    """It makes the other one wait for longer than the timeout."""
    assert standing["slow"].statuses() == [0, 0]


@pytest.mark.long
def test_who_sleeps_for_a_while_is_left_alone(tmp_path: Path) -> None:
    """The stopped rank is away for three quarters of the timeout. The world that sleeps, as on a laptop that is closed,
    does so for longer than the timeout, and its ranks are not awake again at the same moment."""
    sleeping = Ranks(tmp_path / "sleeping", 2, rank_1_is_slow)
    sleeping.wait_for("here")
    for pid in sleeping.pids:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
    worlds = [sleeping]
    for number in range(10):
        worlds.append(Ranks(tmp_path / f"stopped-{number}", 2, rank_1_takes_a_second))
        worlds[-1].wait_for("here")
        stopped_s = time.monotonic()
        os.kill(worlds[-1].pids[1], signal.SIGSTOP)
        time.sleep(0.75 * TIMEOUT_S)
        os.kill(worlds[-1].pids[1], signal.SIGCONT)
        if time.monotonic() - stopped_s < 0.8 * TIMEOUT_S:
            break
        worlds.pop().end(time.monotonic() + 60)  # this process was late: that one may have been away for too long
    time.sleep(0.5 * TIMEOUT_S)
    for pid in sleeping.pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    for ranks in worlds:
        ranks.end(time.monotonic() + 60)
        assert ranks.statuses() == [0, 0]


@pytest.mark.parametrize("makes_calls", [True, False])
def test_a_script_makes_progress_by_its_calls_though_each_look_finds_the_same_wait(
    makes_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without a micro-batch waits in one all-reduce after another, and computes for a millisecond between."""
    group = SimpleNamespace(waiting_for="an all-reduce")
    world: Any = SimpleNamespace(peers=[this_process(Environment())], rank=0, store=None, group=group, backend="gloo")
    calls, seconds, ended = Calls(), itertools.count(), list[Any]()
    watchdog = Watchdog(world, timeout_s=2.0, on_verdict=lambda _: None, calls=calls)

    def looks_eight_times(_: float) -> bool:
        if makes_calls:
            calls.record("World.sum")
        return next(seconds) > 8

    monkeypatch.setattr(watchdog._closed, "wait", looks_eight_times)
    monkeypatch.setattr(watchdog._clock, "now", lambda: float(next(seconds)))
    monkeypatch.setattr(watchdog, "_end_if", ended.extend)
    watchdog._watch()
    assert bool(ended) != makes_calls


# ---- what it costs ----


class CountingStore(HashStore):
    """Counts the bytes that are written and read, but for those of names."""

    num_bytes = 0

    def set(self, key: str, value: str) -> None:
        self.num_bytes += len(value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        value = super().get(key)
        self.num_bytes += len(value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


@pytest.mark.parametrize("num_ranks", [64, 1024])
def test_ranks_that_all_wait_send_less_than_a_megabyte_a_second(num_ranks: int) -> None:
    """Rank 0 alone reads all beats. Mutation: each rank reads them, ranks² x 1.5 kB, 1.5 GB/s at 1,024."""
    store, me = CountingStore(), this_process(Environment())
    peers = [replace(me, rank=rank, boot_id=str(rank)) for rank in range(num_ranks)]
    threads, beats_s = [], []
    for rank in range(num_ranks):
        group = SimpleNamespace(waiting_for="an all-reduce")
        world: Any = SimpleNamespace(peers=peers, rank=rank, store=store, group=group)
        watchdog = Watchdog(world, timeout_s=300.0, on_verdict=lambda _: None)
        watchdog._thread = threading.get_ident()
        watchdog._beats.listens = True
        threads.append(watchdog._beats)
        beats_s.append(watchdog._beat_s())
    for number in range(2):
        store.num_bytes = 0
        for thread in threads:
            thread._round(store, number)
    assert len(threads[0].beats) == num_ranks - 1
    assert 1_000 < store.num_bytes / num_ranks / 2 < 2_500, "a beat is written once and read once"
    assert store.num_bytes / beats_s[0] < 1.05e6


# ---- a collective that has failed ----


def explain(rank: Rank, who: int = 1, fails: bool = False) -> None:
    """Reduces until that fails, then asks who is missing."""
    rank.watchdog.enter("backward", 3)
    rank.leave_here()
    if rank.world.rank == who:
        compute(0.5 if fails else 60)
        raise RunError("its disk is full")
    try:
        rank.reduce(3)
    except PacelineError:
        rank.leave("explained", found.message if (found := rank.watchdog.find_missing()) else "")
        raise


def explain_from_afar(rank: Rank, who: int = 1, fails: bool = False) -> None:
    """As if each rank had a host of its own, which the kernel knows nothing of."""
    for peer in rank.world.peers:
        object.__setattr__(peer, "boot_id", str(peer.rank))
    explain(rank, who, fails)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("task", "signals", "says"),
    [
        (
            explain,
            [signal.SIGKILL],
            r"rank {who} \(.*\) is gone; last heard of up to 0\.4 s before that, in backward of step 3\n.* compute\n",
        ),
        (
            explain_from_afar,
            [signal.SIGKILL],
            r"rank {who} \(.*\) has not answered for at least \d+ s; last heard of up to 0\.4 s before that, in",
        ),
        (
            partial(explain_from_afar, fails=True),
            [],
            r"rank {who} \(.*\) ended with an error in backward of step 3: its disk is full\n",
        ),
    ],
    ids=["dead here", "dead elsewhere", "ended with an error"],
)
def test_who_is_missing_is_named(tmp_path: Path, task: Task, signals: list[int], says: str, who: int) -> None:
    """Only he: who leaves because of him is not missing. Rank 0 finds him for all, or is he himself."""
    ranks = Ranks(tmp_path / "lost", 3, partial(task, who=who), timeout_s=4.0)
    if signals:
        ranks.wait_for("here")
    for number in signals:
        os.kill(ranks.pids[who], number)
    ranks.end(time.monotonic() + 60)
    others = [rank for rank in range(3) if rank != who]
    assert ranks.statuses()[who] == (-signal.SIGKILL if signals else OTHER_ERROR)
    assert [ranks.statuses()[rank] for rank in others] == [PEER_LOST] * 2
    for rank, other in (others, reversed(others)):
        said = ranks.said("explained", rank)
        assert re.match(says.replace("{who}", str(who)), said), said
        assert not re.search(rf"^rank {other} ", said, re.MULTILINE)


def test_a_large_world_looks_at_its_clock_as_often() -> None:
    """Finds: above 1,024 ranks a clock that counts one second of each two, and timeouts that take as much longer."""
    looks: list[float] = []
    for num_ranks in (8, 8192):
        world: Any = SimpleNamespace(rank=1, peers=[None] * num_ranks, group=None, store=None)
        watchdog = Watchdog(world, timeout_s=120.0, on_verdict=lambda _: None)
        closed: Any = SimpleNamespace(wait=lambda seconds: looks.append(seconds) or True)
        watchdog._closed = closed
        watchdog._watch()
    assert looks == [0.25, 0.25]


# ---- who is killed ----


def obey(port: int, peers: list[Peer]) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    alone = LocalGroup(torch.device("cpu"))
    world: Any = SimpleNamespace(peers=peers, rank=0, store=store, group=alone, backend="gloo")
    with Watchdog(world, timeout_s=2, on_verdict=lambda _: time.sleep(60)):
        time.sleep(60)


def test_only_a_rank_of_this_world_on_this_host_is_killed_and_telling_may_hang() -> None:
    """A verdict names five: this process, a rank that is stopped, a number that another process has got, a number on
    another host, and a rank that has failed and runs its exit handlers. The last three processes live on."""
    me = this_process(Environment())
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(4)]
    ranks = [
        replace(me, rank=i + 1, pid=process.pid, born_ticks=start_ticks(process.pid))
        for i, process in enumerate(processes)
    ]
    ranks[1] = replace(ranks[1], born_ticks=ranks[1].born_ticks - 1)
    ranks[2] = replace(ranks[2], boot_id="another")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watching = FORKS.Process(target=obey, args=(store.port, [me, *ranks]), daemon=True)
    watching.start()
    store.wait(["beat/0"])
    os.kill(processes[0].pid, signal.SIGSTOP)
    store.set("verdict", json.dumps({"message": "enough", "culprits": [0, 1, 2, 3, 4], "leaving": [4]}))
    watching.join(60)
    try:
        assert watching.exitcode == 1
        assert processes[0].wait(30) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None, None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
