"""A host at the other end of a connection, with a shell in place of ssh and its agent."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.launch import ssh
from paceline.launch.agent import PREFIX

GREETING = """echo 'paceline-agent {"version": "0.0", "address": "10.0.0.1", "more": 1}'; """


def ended(script: str) -> ssh.Connection:
    host = ssh.Connection("a", ["bash", "-c", script], ssh.Output())
    deadline = time.monotonic() + 60
    while host.status() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return host


def test_an_agent_of_another_version_is_known_by_its_version() -> None:
    """A field that this version lacks ended the reader with a traceback, and the launcher waited 40 s."""
    assert "paceline 0.0 is there" in ended(GREETING).problem(needs_address=True)


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (f"{sys.executable} -I -S", r".*No module named 'paceline.*; install the same paceline there"),
        ("/nonexistent", ".*/nonexistent: .*; name the interpreter"),
        (__file__, ".*Permission denied; name an interpreter that you may run there by --python"),
    ],
)
def test_a_host_without_this_paceline_is_told_what_to_do(python: str, says: str) -> None:
    assert re.match(says, ended(f"exec {python} -m paceline.launch.agent").problem(needs_address=True))


def test_what_a_shell_prints_at_its_start_does_not_hide_the_agent() -> None:
    """Finds: `echo -n` in .bashrc, and the launcher waits 40 s for an answer that has come."""
    host = ended(f"printf hello; exec {sys.executable} -m paceline.launch.agent < /dev/null")
    assert host.greeting


def test_what_ranks_start_reads_none_of_the_messages_for_the_agent() -> None:
    """Finds: ffmpeg without -nostdin in a script, and the host is silent, or never hears of the end."""
    code = """
import subprocess, time
from paceline.launch.agent import Coordinator
coordinator = Coordinator()
subprocess.run(["cat"], timeout=20)
print("read", flush=True)
while coordinator.order != "save":
    time.sleep(0.01)
"""
    environment = {**os.environ, "PACELINE_AGENT_ADDRESS": "127.0.0.1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdin
        assert agent.stdout
        try:
            assert agent.stdout.readline() == b"read\n"
            agent.stdin.write(b'{"order": "save"}\n')
            agent.stdin.flush()
            assert agent.wait(60) == 0
        finally:
            agent.kill()


def test_the_state_that_a_host_reports_last_is_its_last_state() -> None:
    """Finds: a report of each second that reads the records of a slow disk while the ranks end, and comes after their
    ends: the coordinator then tells ranks of other hosts that these have failed."""
    code = """
import threading, time
from paceline.launch.agent import Coordinator
begun = threading.Event()
class Records:
    def last_step(self):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            time.sleep(0.2)
        return 1
    def newest_checkpoint(self): ...
coordinator = Coordinator()
coordinator.post(Records(), is_running=True)
begun.wait()
coordinator.post(is_running=False)
time.sleep(0.4)
"""
    environment = {**os.environ, "PACELINE_AGENT_ADDRESS": "127.0.0.1"}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as agent:
        assert agent.stdout
        states = [json.loads(line.removeprefix(PREFIX)) for line in agent.stdout]
    is_running = [state["is_running"] for state in states if state]
    assert is_running.index(False) == is_running.count(True)


def test_a_follower_of_the_records_holds_no_connection_open(tmp_path: Path) -> None:
    """Finds: a slow tracker, and `launch` says of the host that it does not end."""
    stand_in = tmp_path / "interpreter"
    stand_in.write_text("#!/bin/sh\necho $$ >&2; exec sleep 30\n")
    stand_in.chmod(0o700)
    code = f"""
import sys
from pathlib import Path
from paceline.launch.agent import Coordinator
from paceline.record.config import TrackConfig
from paceline.record.console import Console
from paceline.record.folder import create
from paceline.train.follower import Follower
Coordinator()
sys.executable = {str(stand_in)!r}
Follower(TrackConfig(to="tensorboard"), Console(0)).start(create(Path({str(tmp_path / "run")!r})))
"""
    environment = {**os.environ, "PACELINE_AGENT_ADDRESS": "127.0.0.1"}
    pipe, log = subprocess.PIPE, tmp_path / "run" / "track" / "follower.log"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe
    ) as agent:
        assert agent.stderr
        assert agent.wait(60) == 0
        begun_s = time.monotonic()
        said = agent.stderr.read().decode()  # to the end of all who have it
        assert time.monotonic() - begun_s < 15, said
    while not log.read_text().endswith("\n"):
        time.sleep(0.01)
    os.kill(int(log.read_text()), signal.SIGKILL)


def test_one_host_needs_no_ipv4_address() -> None:
    found = ended(GREETING.replace("10.0.0.1", "fd00::1").replace("0.0", ssh.__version__, 1))
    assert found.problem(needs_address=False) == ""
    assert "IPv4" in found.problem(needs_address=True)


def test_what_a_command_leaves_behind_does_not_hold_the_launcher() -> None:
    assert ended(f"{GREETING} setsid sleep 600 & exit 0").status() == 0


def test_a_terminal_that_is_stopped_is_no_silence_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: Ctrl-S, or a pager that nobody scrolls, for 14 s, and all hosts are lost."""
    goes_on, kept = threading.Event(), os.write
    monkeypatch.setattr(ssh.os, "write", lambda fd, data: goes_on.wait(60) if fd == 1 else kept(fd, data))
    host = ssh.Connection("a", ["bash", "-c", f"{GREETING} echo 'step 1'; sleep 600"], ssh.Output())
    while not host._prints:
        time.sleep(0.01)
    host.silence.most_s = 0.0
    assert not host.is_lost()
    goes_on.set()
    while host._prints:
        time.sleep(0.01)
    assert host.is_lost()  # its silence counts from here
    host.cut()


def test_what_two_hosts_say_at_one_time_is_printed_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: a line that is left out for the whole run, because another host printed it once: its disk is full, too."""
    output, now = ssh.Output(), 100.0
    monkeypatch.setattr(ssh.time, "monotonic", lambda: now)
    for host in ("a", "b"):
        output.print(host, b"warning: disk full\n")
    now += 60
    output.print("b", b"warning: disk full\n")
    assert capfd.readouterr().err == "a: warning: disk full\nb: warning: disk full\n"
    assert len(output._recent) == 1
