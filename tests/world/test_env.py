"""From environment variables to one record: whole worlds are taken, half ones and contradictions refused."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.base.errors import UserError
from paceline.base.net import listen
from paceline.world import env as world_env
from paceline.world.env import (
    Environment,
    check_interface,
    check_size,
    detect,
    is_loopback,
    listening_address,
    store_addresses,
    transfer_address,
    wait_for_master,
)
from paceline.world.torchrun import Torchrun, check_nodes

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchruns_variables_are_one_record() -> None:
    assert detect(TORCHRUN) == Environment(
        rank=3, local_rank=1, world_size=4, local_world_size=2, master_addr="10.0.0.1", master_port=29500
    )
    assert detect(TORCHRUN).is_distributed
    assert detect({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_holds_store


@pytest.mark.parametrize(
    "variables", [{}, {"MASTER_ADDR": "a"}, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"HOME": "/"}]
)
def test_without_a_rank_or_a_world_size_it_is_a_world_of_one(variables: dict[str, str]) -> None:
    assert detect(variables) == Environment()
    assert not detect(variables).is_distributed


def test_a_described_world_of_one_rank_is_distributed() -> None:
    found = detect({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert found.is_distributed
    assert (found.rank, found.local_rank, found.local_world_size) == (0, 0, 1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_world_is_refused_naming_what_is_missing(missing: str) -> None:
    without = {name: value for name, value in TORCHRUN.items() if name != missing}
    for half in (without, {**TORCHRUN, missing: ""}):
        with pytest.raises(UserError, match=f"only a part of a rank.*{missing} missing"):
            detect(half)


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "5"},
        {"LOCAL_WORLD_SIZE": "0"},
    ],
    ids=str,
)
def test_contradictions_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UserError):
        detect({**TORCHRUN, **change})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["two", "1.5", "0x1"])
def test_what_is_no_whole_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name} is '{value}'"):
        detect({**TORCHRUN, name: value})


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999"])
def test_a_master_port_outside_of_all_ports_is_refused(port: str) -> None:
    with pytest.raises(UserError, match="MASTER_PORT"):
        detect({**TORCHRUN, "MASTER_PORT": port})


def test_a_job_and_its_lives_are_read() -> None:
    torchrun = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert (detect(torchrun).job, detect(torchrun).attempt) == ("mine", 2)
    assert detect({**torchrun, "TORCHELASTIC_RUN_ID": "none"}).job == ""  # static rendezvous: everybody's is "none"
    ours = {**torchrun, "PACELINE_JOB": "ours", "PACELINE_ATTEMPT": "5"}
    assert (detect(ours).job, detect(ours).attempt) == ("ours", 5)


# ---- how many there should be ----


def test_a_world_of_another_size_than_expected_is_refused() -> None:
    for expected in (0, 3):
        check_size(3, expected)  # raises nothing
    with pytest.raises(UserError, match=r"parallel\.expect-ranks is 4, and this world has 3 ranks"):
        check_size(3, 4)


@pytest.mark.parametrize(
    ("options", "nodes", "rendezvous"),
    [
        ("--nnodes 2 --nproc-per-node 4", "2", "static"),
        ("--nnodes=3 --rdzv_backend=c10d", "3", "c10d"),
        ("--nnodes 1:4 --rdzv-backend etcd-v2", "1:4", "etcd-v2"),
        ("--standalone --nproc-per-node 2", "1", "c10d"),
        ("--nproc-per-node 2", "7", "static"),  # by PET_NNODES
    ],
)
def test_torchruns_command_line_is_read(
    monkeypatch: pytest.MonkeyPatch, options: str, nodes: str, rendezvous: str
) -> None:
    monkeypatch.setenv("PET_NNODES", "7")
    script = ["-m", "paceline", "train", "--nnodes", "9"]
    assert Torchrun.read([*options.split(), *script]) == Torchrun(nodes, rendezvous)
    assert Torchrun(nodes, rendezvous).is_dynamic == (nodes != "1" and rendezvous != "static")


NODES_SCRIPT = """
import os
from paceline.base.errors import UserError
from paceline.world.env import detect
from paceline.world.torchrun import check_nodes
for come in "12":
    os.environ["GROUP_WORLD_SIZE"] = come
    try:
        check_nodes(detect())
    except UserError as error:
        print(error)
    else:
        print("fine")
"""
FEWER = "asked for 2 nodes (--nnodes), and this world has 1"


def test_fewer_nodes_than_torchrun_was_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Torchrun, "of_this_process", lambda: Torchrun("2", "static"))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    with pytest.raises(UserError) as refusal:
        check_nodes(detect(TORCHRUN))
    assert FEWER in str(refusal.value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    check_nodes(detect(TORCHRUN))


@pytest.mark.long
def test_torchrun_is_found_among_the_processes_above(tmp_path: Path) -> None:
    """A process under one whose command line is torchrun's; the script's own --nnodes is none of torchrun's."""
    script = tmp_path / "script.py"
    script.write_text(NODES_SCRIPT)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[-3]], check=True)\n")
    command = [sys.executable, torchrun, "--nnodes", "2", script, "--nnodes", "9"]
    ended = subprocess.run(command, env={**os.environ, **TORCHRUN}, capture_output=True, text=True, check=True)
    refusal, fine = ended.stdout.splitlines()
    assert FEWER in refusal
    assert fine == "fine"


