"""The law at several hosts: network namespaces joined by a cable, each with its own name, interface and disk."""

import contextlib
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from namespaces import Host
from program import COLD, TINY, TORCHRUN, Ended, Program, losses, rows, run, steps

pytestmark = pytest.mark.lab

TOLERANCE = 1e-4
FLAGS = (*TINY, "--train.steps", "10", "--train.device-batch-size", "3", "--train.eval-sequences", "8")
PORT = 29400  # in namespaces of our own every port is free
TIMEOUT_S = 5.0
ALL_REDUCES = Path(__file__).parent.parent / "world" / "all_reduces.py"


def run_on(
    hosts: list[Host], folders: list[Path], rendezvous: dict[str, tuple[str, ...]], *flags: str, num_ranks: int = 1
) -> list[Ended]:
    """Starts torchrun on each host, the second one first, and returns how each ended. num_ranks: per host."""
    torchrun = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(num_ranks))
    with contextlib.ExitStack() as stack:
        programs = {}
        for host, folder in reversed(list(zip(hosts, folders, strict=True))):
            paceline = ("-m", "paceline", "train", *FLAGS, "--parallel.interface", host.interface, "--out", str(folder))
            command = (*torchrun, *rendezvous[host.name], *paceline, *flags)
            programs[host.name] = stack.enter_context(Program(command=command, host=host))
        return [programs[host.name].wait() for host in hosts]


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "strategy"), [pytest.param("c10d", "ddp", marks=pytest.mark.nightly), ("static", "zero")]
)
def test_two_hosts_give_the_curve_of_one_process(runs, two_hosts, tmp_path: Path, way: str, strategy: str) -> None:
    """And, of one way, two ranks a host, that send over the link what one does."""
    first = two_hosts[0]
    if way == "c10d":
        at = ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{first.address}:{PORT}")
        rendezvous = {host.name: at for host in two_hosts}
    else:
        at = ("--master-addr", first.address, "--master-port", str(PORT))
        rendezvous = {host.name: ("--node-rank", str(rank), *at) for rank, host in enumerate(two_hosts)}
    folders = [tmp_path / host.name / "run" for host in two_hosts]  # a disk of its own each
    before = [host.received_bytes() for host in two_hosts]
    # zero: the second host does not see the run folder, and sends the state that it alone has to the first.
    flags = ("--parallel.strategy", strategy)
    for ended in run_on(two_hosts, folders, rendezvous, *flags):
        ended.require(0)
    received = [host.received_bytes() - earlier for host, earlier in zip(two_hosts, before, strict=True)]
    written = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    assert len(written) == 1, "rank 0 writes the records, on its host"
    assert max(abs(a - b) for a, b in zip(losses(written[0]), losses(runs.get(1, *FLAGS)), strict=True)) <= TOLERANCE
    # Both ranks took part, each on its host, and the gradients went through the cable.
    assert {row["world_size"] for row in steps(written[0])} == {2}
    assert all(min(row["rank_compute_ms"]) > 0 for row in steps(written[0]))
    logs = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("rank-*.log"))
    assert sorted(Path(log).name for log in logs) == ["rank-00000.log", "rank-00001.log"]
    assert len({Path(log).parts[0] for log in logs}) == 2
    gradients_bytes = sum(row["comm_bytes"] for row in steps(written[0]))
    assert min(received) > 0.9 * gradients_bytes
    events = [row["event"] for row in rows(written[0] / "events.jsonl") if "straggler" not in row["event"]]
    assert events == ["start", "checkpoint", "end"]
    stopped = written[0].with_name("stopped")
    shutil.copytree(written[0], stopped)
    # What was saved is whole, in another world.
    run("resume", str(stopped), "--train.steps", "11", "--parallel.interface=").require(0)
    assert len(losses(stopped)) == 11

    if way == "c10d":
        return
    of_two = [tmp_path / f"{host.name}-2" / "run" for host in two_hosts]
    before = [host.received_bytes() for host in two_hosts]
    ends = run_on(two_hosts, of_two, rendezvous, *flags, num_ranks=2)
    for ended in ends:
        ended.require(0)
    assert f"a step from each host with {strategy}, wire exact" in ends[0].out + ends[1].out
    assert [host.received_bytes() - earlier for host, earlier in zip(two_hosts, before, strict=True)] == pytest.approx(
        received, rel=0.05
    )
    (folder,) = [folder for folder in of_two if (folder / "metrics.jsonl").exists()]
    assert max(abs(a - b) for a, b in zip(losses(folder), losses(written[0]), strict=True)) <= TOLERANCE


