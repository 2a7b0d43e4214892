"""Launchers of several hosts agree on who trains, without their ranks: real connections, on loopback."""

import dataclasses
import http.client
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.base.errors import RunError, UserError
from paceline.base.status import Status
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.copies import take
from paceline.checkpoint.manifest import Damaged, read
from paceline.checkpoint.writers import save_complete
from paceline.launch.hosts import Hosts
from paceline.launch.options import HostsOptions, read_hosts, read_names
from paceline.launch.place import Place, Verdict
from paceline.launch.restarts import Failure, Records
from paceline.launch.signals import StopSignals

GOOD = Status(0)


class Lab:
    """Hosts that have not started."""

    def __init__(self, base: Path, num_hosts: int = 2):
        with ExitStack() as stack:
            free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num_hosts)]
            self.ports = [server.getsockname()[1] for server in free]
        self.runs = [base / name for name in "abc"[:num_hosts]]
        self.open: dict[int, Hosts] = {}

    def start(self, node: int, *, job: str = "job", least: int = 1, timeout_s: float = 30.0, port: int = 0) -> Hosts:
        options = HostsOptions(tuple(("127.0.0.1", port) for port in self.ports), node, least, timeout_s, port)
        copy = partial(take, self.runs[node] / "checkpoints", config=CheckpointConfig())
        self.open[node] = Hosts(options, job, 1, self.runs[node], StopSignals(), copy)
        return self.open[node]

    def kill(self, node: int) -> None:
        self.open.pop(node).close()

    def save(self, node: int, step: int) -> Path:
        tensors = {"w": torch.arange(10.0)}
        (self.runs[node] / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self.runs[node] / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')
        return save_complete(self.runs[node] / "checkpoints", step, tensors, {}, {})

    def meet(self, *nodes: int) -> list[Place | Verdict]:
        """All these hosts wait for their next place at the same time."""
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(self.open[node].meet, []) for node in nodes]
            return [future.result(20) for future in waiting]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    for hosts in lab.open.values():
        hosts.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks(found: list[Place | Verdict]) -> list[tuple[int, int, int]]:
    assert all(isinstance(place, Place) for place in found), found
    return [(place.first_rank, place.world_size, place.attempt) for place in found if isinstance(place, Place)]


def test_one_is_lost_the_other_goes_on_and_takes_it_in_again(lab: Lab) -> None:
    first, second = lab.start(0), lab.start(1)
    assert ranks(lab.meet(0, 1)) == [(0, 2, 0), (1, 2, 0)]
    assert (first.order(), second.order()) == ("", "")

    lab.kill(0)  # the leader
    until(lambda: second.order() == "end")
    assert second.collect({}, {}) is None
    assert ranks(lab.meet(1)) == [(0, 1, 1)]

    lab.start(0)
    lab.save(1, 7)  # it trains again
    until(lambda: second.order() == "save")
    collected = second.collect({0: GOOD}, {0: 0})
    assert collected is not None
    assert collected.takes_in
    assert ranks(lab.meet(0, 1)) == [(1, 2, 2), (0, 2, 2)], "the host with the newest checkpoint leads"


def test_three_hosts_without_one(tmp_path: Path) -> None:
    lab = Lab(tmp_path, 3)
    first, second, third = (lab.start(node) for node in range(3))
    assert ranks(lab.meet(0, 1, 2)) == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    second.close()
    until(lambda: first.order() == "end")
    with ThreadPoolExecutor() as pool:
        collecting = pool.submit(first.collect, {}, {})
        until(lambda: third.order() == "fail")
        assert third.collect({}, {}) is None
        collected = collecting.result(20)
    assert collected is not None
    assert [name.endswith(str(lab.ports[1])) for name in collected.lost] == [True]
    assert ranks(lab.meet(0, 2)) == [(0, 2, 1), (1, 2, 1)]
    first.close()
    third.close()


def test_a_host_that_failed_and_is_lost_is_one_host_of_the_three(tmp_path: Path) -> None:
    lab = Lab(tmp_path, 3)
    first, second, third = (lab.start(node) for node in range(3))
    lab.meet(0, 1, 2)
    assert second.collect({}, {1: -9}) is None
    until(lambda: first.order() == "fail")
    with ThreadPoolExecutor() as pool:
        collecting = pool.submit(first.collect, {}, {})
        until(lambda: third.order() == "fail")
        second.close()
        until(lambda: 1 not in first._peers.alive())
        time.sleep(0.2)  # the first one looks every 0.05 s
        assert third.collect({}, {2: 0}) is None
        collected = collecting.result(20)
    assert collected is not None
    assert collected.ends == {1: -9, 2: 0}
    first.close()
    third.close()


