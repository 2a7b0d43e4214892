"""`paceline launch` with real sshd on two hosts: it trains, it ends everywhere, and it says once what is wrong."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from program import TINY, Ended, Program, losses, rows, steps
from ssh_hosts import SshHosts

pytestmark = [pytest.mark.lab, pytest.mark.long]

ENDS_S = 60.0  # whatever is killed or wrong; 7 on a busy machine: docs/LOG.md
LONG = (*TINY, "--train.steps", "3000", "--out", "run")
ENV = {"MLFLOW_TRACKING_URI": "http://tracker.invalid"}


def started(
    pair: SshHosts,
    folder: Path,
    *train: str,
    hosts: str = "a:1,b:1",
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    is_cold: bool = False,
) -> Program:
    """`paceline launch` on host a."""
    python = () if is_cold else ("--python", pair.warm_python)
    launch = ("launch", "--ssh", pair.ssh, "--hosts", hosts, *python, *options, "--", "train", *train)
    return Program(*launch, host=pair.hosts[0], cwd=folder, env={**ENV, **(env or {})})


def end_of(program: Program) -> Ended:
    """How the command ended. Fails where a process of it, on any host, lives after ENDS_S."""
    program.wait_until_gone(ENDS_S)
    return program.wait(1.0)


def refused(pair: SshHosts, folder: Path, hosts: str = "a:1,b:1", options: tuple[str, ...] = ()) -> str:
    """Returns the only line that a command with status 2 printed."""
    with started(pair, folder, *LONG, hosts=hosts, options=options) as program:
        return one_error(end_of(program).require(2))


def one_error(ended: Ended) -> str:
    (found,) = [line for line in ended.err.splitlines() if "error: " in line]
    assert "Traceback" not in ended.err
    return found


def test_it_stops_at_a_signal_and_the_same_command_trains_to_the_end(pair: SshHosts, tmp_path: Path) -> None:
    """The hosts share the disk, and so the run folder."""
    flags = (*TINY, "--out", "run", "--resume", "auto")
    with started(pair, tmp_path, *flags) as program:
        program.wait_for(lambda: len(steps(tmp_path / "run")) > 2)
        program.process.terminate()
        stopped = end_of(program).require(75)
    assert "error" not in stopped.err
    with started(pair, tmp_path, *flags) as program:
        ended = program.wait().require(0)
        program.wait_until_gone(ENDS_S)
    assert len(losses(tmp_path / "run")) == 40
    assert steps(tmp_path / "run")[-1]["world_size"] == 2
    assert ended.out.count("step 40: validation loss") == 1
    assert [row["event"] for row in rows(tmp_path / "run" / "events.jsonl")].count("end") == 2


def test_nothing_is_left_when_the_launcher_is_killed(pair: SshHosts, tmp_path: Path) -> None:
    with started(pair, tmp_path, *LONG) as program:
        program.wait_for(lambda: len(steps(tmp_path / "run")) > 2)
        os.kill(program.pid, signal.SIGKILL)
        end_of(program)
    assert rows(tmp_path / "run" / "events.jsonl")[-1]["event"] == "end"
    assert (tmp_path / "run" / "checkpoints" / "latest").exists(), "the ranks saved"


@pytest.mark.parametrize(
    ("victim", "says"),
    [
        ("rank", "error: rank 1 was killed by SIGKILL (the kernel does that when memory runs out), on b"),
        ("agent", "error: host b is lost"),
    ],
)
def test_a_part_that_is_killed_is_named_and_the_rest_ends(
    pair: SshHosts, tmp_path: Path, victim: str, says: str
) -> None:
    with started(pair, tmp_path, *LONG, is_cold=victim == "rank") as program:
        program.wait_for(lambda: len(steps(tmp_path / "run")) > 2)
        rank = psutil.Process(program.ranks()[1])
        if victim == "rank":  # a forked process shows none
            assert rank.environ()["MLFLOW_TRACKING_URI"] == ENV["MLFLOW_TRACKING_URI"]  # ssh itself passes none
        agent = rank.parents()[0]  # it became the command's launcher
        (rank if victim == "rank" else agent).kill()
        ended = end_of(program).require(1)
    assert says in one_error(ended)


def test_a_rank_that_dies_is_a_failure_and_the_second_one_ends_the_run(pair: SshHosts, tmp_path: Path) -> None:
    fault = "rank=1 step=8 phase=forward kind=kill attempt=any"
    flags = (*TINY, "--checkpoint.every", "5", "--max-restarts", "1", "--out", "run")
    with started(pair, tmp_path, *flags, env={"PACELINE_FAULTS": fault}) as program:
        ended = end_of(program).require(1)
    assert "rank 1 was killed by SIGKILL" in ended.err
    assert "the run failed after 1 restart" in one_error(ended)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000005\n"


def test_hosts_that_ssh_does_not_reach_are_all_named(pair: SshHosts, tmp_path: Path) -> None:
    said = refused(pair, tmp_path, hosts="a,locked,stranger,closed,unknown.invalid")
    for words in (
        "locked: root@10.77.0.2: Permission denied (publickey).; put your public key there (ssh-copy-id locked)",
        "stranger: Host key verification failed.; connect once by hand (ssh stranger)",
        "closed: ssh: connect to host 10.77.0.1 port 1: Connection refused; start sshd there",
        "unknown.invalid: ssh: Could not resolve hostname unknown.invalid",
    ):
        assert words in said
    assert " a: " not in said


def test_a_folder_that_is_missing(pair: SshHosts, tmp_path: Path) -> None:
    said = refused(pair, tmp_path, options=("--chdir", "/nonexistent"))
    assert "error: cannot work in /nonexistent: No such file or directory; make it" in said


def test_a_port_that_is_taken(pair: SshHosts, tmp_path: Path) -> None:
    b = pair.hosts[1]
    line = b.inside(sys.executable, "-u", "-m", "http.server", "29400", "--bind", b.address)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            assert "Serving HTTP" in server.stdout.readline()  # it listens by now
            with started(pair, tmp_path, *LONG, "--parallel.port", "29400") as program:
                said = one_error(end_of(program).require(2))
        finally:
            server.terminate()
    assert f"b: error: cannot listen on {b.address}:29400: Address already in use; choose another port" in said
