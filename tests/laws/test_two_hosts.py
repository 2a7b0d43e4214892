"""The law at several hosts: network namespaces joined by a cable, each with its own name, interface and disk."""

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from program import TINY, Ended, Program, losses, rows, steps

TOLERANCE = 1e-4
PORT = 29400  # in namespaces of our own every port is free


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    """A network namespace with a name of its own."""

    name: str
    interface: str
    address: str

    def inside(self, *command: str) -> tuple[str, ...]:
        """Returns the command line that runs a command on this host, under its host name."""
        script = f'hostname {self.name} && exec "$0" "$@"'
        return ("ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", script, *command)

    def received_bytes(self) -> int:
        path = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        return int(sh("ip", "netns", "exec", self.name, "cat", path))


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("two hosts as network namespaces take root, `ip` and `unshare`")
    tag = uuid.uuid4().hex[:6]
    hosts = [Host(f"pl{tag}{x}", f"ve{tag}{x}", f"10.77.0.{i}") for i, x in enumerate("ab", start=1)]
    resolvers = [Path("/etc/netns") / host.name for host in hosts]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    try:
        try:
            for host in hosts:
                sh("ip", "netns", "add", host.name)
            sh("ip", "link", "add", hosts[0].interface, "type", "veth", "peer", "name", hosts[1].interface)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        for host, resolver in zip(hosts, resolvers, strict=True):
            resolver.mkdir(parents=True)
            (resolver / "hosts").write_text(names)  # `ip netns exec` lays it over /etc/hosts
            sh("ip", "link", "set", host.interface, "netns", host.name)
            inside = ("ip", "-n", host.name)
            sh(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            sh(*inside, "link", "set", host.interface, "up")
            sh(*inside, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host, resolver in zip(hosts, resolvers, strict=True):
            shutil.rmtree(resolver, ignore_errors=True)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", host.interface], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()


def run_on(hosts: list[Host], folders: list[Path], rendezvous: dict[str, tuple[str, ...]], *flags: str) -> list[Ended]:
    """Starts torchrun on each host, the second one first, and returns how each ended."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    with contextlib.ExitStack() as stack:
        programs = {}
        for host, folder in reversed(list(zip(hosts, folders, strict=True))):
            paceline = ("-m", "paceline", "train", *TINY, "--parallel.interface", host.interface, "--out", str(folder))
            command = host.inside(*torchrun, *rendezvous[host.name], *paceline, *flags)
            programs[host.name] = stack.enter_context(Program(command=command))
        return [programs[host.name].wait() for host in hosts]


@pytest.mark.long
@pytest.mark.parametrize("way", ["c10d", "static"])
def test_two_hosts_give_the_curve_of_one_process(runs, two_hosts, tmp_path: Path, way: str) -> None:
    first = two_hosts[0]
    if way == "c10d":
        at = ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{first.address}:{PORT}")
        rendezvous = {host.name: at for host in two_hosts}
    else:
        at = ("--master-addr", first.address, "--master-port", str(PORT))
        rendezvous = {host.name: ("--node-rank", str(rank), *at) for rank, host in enumerate(two_hosts)}
    folders = [tmp_path / host.name / "run" for host in two_hosts]  # a disk of its own each
    before = [host.received_bytes() for host in two_hosts]
    for ended in run_on(two_hosts, folders, rendezvous):
        ended.require(0)
    written = [folder for folder in folders if (folder / "metrics.jsonl").exists()]
    assert len(written) == 1, "rank 0 writes the records, on its host"
    assert max(abs(a - b) for a, b in zip(losses(written[0]), losses(runs.get(1)), strict=True)) <= TOLERANCE
    # Both ranks took part, each on its host, and the gradients went through the cable.
    assert {row["world_size"] for row in steps(written[0])} == {2}
    assert all(min(row["rank_compute_ms"]) > 0 for row in steps(written[0]))
    logs = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("rank-*.log"))
    assert sorted(Path(log).name for log in logs) == ["rank-00000.log", "rank-00001.log"]
    assert len({Path(log).parts[0] for log in logs}) == 2
    gradients_bytes = sum(row["comm_bytes"] for row in steps(written[0]))
    for host, earlier in zip(two_hosts, before, strict=True):
        assert host.received_bytes() - earlier > 0.9 * gradients_bytes
    assert [row["event"] for row in rows(written[0] / "events.jsonl")] == ["start", "checkpoint", "end"]


@pytest.mark.long
def test_an_interface_that_one_host_lacks_is_refused_by_that_host(two_hosts, tmp_path: Path) -> None:
    """Each host names its own; here the second is given the first's."""
    first, second = two_hosts
    wrong = Host(second.name, first.interface, second.address)
    at = ("--master-addr", first.address, "--master-port", str(PORT))
    rendezvous = {host.name: ("--node-rank", str(rank), *at) for rank, host in enumerate(two_hosts)}
    folders = [tmp_path / "a", tmp_path / "b"]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    flags = ("-m", "paceline", "train", *TINY, "--parallel.interface", wrong.interface, "--out", str(folders[1]))
    waiting = ("-m", "paceline", "train", *TINY, "--parallel.interface", first.interface, "--out", str(folders[0]))
    with (
        Program(command=first.inside(*torchrun, *rendezvous[first.name], *waiting)),
        Program(command=second.inside(*torchrun, *rendezvous[second.name], *flags)) as refused,
    ):
        ended = refused.wait(60)
    assert ended.status != 0
    message = f"parallel.interface is '{first.interface}', and this machine ({second.name}) has no such interface"
    assert message in ended.err
    assert not any(folder.exists() for folder in folders)
