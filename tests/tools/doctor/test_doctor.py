"""Each check: broken for real, named with what fixes it; and healthy, without a word."""

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from namespaces import Host, sh
from program import TORCHRUN, Ended, Program, run

pytestmark = [pytest.mark.lab, pytest.mark.long]

HERE = Path(__file__).parent
DOCTOR = (sys.executable, "-m", "paceline", "doctor", "--json")
PORT = 29400
MEMORY = Path("/sys/fs/cgroup/memory")
BROKEN = """
top=/sys/fs/cgroup/memory group=$top/paceline-test && mkdir -p $group && echo 900M > $group/memory.limit_in_bytes &&
mount -t tmpfs -o size=4m tmpfs /dev/shm && mount -t tmpfs -o size=300m tmpfs disk && ulimit -Sn 200 &&
echo $$ > $group/cgroup.procs && mount --bind $group $top &&
exec taskset -c 0 "$0" "$@"
"""
HEALTHY = {"OMP_NUM_THREADS": ""}  # tests have 1 for themselves
Row = dict[str, str]


def rows(ended: Ended, host: str = "", but: tuple[str, ...] = ("load", "same speed")) -> list[Row]:
    """The findings about a host, or all; not about the load of this machine, which other tests share."""
    hosts = json.loads(ended.out)["hosts"]
    found = hosts[host] if host else [row for rows in hosts.values() for row in rows]
    return [row for row in found if row["check"] not in but]


def the(found: Sequence[Row], check: str, level: str, *parts: str) -> str:
    """There is one finding of this check and level that says all this; returns its fix."""
    of_check = [row for row in found if row["check"] == check]
    fitting = [row for row in of_check if row["level"] == level and all(part in row["seen"] for part in parts)]
    assert len(fitting) == 1, f"{check}, {level}, {parts} in {of_check}"
    return fitting[0]["fix"]


def prepared(folder: Path, text: str) -> Path:
    folder.with_suffix(".txt").write_text(text)
    arguments = (str(folder.with_suffix(".txt")), "--out", str(folder), "--tokenizer", "bytes")
    run("data", "prepare", *arguments).require()
    return folder


# ---- one machine ----


def test_a_healthy_machine(tmp_path: Path) -> None:
    ended = run("doctor", "--json", "--preset", "tiny", env=HEALTHY, cwd=tmp_path).require()
    found = rows(ended)
    assert not [row for row in found if row["level"] != "ok"]
    checks = {"versions", "cores", "memory", "/dev/shm", "limits", "interface", "device", "data", "config"}
    assert checks <= {row["check"] for row in found}
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


