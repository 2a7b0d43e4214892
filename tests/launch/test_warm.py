"""Ranks that are forked from a server, and that their launcher treats as it does ranks that it started cold.

The commands here are no forks of the test's own server (`COLD`), so that they start one, as a user's do.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from program import COLD, TINY, Program, losses, rows, run, steps

from paceline.launch.warm import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="ranks are forked on Linux only")

LAUNCHER = """
import os, signal, sys, threading
from paceline.launch.signals import StopSignals
from paceline.launch.warm import WarmServer
signals = StopSignals()
server = WarmServer(("json",), (sys.executable, "-m", "paceline", *sys.argv[1:]))
ranks = [server.fork({**os.environ, "RANK": str(rank), "X": "of this rank"}, signals) for rank in range(2)]
print([rank.wait(20) for rank in ranks], flush=True)
if len(sys.argv) > 2:
    os.kill(server._process.pid, signal.SIGSTOP)
    with signals:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        print(server.fork(dict(os.environ), signals))
    print(server.fork(dict(os.environ), signals))
server.close()
"""


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of this command, from a server that imports next to nothing."""
    command = (sys.executable, "-c", LAUNCHER, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_ranks_run_the_command_and_end_with_its_status() -> None:
    """Mutation: the exit status of the process between the server and a rank."""
    ended = launched("runs", "--nonsense")
    assert ended.stdout.splitlines()[0] == "[2, 2]"
    assert ended.stderr.count("no option --nonsense") == 2, "a rank prints its own message"
    assert ended.stdout.splitlines()[1] == "None", "a launcher that is stopped does not wait for a server's imports"
    assert ended.stdout.splitlines()[2] == "None", "a server that was killed forks nothing"
    assert launched("--version").stdout.splitlines()[-1] == "[0, 0]"


STAND_IN = """
import subprocess
import paceline.__main__
paceline.__main__.main = lambda: subprocess.Popen(["sleep", "60"]) and 0  # in place of the command
"""
REAPED = """
import os, psutil, signal, sys, time
from paceline.launch.signals import StopSignals
from paceline.launch.warm import WarmServer
signals = StopSignals()
server = WarmServer(("stand_in",), (sys.executable, "-m", "paceline"))
rank = server.fork(dict(os.environ), signals)
rank.wait(20)
os.killpg(rank.pid, signal.SIGKILL)  # as an attempt does when a rank has ended
me = psutil.Process()
while not any(child.status() == psutil.STATUS_ZOMBIE for child in me.children()):
    time.sleep(0.01)
server.fork(dict(os.environ), signals).wait(20)
print([child.name() for child in me.children() if child.status() == psutil.STATUS_ZOMBIE])
os.killpg(server._ended[-1].pid, signal.SIGKILL)
server.close()
"""


def test_what_an_ended_rank_had_started_is_waited_for(tmp_path: Path) -> None:
    """It was killed with its rank, and became the launcher's child. Mutation: it stays a zombie as long as the run."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    ended = subprocess.run(
        (sys.executable, "-c", REAPED), cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.strip() == "[]", ended.stderr


DIES = """
import os, signal
os.setsid = lambda: os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
"""
NO_PROCESS_LEFT = """
import os
fork, server = os.fork, os.getpid()
def refuse():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = lambda: fork() if os.getpid() == server else refuse()
"""
WITHOUT_RANK = """
import os, sys
from paceline.launch.signals import StopSignals
from paceline.launch.warm import WarmServer
server = WarmServer(("stand_in",), (sys.executable, "-m", "paceline", "--version"))
print([server.fork(dict(os.environ), StopSignals()) for _ in range(2)])
server.close()
"""


@pytest.mark.parametrize("stand_in", [DIES, NO_PROCESS_LEFT])
def test_a_launcher_does_not_wait_for_a_rank_that_never_was(tmp_path: Path, stand_in: str) -> None:
    """Finds: a rank that is killed before it has answered, or cannot be forked, and a launcher that waits for ever."""
    (tmp_path / "stand_in.py").write_text(stand_in)
    command = (sys.executable, "-c", WITHOUT_RANK)
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[None, None]", "then ranks are started cold"
    assert not ended.stderr


def wait_until_gone(process: psutil.Process) -> None:
    """A process that ends is running for a moment when its environment, by which `Program` knows it, is gone."""
    deadline = time.monotonic() + 60.0
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, process
            time.sleep(0.02)


def warm_server_of(program: Program) -> psutil.Process:
    children = psutil.Process(program.pid).children()
    return next(child for child in children if not child.name().startswith("paceline-r"))


@pytest.mark.long
def test_a_restart_forks_and_a_dead_server_means_a_cold_start(tmp_path: Path) -> None:
    """The curve is that of ranks that were started cold. Mutation: the second attempt waits for the server for ever."""
    plain, folder = tmp_path / "plain", tmp_path / "run"
    run("train", *TINY, "--nproc", "2", "--start", "cold", "--out", str(plain)).require(0)
    sleep = "phase=data kind=sleep seconds=60"
    slow = f"rank=1 step=8 {sleep} attempt=0; rank=1 step=24 {sleep} attempt=1"
    saving = ("--checkpoint.every", "4", "--max-restarts", "2", "--nproc", "2", "--out", str(folder))
    with Program("train", *TINY, *saving, env={**COLD, "PACELINE_FAULTS": slow}) as program:
        program.wait_for(lambda: len(steps(folder)) == 7)
        first = program.ranks()
        server = warm_server_of(program)
        assert [psutil.Process(first[rank]).ppid() for rank in (0, 1)] == [program.pid] * 2
        assert [psutil.Process(first[rank]).name() for rank in (0, 1)] == ["paceline-r0", "paceline-r1"]
        os.kill(first[1], signal.SIGKILL)
        program.wait_for(lambda: len(steps(folder)) == 23)
        second = program.ranks()
        assert "paceline.launch.warm" in psutil.Process(second[1]).cmdline()
        server.kill()
        os.kill(second[1], signal.SIGKILL)
        ended = program.wait().require(0)
        program.wait_until_gone()
    assert [row["event"] for row in rows(folder / "events.jsonl") if row["event"] in ("start", "resume")] == [
        *("start", "resume", "resume")
    ]
    assert "2 restarts" in ended.err
    assert losses(folder) == losses(plain)


@pytest.mark.long
@pytest.mark.parametrize("also_the_server", [False, True])
def test_kill_9_of_the_launcher_leaves_no_process(tmp_path: Path, also_the_server: bool) -> None:
    """Mutation: a rank dies with the process that forked it, not with the launcher."""
    folder = tmp_path / "run"
    with Program("train", *TINY, "--train.steps", "100000", "--nproc", "2", "--out", str(folder), env=COLD) as program:
        program.wait_for(lambda: len(steps(folder)) >= 2)
        server = warm_server_of(program)
        if also_the_server:
            server.kill()
            reached = len(steps(folder))
            program.wait_for(lambda: len(steps(folder)) > reached)  # ranks live on
        os.kill(program.pid, signal.SIGKILL)
        program.wait_until_gone()
        wait_until_gone(server)


@pytest.mark.long
def test_a_signal_stops_warm_ranks_with_their_state_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Program("train", *TINY, "--train.steps", "100000", "--nproc", "2", "--out", str(folder), env=COLD) as program:
        program.wait_for(lambda: len(steps(folder)) >= 2)
        os.kill(program.pid, signal.SIGTERM)
        ended = program.wait().require(75)
        program.wait_until_gone()
    assert "everything is saved" in ended.out
    assert ended.err == ""