@pytest.mark.long
def test_an_interface_that_one_host_lacks_is_refused_by_that_host(two_hosts, tmp_path: Path) -> None:
    """Each host names its own; here the second is given the first's."""
    first, second = two_hosts
    wrong = Host(second.name, first.interface, second.address)
    at = ("--master-addr", first.address, "--master-port", str(PORT))
    rendezvous = {host.name: ("--node-rank", str(rank), *at) for rank, host in enumerate(two_hosts)}
    folders = [tmp_path / "a", tmp_path / "b"]
    torchrun = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1")
    flags = ("-m", "paceline", "train", *TINY, "--parallel.interface", wrong.interface, "--out", str(folders[1]))
    waiting = ("-m", "paceline", "train", *TINY, "--parallel.interface", first.interface, "--out", str(folders[0]))
    with (
        Program(command=(*torchrun, *rendezvous[first.name], *waiting), host=first),
        Program(command=(*torchrun, *rendezvous[second.name], *flags), host=second) as refused,
    ):
        ended = refused.wait()
    assert ended.status != 0
    message = f"parallel.interface is '{first.interface}', and this machine ({second.name}) has no such interface"
    assert message in ended.err
    assert not any(folder.exists() for folder in folders)


# ---- joining again ----


class Node:
    """torchrun on one of two hosts, with one rank that does all-reduces until a file `stop` appears."""

    def __init__(self, hosts: list[Host], number: int, folder: Path, *flags: str, env: dict[str, str] | None = None):
        self.host, self._folder = hosts[number], folder
        at = ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}")
        torchrun = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *at, *flags)
        program = (str(ALL_REDUCES), str(folder), self.host.interface, str(TIMEOUT_S))
        self.program = Program(command=(*torchrun, *program), env=env, host=self.host)

    def ranks(self) -> dict[int, int]:
        """Rank -> pid on this host."""
        return self.program.ranks()