@pytest.mark.skipif(os.geteuid() != 0 or not MEMORY.is_dir(), reason="takes root and cgroups of version 1")
def test_a_machine_with_everything_wrong(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(HERE / "fake_driver.py", tmp_path / "bin" / "nvidia-smi")
    data = prepared(tmp_path / "data", "some words to read, " * 5000)
    shard = max(data.glob("*train*"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\xff")
    environment = {
        **HEALTHY,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NCCL_SOCKET_IFNAME": "ib7",
        "NCCL_P2P_DISABLE": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "PACELINE_SHARE_GPU": "1",
        "HTTPS_PROXY": "http://me:secret@proxy:3128",
        "PACELINE_CACHE": str(tmp_path / "cache"),
    }
    options = ("--preset", "gpt2-124m", "--out", "disk/run", "--nproc", "2", "--data.path", str(data))
    options += ("--train.device-batch-size", "480", "--parallel.device", "cpu", "--parallel.interface", "eth99")
    command = ("unshare", "--mount", "sh", "-c", BROKEN, *DOCTOR, *options)
    busy = ("sh", "-c", "while :; do :; done")
    with Program(command=busy) as other, Program(command=command, env=environment, cwd=tmp_path) as program:
        ended = program.wait().require(1)
        assert other.process.poll() is None
    (MEMORY / "paceline-test").rmdir()
    found = rows(ended)
    loaded = rows(ended, socket.gethostname(), but=())
    seen = "cores busy with other work: "  # of which program, other work on this machine decides: test_findings
    assert the(loaded, "load", "warning", seen) == "wait until it ends, or stop it if it is yours"
    assert the(found, "/dev/shm", "warning", "4.0 MiB free") == (
        "mount -o remount,size=8G /dev/shm, or docker run --shm-size 8g"
    )
    assert the(found, "limits", "failure", "200 open files").startswith("ulimit -n ")
    assert "taskset -c 0-" in the(found, "cores", "warning", "affinity mask allows 1")
    assert the(found, "cores", "warning", "take turns") == "--nproc 1"
    assert the(found, "environment", "warning", "NCCL_P2P_DISABLE=1") == "unset NCCL_P2P_DISABLE"
    for name in ("CUDA_LAUNCH_BLOCKING", "PACELINE_SHARE_GPU"):
        assert the(found, "environment", "warning", name) == f"unset {name}"
    assert the(found, "environment", "ok", "HTTPS_PROXY", "ranks do not") == ""
    assert "secret" not in ended.out
    assert "it has: " in the(found, "interface", "failure", "eth99")
    assert the(found, "interface", "failure", "ib7") == "unset NCCL_SOCKET_IFNAME"
    assert "--out elsewhere" in the(found, "run folder", "failure", "needs space for 3")
    assert the(found, "data", "failure", shard.name)
    assert "ps aux" in the(found, "memory", "warning", "little for 2 ranks")
    assert "a smaller model" in the(found, "config", "failure", "of them activations")
    assert "gpu-reset -i 0" in the(found, "driver", "failure", "GPU 0", "2 uncorrected")
    assert the(found, "driver", "warning", "GPU 1", "slowed by heat")
    assert the(found, "driver", "warning", "process 4321 (python, of a user) uses 69000 MiB") == "kill 4321"
    assert the(found, "driver", "ok", "GPU 2") == ""
    assert "pip install torch" in the(found, "driver", "warning", "shows 3 GPUs", "none")


# ---- several hosts ----


def on_both(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], env: Sequence[dict[str, str]], cwd: Path
) -> list[Ended]:
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(Program(command=tuple(command), env=each, cwd=cwd, host=host))
            for host, command, each in zip(hosts, commands, env, strict=True)
        ]
        return [program.wait() for program in programs]


def listed(hosts: Sequence[Host]) -> tuple[str, ...]:
    return "--hosts", ",".join(host.address for host in hosts)


def test_two_healthy_hosts_in_half_a_minute(two_hosts: list[Host], tmp_path: Path, record_property: Any) -> None:
    data = [prepared(tmp_path / f"data-{host.name}", "words " * 9000) for host in two_hosts]
    options = ("--preset", "tiny", *listed(two_hosts))
    commands = [(*DOCTOR, *options, "--data.path", str(path)) for path in data]
    ended = on_both(two_hosts, commands, [HEALTHY] * 2, tmp_path)
    record_property("seconds", [each.seconds for each in ended])
    for each in ended:
        found = rows(each.require())
        assert not [row for row in found if row["level"] != "ok"]
        for one, other in (two_hosts, two_hosts[::-1]):
            the(rows(each, one.name), f"to {other.name}", "ok", "round trip", "Gbit/s", "MTU 1500")
        the(rows(each, two_hosts[0].name), "shared folder", "ok", "all hosts share")
        the(rows(each, two_hosts[1].name), "clock", "ok")


def test_two_hosts_that_differ_and_hide_behind_a_firewall(two_hosts: list[Host], tmp_path: Path) -> None:
    a, b = two_hosts
    data = [prepared(tmp_path / f"data-{host.name}", f"words of {host.name} " * 9000) for host in two_hosts]
    for port in ("sport", "dport"):  # the launchers' port alone is open
        sh("ip", "-n", a.name, "rule", "add", "pref", "9", "ipproto", "tcp", port, str(PORT), "lookup", "main")
    sh("ip", "-n", a.name, "rule", "add", "pref", "10", "to", b.address, "ipproto", "tcp", "unreachable")
    options = [("--preset", "tiny", *listed(two_hosts), "--data.path", str(path)) for path in data]
    wrapped = (sys.executable, str(HERE / "wrapped.py"), "20", "2.12.1", "doctor", "--json", *options[1])
    env = [{}, HEALTHY]
    (tmp_path / "runs").mkdir()
    own = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=90m tmpfs runs && exec "$0" "$@"')
    ended = on_both(two_hosts, [(*DOCTOR, *options[0]), (*own, *wrapped)], env, tmp_path)
    for each in ended:
        found = rows(each.require(1), b.name)
        assert "timedatectl" in the(found, "clock", "failure", "ahead of", "20.")
        assert the(found, "same versions", "failure", "torch 2.12.1").startswith("pip install torch==2.13")
        assert (
            the(found, "same variables", "warning", "OMP_NUM_THREADS is not set, and 1") == "export OMP_NUM_THREADS=1"
        )
        assert "this one is damaged" in the(found, "device", "failure", "multiplies wrongly")
        assert "rsync" in the(found, "same data", "failure", f"than on {a.name}")
        the(rows(each, a.name), "shared folder", "ok", "a run folder of its own")
        fix = the(rows(each, a.name), f"to {b.name}", "failure", "unreachable", "a port as ranks open")
        assert f"ufw allow from {a.address}" in fix
        the(found, f"to {a.name}", "failure")


def test_a_path_that_loses_large_packets_and_a_host_that_is_missing(two_hosts: list[Host], tmp_path: Path) -> None:
    a, b = two_hosts
    sh("ip", "-n", b.name, "link", "set", b.interface, "mtu", "1400")
    table, _ = on_both(two_hosts, [(*DOCTOR[:-1], *listed(two_hosts))] * 2, [HEALTHY] * 2, tmp_path)
    said = " ".join(table.require().out.split())
    assert f"fix: ip link set dev {a.interface} mtu 14" in said
    assert "packets of 1500 bytes are lost" in said
    with Program(command=(*DOCTOR, *listed(two_hosts), "--wait-s", "4"), cwd=tmp_path, host=a) as program:
        alone = program.wait().require(1)
    assert the(rows(alone, f"{b.address}:{PORT}"), "answers", "failure", "nothing listens") == (
        "start the same command there"
    )
    names = Path("/etc/netns") / b.name / "hosts"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {b.name}\n")
    b.cable("down")
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torchrun |= {"MASTER_ADDR": a.address, "MASTER_PORT": "29500"}
    with Program(command=(*DOCTOR, "--wait-s", "4"), env=torchrun, cwd=tmp_path, host=b) as program:
        cut_off = rows(program.wait().require(1), b.name)
    the(cut_off, "rendezvous", "failure", f"no store at {a.address}:29500")
    the(cut_off, "memory", "ok")
    the(cut_off, "interface", "failure", "127.0.1.1", b.address)


def test_torchrun_on_one_host_prints_one_table(tmp_path: Path) -> None:
    torchrun = (*TORCHRUN, "--nproc-per-node", "2", "-m", "paceline", "doctor")
    with Program(command=torchrun, cwd=tmp_path) as program:
        assert program.wait().require().out.count("1 host in") == 1


@pytest.mark.alone
def test_a_lab_with_a_slow_host(tmp_path: Path) -> None:
    slow = ("lab", "--hosts", "3", "--cpu", "0.8,0.8,0.4", "--rate", "1gbit,1gbit,100mbit")
    command = (*slow, "--", "doctor", "--json", "--preset", "demo")
    ended = run(*command, cwd=tmp_path)
    if ended.status == 2:
        pytest.skip(ended.err)
    ended.require()
    assert "docker run --cpus" in the(rows(ended, "c"), "cores", "warning", "grants the time of 0.4")
    assert "ethtool eth0" in the(rows(ended, "c"), "to a", "warning", "others carry")
    the(rows(ended, "a"), "to b", "ok")
    assert "--train.global-batch-size" in the(rows(ended, "job"), "config", "warning", "over the slowest link")


# Host c computes without AVX, and has a folder of its own.
UNLIKE = """
if [ $(hostname) = c ]; then
    export ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE
    mount -t tmpfs tmpfs runs
fi
cd runs
exec env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE "$0" "$@" > ../$(hostname).json
"""


def found_on_unlike_hosts(tmp_path: Path) -> dict[str, list[Row]]:
    (tmp_path / "runs").mkdir()
    hosts = ("--hosts", "10.0.0.1,10.0.0.2,10.0.0.3")
    ended = run("lab", "--hosts", "3", "--", "exec", "sh", "-c", UNLIKE, *DOCTOR, *hosts, cwd=tmp_path)
    if ended.status == 2:
        pytest.skip(ended.err)
    found: dict[str, list[Row]] = json.loads((tmp_path / "a.json").read_text())["hosts"]
    return found


@pytest.mark.alone  # what else this machine does makes its other hosts slow, too
def test_a_slow_host_among_some_with_its_processor(tmp_path: Path) -> None:
    found = found_on_unlike_hosts(tmp_path)
    slow = [row for row in found["c"] if row["check"] == "same speed"]
    assert "--parallel.shares auto" in the(slow, "same speed", "warning", "on another host with this processor")
    assert not [row for row in found["b"] if row["check"] == "same speed"]


def test_a_folder_that_some_hosts_share(tmp_path: Path) -> None:
    found = found_on_unlike_hosts(tmp_path)
    assert the(found["a"], "shared folder", "warning", "some hosts share") == "mount it on all hosts, or on none"