def test_a_new_run_folder_is_its_users_alone(lab: Lab) -> None:
    lab.start(0)
    assert [path.stat().st_mode & 0o777 for path in (lab.runs[0], lab.runs[0] / "ranks")] == [0o700, 0o700]


def test_the_ranks_meet_at_the_port_that_is_given(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lab.start(0, port=port)
    lab.start(1, port=port)
    assert [place.port for place in lab.meet(0, 1) if isinstance(place, Place)] == [port, port]


def test_the_same_command_started_twice_leaves_the_first_one_its_mark(lab: Lab) -> None:
    first = lab.start(0)
    with pytest.raises(UserError, match="cannot listen"):
        lab.start(0)
    assert first._shares_folder(0, first._state.start)


def test_the_newest_checkpoint_leads_and_the_other_host_gets_a_copy_of_it(lab: Lab) -> None:
    saved = lab.save(1, 20)
    lab.save(0, 10)
    lab.start(0)
    lab.start(1)
    assert ranks(lab.meet(0, 1)) == [(1, 2, 0), (0, 2, 0)]
    until(lambda: Records(lab.runs[0]).newest_checkpoint() == 20)
    assert read(lab.runs[0] / "checkpoints" / saved.name) == read(saved)
    assert Records(lab.runs[0]).last_step() == 20, "the records came, too"


def test_hosts_that_share_the_run_folder_copy_nothing(lab: Lab) -> None:
    lab.runs[1] = lab.runs[0]
    first, second = lab.start(0), lab.start(1)
    lab.meet(0, 1)
    lab.save(0, 20)
    written = (lab.runs[0] / "metrics.jsonl").stat().st_ino
    first._note(phase="over")
    until(lambda: second._peers.alive()[0].phase == "over")
    second.conclude(0)
    assert (lab.runs[0] / "metrics.jsonl").stat().st_ino == written, "rank 0 still appends to this file"
    lab.kill(0)
    lab.kill(1)
    assert not list((lab.runs[0] / "ranks").iterdir())


def test_a_ranks_failure_is_known_on_all_hosts_and_the_end_of_the_run(lab: Lab) -> None:
    first, second = lab.start(0), lab.start(1)
    lab.meet(0, 1)
    assert second.collect({}, {1: -9}) is None
    until(lambda: first.order() == "fail")
    collected = first.collect({0: Status(1, "lost the other ranks")}, {0: 1})
    assert collected is not None
    assert (collected.ends, collected.lost) == ({0: 1, 1: -9}, ())
    assert first.host_of(1).endswith(str(lab.ports[1]))
    with ThreadPoolExecutor() as pool:
        told = pool.submit(second.meet, [Failure("rank 1 died", 3)])
        ending = pool.submit(first.conclude, 1, "it failed")
        assert told.result(20) == Verdict(1, "it failed")
        assert not ending.done(), "the other host has no copy yet"
        second.conclude(1)
        ending.result(20)


def test_a_last_checkpoint_that_does_not_arrive_is_copied_again(lab: Lab) -> None:
    lab.start(0)
    second = lab.start(1)
    lab.meet(0, 1)
    second._copies.stop()
    take, failures = second._copies._take, iter([OSError("its bytes were damaged")])

    def fail_once(*arguments: Any) -> object:
        for failure in failures:
            raise failure
        return take(*arguments)

    second._copies._take = fail_once
    lab.save(0, 20)
    until(lambda: second._peers.alive()[0].step == 20)
    second.conclude(0)
    assert Records(lab.runs[1]).newest_checkpoint() == 20


def test_the_run_ends_while_a_host_is_cut_off_and_that_host_takes_the_end(lab: Lab) -> None:
    """Both have trained alone; the first came to the end before they met again."""
    first, second = lab.start(0, timeout_s=0.1), lab.start(1, timeout_s=0.1)
    for node, other in ((first, 1), (second, 0)):
        alive = node._peers.alive
        node._peers.alive = lambda other=other, alive=alive: {n: s for n, s in alive().items() if n != other}  # type: ignore[method-assign]
    assert ranks(lab.meet(0, 1)) == [(0, 1, 0), (0, 1, 0)]
    lab.save(0, 40)
    lab.save(1, 20)
    for node in (first, second):
        del node._peers.alive  # type: ignore[method-assign]
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(first.conclude, 0)
        until(lambda: second.order() == "save")
        assert second.collect({0: Status(75)}, {0: 0}) is not None
        assert second.meet([]) == Verdict(0)
        second.conclude(0)
        ending.result(20)
    assert Records(lab.runs[1]).newest_checkpoint() == 40


def test_too_few_hosts_are_waited_for_and_then_refused(lab: Lab) -> None:
    with pytest.raises(RunError, match=r"1 of 2 are here, at least 2 must be; 127.0.0.1:\d+ \(Connection refused\)"):
        lab.start(0, least=2, timeout_s=1.0).meet([])
    lab.kill(0)
    lab.start(0, least=1, timeout_s=1.0)
    assert ranks(lab.meet(0)) == [(0, 1, 0)]


def test_another_command_is_refused_by_the_one_that_comes(lab: Lab) -> None:
    lab.start(0)
    other = lab.start(1, job="another")
    with pytest.raises(UserError, match="runs another command"):
        other.meet([])


@pytest.mark.parametrize(
    "name", ["../secret", "lock", "checkpoints/latest", "checkpoints/../lock", "checkpoints/step-00000007/.hidden", ""]
)
def test_only_records_and_checkpoints_can_be_read(lab: Lab, name: str) -> None:
    lab.save(0, 7)
    (lab.runs[0] / "lock").touch()
    lab.start(0)
    for known, status in ((name, 404), ("metrics.jsonl", 200), ("checkpoints/step-00000007/manifest.json", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", lab.ports[0], timeout=5)
        connection.request("GET", f"/{known}")
        assert connection.getresponse().status == status
        connection.close()


def test_a_damaged_or_unfinished_copy_is_absent(lab: Lab) -> None:
    folder = lab.save(0, 7)
    weights = next(folder.glob("weights-*"))
    whole = weights.read_bytes()
    copy = partial(take, lab.runs[1] / "checkpoints", 7, config=CheckpointConfig())
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1]):
        weights.write_bytes(damaged)
        with pytest.raises(Damaged, match="did not arrive as it was written"):
            copy(open_file=lambda name: (lab.runs[0] / name).open("rb"))
        assert not list((lab.runs[1] / "checkpoints").iterdir())
    weights.write_bytes(whole)
    assert copy(open_file=lambda name: (lab.runs[0] / name).open("rb")) == len(whole)


def test_the_list_of_hosts() -> None:
    one_own = read_hosts("127.0.0.1:29400,127.0.0.1:29401", 1, 0, 5.0)
    assert dataclasses.astuple(one_own) == ((("127.0.0.1", 29400), ("127.0.0.1", 29401)), 1, 2, 5.0, 0)
    assert read_hosts("127.0.0.1, 127.0.0.2:1", 0, 1, 5.0).addresses == (("127.0.0.1", 29400), ("127.0.0.2", 1))


@pytest.mark.parametrize(
    ("text", "node", "least", "says"),
    [
        ("a:x,b:1", 0, 0, "write it as"),
        ("a:²,b:1", 0, 0, "write it as"),
        ("a:0,b:1", 0, 0, "write it as"),
        ("a:99999,b:1", 0, 0, "write it as"),
        ("fd00::1,10.0.0.2", 0, 0, "has fd00::1, and ranks meet at IPv4 addresses"),  # `fd00:` did not resolve
        ("10.0.0.1,[fd00::2]:29400", 0, 0, r"has \[fd00::2\]:29400, and ranks meet at IPv4"),
        ("a..b,127.0.0.1", 0, 0, "does not resolve: it is no name of a host"),
        ("127.0.0.1:1", 0, 0, "two or more hosts"),
        ("127.0.0.1:1,127.0.0.1:1", 0, 0, "each once"),
        ("127.0.0.1:1,127.0.0.1:2", -1, 0, "several are an address.*--node-rank"),
        ("203.0.113.1:1,203.0.113.2:2", -1, 0, "none is an address"),
        ("127.0.0.1:1,127.0.0.1:2", 2, 0, "from 0 to 1"),
        ("127.0.0.1:1,127.0.0.1:2", 0, 3, "--min-hosts is 3"),
        ("0.0.0.0:1,127.0.0.1:2", 0, 0, "name the address at which the other hosts reach it"),
        ("127.0.0.1:1,203.0.113.2:2", 0, 0, "name the address at which the other hosts reach it"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(text: str, node: int, least: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_hosts(text, node, least, 5.0)


def test_names_of_hosts_as_ssh_and_mpirun_have_them(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=2\n\nme@b:auto  # the second\nc\n")
    expected = [("a", "2"), ("me@b", "auto"), ("c", "1")]
    assert list(map(dataclasses.astuple, read_names("", str(file)))) == expected
    assert list(map(dataclasses.astuple, read_names("a:2, me@b:auto,c", ""))) == expected


@pytest.mark.parametrize(
    ("text", "file", "says"),
    [
        ("", "", "which hosts"),
        ("a:2", "file", "which hosts"),
        ("", "/nonexistent", "cannot read --hostfile /nonexistent"),
        ("a:2,a:1", "", "each host once"),
        ("a:29400,b:29400", "", "'a:29400' is no host.*a port is given by --port"),
        ("a:0", "", "is no host"),
        ("-oProxyCommand=x", "", "is no host"),
    ],
)
def test_names_that_cannot_be_used_are_refused(text: str, file: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_names(text, file)