def told(folder: Path, key: str, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank has told of one kind, in all its lives."""
    return [row for row in rows(folder / f"rank-{rank}.jsonl") if key in row]


def wait_for_lives(node: Node, folder: Path, number: int) -> dict[str, Any]:
    """Returns the first all-reduce of that life of rank 0."""
    node.program.wait_for(lambda: len(told(folder, "opened")) >= number)
    mine = told(folder, "opened")[number - 1]["opened"]
    node.program.wait_for(lambda: any(row["generation"] == mine for row in told(folder, "generation")))
    return next(row for row in told(folder, "generation") if row["generation"] == mine)


@pytest.mark.long
def test_a_host_comes_back_and_a_cable_breaks(two_hosts, tmp_path: Path) -> None:
    """One start sees it all: a host is lost and comes back, the cable is out for 2 s, and for good."""
    patience = ("--max-restarts", "5", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3")
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with contextlib.ExitStack() as stack:

        def start(number: int) -> Node:
            node = Node(two_hosts, number, tmp_path, *patience, env=apart)
            stack.enter_context(node.program)
            return node

        first, second = start(0), start(1)
        wait_for_lives(first, tmp_path, 1)

        second.program.kill_all()
        killed_s = time.monotonic()
        second = start(1)
        again = wait_for_lives(first, tmp_path, 2)
        assert again["world_size"] == 2
        assert again["at_s"] - killed_s < 60  # 6.8 s on an idle machine: 3 to be missed, 2 to import torch

        two_hosts[1].cable("down")
        time.sleep(2)
        two_hosts[1].cable("up")
        back_s = time.monotonic()
        first.program.wait_for(lambda: told(tmp_path, "generation")[-1]["at_s"] > back_s)
        assert told(tmp_path, "generation")[-1]["generation"] == again["generation"]  # survived: the same life

        two_hosts[1].cable("down")
        down_s = time.monotonic()
        pids = {0: first.ranks()[0], 1: second.ranks()[1]}
        for rank, node in enumerate((first, second)):
            node.program.wait_for(lambda node=node, rank=rank: node.ranks().get(rank) != pids[rank], TIMEOUT_S + 20)
            last = told(tmp_path, "error", rank)[-1]
            assert last["at_s"] - down_s < TIMEOUT_S + 15  # 2 on an idle machine
            assert "lost the other ranks" in last["error"]
    lives = [row["opened"] for row in told(tmp_path, "opened")]
    assert len(set(lives)) == len(lives) == 2
    assert lives == [row["opened"] for row in told(tmp_path, "opened", 1)]


# For Python to run at its start, as sitecustomize.py. The agents send each other datetimes, by the name of their class.
CLOCK_BEHIND = """
import datetime, time

real_time = time.time
time.time = lambda: real_time() - SECONDS


class Late(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) - datetime.timedelta(seconds=SECONDS)

    @classmethod
    def utcnow(cls):
        return super().utcnow() - datetime.timedelta(seconds=SECONDS)


Late.__module__, Late.__name__, Late.__qualname__ = "datetime", "datetime", "datetime"
datetime.datetime = Late
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (20, "asked for 2 nodes (--nnodes), and this world has 1"),
        pytest.param(8, "torchrun's rendezvous compares them", marks=pytest.mark.nightly),
    ],
)
def test_clocks_apart_are_refused_instead_of_training_alone(two_hosts, tmp_path: Path, seconds: int, says: str) -> None:
    """20 s behind, each agent takes the other for dead and would go on in a world of one; 8 s, it would soon."""
    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(CLOCK_BEHIND.replace("SECONDS", str(seconds)))
    with contextlib.ExitStack() as stack:
        nodes = []
        for number, env in enumerate((COLD, {"PYTHONPATH": str(late)})):
            folder = tmp_path / str(number)
            folder.mkdir()
            nodes.append(Node(two_hosts, number, folder, env=env))
            stack.enter_context(nodes[-1].program)
        deadline = time.monotonic() + 30
        while not (
            refusals := [row for i in "01" for row in told(tmp_path / i, "error") + told(tmp_path / i, "error", 1)]
        ):
            assert time.monotonic() < deadline, [node.program._said() for node in nodes]
            time.sleep(0.05)
        nodes[0].program.kill_all()  # an agent that believes the other one dead may wait for it all the same
    assert all(row["status"] == 2 for row in refusals)
    assert all(says in row["error"] for row in refusals), refusals
    assert not [row for i in "01" for rank in (0, 1) for row in told(tmp_path / i, "generation", rank)]


def test_a_host_whose_name_is_loopback_is_told_to_name_its_interface(two_hosts, tmp_path: Path) -> None:
    """Debian's 127.0.1.1: Gloo would listen there, and the other host would try for minutes to reach it."""
    first, second = two_hosts
    (Path("/etc/netns") / second.name / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {second.name}\n")
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    world |= {"MASTER_ADDR": first.address, "MASTER_PORT": str(PORT)}
    with contextlib.ExitStack() as stack:
        for rank, host in enumerate(two_hosts):
            command = (sys.executable, str(ALL_REDUCES), str(tmp_path), "", "20")
            program = stack.enter_context(Program(command=command, env={**world, "RANK": str(rank)}, host=host))
        program.wait().require(2)
    said = [told(tmp_path, "error", rank)[0]["error"] for rank in (0, 1)]
    assert said[0] == said[1]
    assert re.match(rf"rank 1 \({second.name}, pid \d+\) would listen on 127\.0\.1\.1", said[0])
    assert f"--parallel.interface: {second.name} has {second.interface} {second.address}" in said[0]