def test_without_torchrun_nobody_asked_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert Torchrun.of_this_process() == Torchrun()
    check_nodes(detect(TORCHRUN))  # raises nothing


# ---- interface ----


@pytest.fixture
def loopback() -> str:
    """The name of the loopback interface."""
    return next(name for name, its in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in its))


def test_an_interface_that_is_there_passes_and_none_needs_no_check(loopback: str) -> None:
    for name in (loopback, ""):
        check_interface(name)  # raises nothing


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"parallel\.interface is 'eth77'") as refusal:
        check_interface("eth77")
    for name in psutil.net_if_addrs():
        assert name in str(refusal.value)
    assert refusal.value.exit_status == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make an interface")
def test_an_interface_without_an_address_is_refused() -> None:
    made = subprocess.run(["ip", "link", "add", "pl-test0", "type", "veth", "peer", "pl-test1"], capture_output=True)
    if made.returncode:
        pytest.skip("this machine makes no veth interface")
    try:
        with pytest.raises(UserError, match="pl-test0"):
            check_interface("pl-test0")
    finally:
        subprocess.run(["ip", "link", "del", "pl-test0"], check=True)


# ---- port ----


def test_a_free_port_passes_also_just_after_it_was_used() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the server's side closes first: the port stays in TIME_WAIT
            assert client.recv(1) == b""
    listen("127.0.0.1", port).close()  # raises nothing


# ---- master ----


def test_an_unresolvable_master_is_refused() -> None:
    env = Environment(rank=1, world_size=2, local_world_size=2, master_addr="no-such-host.invalid", master_port=29500)
    with pytest.raises(UserError, match=r"MASTER_ADDR is 'no-such-host\.invalid'"):
        wait_for_master(env)


@pytest.mark.parametrize("name", ["node..cluster", "n" * 64])
def test_what_cannot_be_a_hosts_name_is_refused_as_one_that_does_not_resolve(name: str) -> None:
    env = Environment(rank=1, world_size=2, local_world_size=2, master_addr=name, master_port=29500)
    with pytest.raises(
        UserError, match=f"MASTER_ADDR is '{name}', which does not resolve on .*: it is no name of a host"
    ):
        wait_for_master(env)
    with pytest.raises(OSError, match="it is no name of a host"):
        listen(name, 0)


def test_a_master_whose_name_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began, ask = time.monotonic(), socket.getaddrinfo

    def late(name: str, *arguments: Any, **options: Any) -> Any:
        if time.monotonic() < began + 0.5:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    env = Environment(rank=1, world_size=2, local_world_size=2, master_addr="late", master_port=29500)
    wait_for_master(env, timeout_s=30.0)
    assert capsys.readouterr().out == "MASTER_ADDR late does not resolve yet; asking again for 30 s\n"


def named(address: str, **changes: Any) -> Environment:
    return Environment(**{"rank": 0, "world_size": 2, "master_addr": address, "master_port": 29500, **changes})


def test_the_store_listens_on_the_address_that_the_master_has(monkeypatch: pytest.MonkeyPatch, loopback: str) -> None:
    assert store_addresses(named("localhost"), "")[0] == "127.0.0.1"
    assert listening_address(named("127.0.0.1"), "") == "127.0.0.1"
    assert transfer_address(loopback) == "127.0.0.1"
    assert listening_address(named("192.0.2.1"), loopback) == "127.0.0.1"  # as behind a NAT or a cluster's service
    monkeypatch.setattr(world_env, "transfer_address", lambda _: "127.0.0.1")
    with pytest.raises(UserError, match=r"MASTER_ADDR is '192\.0\.2\.1' .*not an address of rank 0's host"):
        listening_address(named("192.0.2.1"), "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
def test_a_name_that_is_loopback_at_home_gives_way_to_the_interface(
    monkeypatch: pytest.MonkeyPatch, loopback: str
) -> None:
    """As Debian's 127.0.1.1 for the host's own name; the interface is loopback's here, with another address."""
    monkeypatch.setattr(world_env, "_resolve", lambda name, port: ["127.0.1.1"])
    assert listening_address(named("myself"), loopback) == "127.0.0.1"
    assert store_addresses(named("myself", rank=1), loopback)[0] == "127.0.0.1"
    assert listening_address(named("myself"), "") == "127.0.1.1"
    assert listening_address(named("127.0.1.1"), loopback) == "127.0.1.1"  # said is said
    assert is_loopback("::1")


def test_detect_reads_the_real_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in world_env._NEEDED:
        monkeypatch.delenv(name, raising=False)
    assert detect() == Environment()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert detect() == detect(TORCHRUN)
