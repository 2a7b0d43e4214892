"""Labs as they are: namespaces, links with rates, shares of processors, real runs, and nothing of it afterwards.

They take root, iproute2 and a kernel with bridges; elsewhere these tests are skipped, with what is missing.
"""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from program import TINY, Ended, Program, losses, rows, run

from paceline.base.errors import UserError
from paceline.cli.main import main
from paceline.tools.lab import network
from paceline.tools.lab.processors import Controller
from paceline.tools.lab.state import FOLDER, only_lab
from paceline.tools.lab.system import check_machine

pytestmark = pytest.mark.lab

GUEST = (sys.executable, str(Path(__file__).with_name("guest.py")))
STATE = FOLDER / "state.json"
PAYLOAD = 1448 / 1514  # of a full Ethernet frame with TCP's time stamps
TRIES = 3  # where a machine that is shared may have had less to give than was asked for


def lab(*arguments: str, cwd: Path | None = None, deadline_s: float = 60) -> Ended:
    """Runs a lab to its end."""
    return run("lab", *arguments, cwd=cwd, deadline_s=deadline_s)


@contextlib.contextmanager
def running(*arguments: str, cwd: Path | None = None) -> Iterator[Program]:
    """A lab in the background, from the moment it is made."""
    with Program("lab", *arguments, cwd=cwd) as program:
        while program.process.poll() is None and not (state().get("hosts") and state()["pid"] == program.pid):
            time.sleep(0.01)
        yield program


def state() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(STATE.read_text())
        return found
    except (OSError, ValueError):
        return {}


def change(*arguments: str) -> None:
    """`paceline lab set` in this process, which saves the quarter second that one takes to start."""
    assert main(["lab", "set", *arguments]) == 0


@pytest.fixture(autouse=True, scope="module")
def _a_machine_that_makes_labs() -> None:
    ended = lab("--hosts", "2", "--cpu", "0.5", "--rate", "1gbit", "--", "exec", "true")
    if ended.status == 2:
        pytest.skip(ended.err.strip())
    ended.require(0)


@pytest.fixture(autouse=True)
def _leaves_this_machines_network_alone() -> Iterator[None]:
    before = looks_like_ours()
    yield
    assert looks_like_ours() == before


def looks_like_ours() -> list[str]:
    """What of this machine's own network has a name or an address as labs have them, or a rate."""
    commands = (["ip", "-br", "link"], ["ip", "route"], ["ip", "netns"], ["tc", "qdisc"])
    lines = [line for command in commands for line in subprocess.check_output(command, text=True).splitlines()]
    return [line for line in lines if re.search(r"paceline|\bswitch\b|\bto-[a-z]\b|\b10\.0\.0\.|\btbf\b", line)]


class Remains:
    """What a lab consists of, noted while it runs, to look for afterwards."""

    def __init__(self) -> None:
        found = state()
        self.lab = found["pid"]
        keepers = [found["switch"], *found["hosts"].values()]
        self.namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in keepers}
        self.groups = Path(found["groups"])
        assert len(self.namespaces) == len(keepers)
        assert os.readlink("/proc/self/ns/net") not in self.namespaces
        assert sorted(path.name for path in self.groups.iterdir() if path.is_dir()) == sorted(found["hosts"])

    def processes(self) -> list[int]:
        """Those that live in a namespace of the lab. The kernel gives numbers of namespaces anew, so none can be told
        once another lab has begun, which finds out itself whether it can."""
        found: list[int] = []
        if state().get("pid", self.lab) != self.lab:
            return found
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") in self.namespaces:
                    found.append(pid)
        return found

    def wait_until_dead(self) -> None:
        """What the kernel does by itself, for a lab that was killed, too."""
        deadline = time.monotonic() + 60
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.01)

    def require_nothing(self) -> None:
        self.wait_until_dead()
        if state().get("pid", self.lab) == self.lab:  # else another lab has begun meanwhile
            assert not self.groups.exists()
            assert not STATE.parent.exists()


# ---- hosts ----


@pytest.mark.parametrize("num_hosts", [2, pytest.param(4, marks=pytest.mark.long)])
def test_hosts_reach_each_other_and_see_nothing_else(num_hosts: int) -> None:
    names = "abcd"[:num_hosts]
    rates = ",".join(["1gbit", "100mbit", "unlimited", "10mbit"][:num_hosts])
    ended = lab("--hosts", str(num_hosts), "--rate", rates, "--", "exec", *GUEST, "meet").require(0)
    told = {"a0": json.loads(ended.out)}  # rank 0 has standard output for itself
    for line in ended.err.splitlines():
        if line.startswith("["):
            told[line[1:3]] = json.loads(line[5:])
    assert set(told) == {f"{name}{rank}" for rank, name in enumerate(names)}
    for label, facts in told.items():
        assert facts["name"] == label[0]
        assert facts["heard"] == sorted(set(names) - {label[0]})
        assert facts["interfaces"] == ["eth0", "lo"]
        assert facts["processes"] == 2  # itself, and the first one
        assert facts["environment"] == {
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "10.0.0.1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
    table = [line.split() for line in ended.err.splitlines()]
    assert ["b", "10.0.0.2", "100mbit"] in [words[:3] for words in table]
    cores = [core for facts in told.values() for core in facts["cores"]]
    assert all(facts["cores"] for facts in told.values())
    if len(os.sched_getaffinity(0)) >= num_hosts:
        assert len(cores) == len(set(cores)), "each host has cores of its own"


# ---- links ----


class Flow:
    """What host a receives while it goes on."""

    def __init__(self, folder: Path, program: Program):
        self._path, self._program = folder / "received.jsonl", program

    def rows(self, sender: str) -> list[dict[str, Any]]:
        return [row for row in rows(self._path) if row["from"] == sender]

    def rate(self, sender: str, seconds: float = 1.0, skip: int = 3) -> float:
        """Bits/s on the wire in the next seconds, after the windows in which a change may still be under way."""
        begin = len(self.rows(sender)) + skip
        self._program.wait_for(lambda: len(self.rows(sender)) > begin)
        since = self.rows(sender)[begin]["begin_s"]
        self._program.wait_for(lambda: self.rows(sender)[-1]["end_s"] - since >= seconds, seconds + 20)
        counted = self.rows(sender)[begin:]
        received_bytes: int = sum(row["bytes"] for row in counted)
        return received_bytes * 8 / (counted[-1]["end_s"] - since) / PAYLOAD

    def settles_at(self, sender: str, rate: float) -> None:
        """Never more than was asked for; as much, in one of a few tries."""
        for _ in range(TRIES):
            seen = self.rate(sender)
            assert seen < 1.05 * rate
            if seen > 0.95 * rate:
                return
        raise AssertionError(f"{seen / 1e6:.1f} Mbit/s instead of {rate / 1e6:.1f}")


@pytest.mark.long
def test_a_link_keeps_its_rate_and_changes_while_it_is_used(tmp_path: Path) -> None:
    """One lab sees it all: the rate, another one, a cable that is out for a second, and a host that loses power."""
    with running("--hosts", "2", "--rate", "100mbit", "--", "exec", *GUEST, "flow", str(tmp_path), "60") as program:
        flow, remains = Flow(tmp_path, program), Remains()
        program.wait_for(lambda: flow.rows("b"))
        flow.settles_at("b", 100e6)
        change("--host", "b", "--rate", "20mbit")
        flow.settles_at("b", 20e6)
        change("--host", "a", "--rate", "10mbit")  # the slower end of two decides
        flow.settles_at("b", 10e6)
        for host in "ab":
            change("--host", host, "--rate", "unlimited")
        assert flow.rate("b") > 150e6
        change("--host", "b", "--link", "down")
        assert flow.rate("b", 0.5) == 0
        change("--host", "b", "--link", "up")
        program.wait_for(lambda: flow.rows("b")[-1]["bytes"])

        refused = run("lab", "set", "--host", "c", "--rate", "1gbit").require(2)
        assert f"pid {program.pid}) has no host 'c'; it has: a, b" in refused.err
        refused = run("lab", "--hosts", "2", "--", "exec", "true").require(2)
        assert f"a lab runs already (pid {program.pid})" in refused.err

        change("--host", "b", "--link", "down")
        os.kill(psutil.Process(state()["hosts"]["b"]).ppid(), signal.SIGKILL)  # `unshare`, which ends the host
        assert flow.rate("b", 0.5) == 0
        assert not any(row["is_over"] for row in flow.rows("b"))  # a host without power closes no connection
        assert "host b is gone" in run("lab", "set", "--host", "b", "--rate", "1gbit").require(2).err
        (tmp_path / "stop").touch()
        ended = program.wait().require(1)
        assert "host b is gone" in ended.err
    remains.require_nothing()


@pytest.mark.long
def test_each_of_four_hosts_has_the_link_that_was_asked_for_it(tmp_path: Path) -> None:
    rates = {"b": 20e6, "c": 50e6, "d": 100e6}
    asked = ("--hosts", "4", "--rate", "unlimited,20mbit,50mbit,100mbit")
    with running(*asked, "--", "exec", *GUEST, "flow", str(tmp_path), "60") as program:
        flow, remains = Flow(tmp_path, program), Remains()
        program.wait_for(lambda: all(flow.rows(sender) for sender in rates))
        for sender, rate in rates.items():  # while the others send, too
            flow.settles_at(sender, rate)
        program.process.send_signal(signal.SIGINT)
        program.wait().require(130)
    remains.require_nothing()


@pytest.mark.long
@pytest.mark.parametrize("rate", ["10mbit", "1gbit"])
def test_hosts_that_send_to_one_share_its_link(tmp_path: Path, rate: str) -> None:
    bits = {"10mbit": 10e6, "1gbit": 1e9}[rate]
    with running("--hosts", "3", "--rate", rate, "--", "exec", *GUEST, "flow", str(tmp_path), "60") as program:
        flow = Flow(tmp_path, program)
        program.wait_for(lambda: flow.rows("b") and flow.rows("c"))
        time.sleep(1)
        seen = []
        for _ in range(TRIES):
            flow.rate("b", 3)
            until = min(flow.rows(sender)[-1]["end_s"] for sender in "bc")
            counted = [row for sender in "bc" for row in flow.rows(sender) if until - 2.5 < row["end_s"] <= until]
            seen.append(sum(row["bytes"] for row in counted) * 8 / 2.5 / PAYLOAD)
            assert seen[-1] < 1.1 * bits  # the windows' edges
            if seen[-1] > 0.95 * bits:
                return
    raise AssertionError(f"{max(seen) / 1e6:.1f} Mbit/s")


# ---- processors ----


@pytest.mark.long
@pytest.mark.alone
def test_a_host_has_its_share_of_the_processors() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor")
    with running("--hosts", "2", "--cpu", "0.6,0.35", "--", "exec", *GUEST, "burn", "0.5") as program:

        def share(label: str, asked: float) -> None:
            best = 0.0
            for _ in range(2 * TRIES):
                number = len(shares(program, label))
                program.wait_for(lambda number=number: len(shares(program, label)) > number + 1)
                best = max(best, shares(program, label)[-1])
                assert best < 1.05 * asked
                if best > 0.95 * asked:
                    return
            if os.getloadavg()[0] > len(os.sched_getaffinity(0)):
                pytest.skip(f"this machine is too busy to give {asked} of a core; it gave {best:.3f}")
            raise AssertionError(f"{best} of a core instead of {asked}")

        share("a", 0.6)
        share("b", 0.35)
        program.process.send_signal(signal.SIGINT)
        program.wait().require(130)


def shares(program: Program, host: str) -> list[float]:
    """What a host has told of the processor's time it had."""
    said = program._read(program._out if host == "a" else program._err)
    lines = [line.removeprefix("[b1] ") for line in said.splitlines(keepends=True)]
    return [json.loads(line)["share"] for line in lines if line.startswith("{") and line.endswith("\n")]


# ---- runs ----


@pytest.mark.long
def test_two_hosts_train_as_one_machine_does(tmp_path: Path) -> None:
    ended = lab("--hosts", "2", "--rate", "1gbit", "--", "train", *TINY, "--out", "run", cwd=tmp_path).require(0)
    start, *_, end = rows(tmp_path / "run" / "events.jsonl")
    assert start["hosts"] == ["a", "b"]
    assert end["reason"] == "horizon reached"
    assert len(losses(tmp_path / "run")) == 40
    assert sorted(path.name for path in (tmp_path / "run" / "ranks").iterdir()) == [
        "rank-00000.log",
        "rank-00001.log",
    ]
    assert "1 thread" in ended.out  # one core each, and so one thread
    assert "[b1]" not in ended.out


def in_terminal(command: list[str], cwd: Path, is_time: Callable[[], bool]) -> tuple[int, str]:
    """Runs a command in the foreground of a terminal, types Ctrl-C when it is time, and returns status and output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execv(command[0], command)
    said, is_typed, deadline = b"", False, time.monotonic() + 60
    os.set_blocking(terminal, False)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        with contextlib.suppress(OSError):
            said += os.read(terminal, 1 << 16)
        if is_time() and not is_typed:
            is_typed = True
            os.write(terminal, b"\x03")
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        said += os.read(terminal, 1 << 20)
    os.close(terminal)
    return os.waitstatus_to_exitcode(ended[1]), said.decode(errors="replace")


@pytest.mark.long
def test_ctrl_c_reaches_every_rank_once_and_the_run_is_saved(tmp_path: Path) -> None:
    """In a terminal, which sends it to all of its foreground: twice to a rank would end it at once, unsaved."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "paceline", "lab", "--hosts", "2", "--nproc", "2", "--"]
    command += ["train", *TINY, "--train.steps", "100000", "--out", str(folder)]
    seen: list[Remains] = []

    def is_training() -> bool:
        if len(rows(folder / "metrics.jsonl")) < 3:
            return False
        seen.append(Remains()) if not seen else None
        return True

    status, said = in_terminal(command, tmp_path, is_training)
    assert status == 75, said
    assert "━" in said  # rank 0 has the terminal, and its live line
    end = rows(folder / "events.jsonl")[-1]
    assert (end["event"], end["reason"]) == ("end", "SIGINT on rank 0, 1, 2, 3")
    assert rows(folder / "events.jsonl")[0]["hosts"] == ["a", "a", "b", "b"]
    seen[0].require_nothing()


def test_ctrl_c_while_the_hosts_are_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal sends it to the tools that make them, too, if they are in its foreground: here to a slow one."""
    tool = tmp_path / "tc"
    tool.write_text(f'#!/bin/sh\ntouch {tmp_path}/begun\nsleep 0.3\nexec {shutil.which("tc")} "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = [sys.executable, "-m", "paceline", "lab", "--hosts", "1", "--rate", "1gbit", "--", "exec", "sleep", "60"]
    status, said = in_terminal(command, tmp_path, (tmp_path / "begun").exists)
    assert status == 130, said
    assert "error" not in said


def test_what_cannot_be_set_is_refused_and_a_note_nobody_can_read_is_no_obstacle(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with subprocess.Popen(["sleep", "20"]) as process, only_lab():
        assert main(["lab", "set", "--host", "b", "--link", "down"]) == 2
        assert f"the lab (pid {os.getpid()}) is still being made" in capfd.readouterr().err
        controller = Controller.find()
        controller.open()
        group = controller.make("b", 0.5)
        (group / "cgroup.procs").write_text(str(process.pid))
        STATE.write_text('{"pid": 1, "hosts": {}, "groups": "", "of_another_version": 3}')
        (STATE.parent / "scratch").mkdir()
        (STATE.parent / "scratch" / "file").touch()
    assert process.returncode == -signal.SIGKILL
    assert not group.parent.exists()
    assert not STATE.parent.exists()


def test_a_terminal_that_cannot_be_written_ends_no_lab() -> None:
    command = ("sh", "-c", 'exec "$0" -m paceline "$@" 2> /dev/full', sys.executable)
    until = time.monotonic() + 200
    status = 2
    while status == 2 and time.monotonic() < until:  # 2: another lab runs
        with Program("lab", "--hosts", "1", "--", "exec", "echo", "made", command=command) as program:
            ended = program.wait()
        status = ended.status
    assert ended.require(0).out == "made\n"


def test_a_machine_whose_tcp_cannot_be_chosen_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that offers no choice of congestion control. Finds: a choice written all the same."""
    monkeypatch.setattr(network, "_TCP", tmp_path)
    network._control_congestion(os.getpid())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("next_one", [("--", "exec", "true"), pytest.param(("clean",), marks=pytest.mark.long)])
def test_a_killed_lab_dies_whole_and_the_next_one_cleans_up(next_one: tuple[str, ...]) -> None:
    with running("--hosts", "2", "--cpu", "0.5", "--", "exec", "sh", "-c", "sleep 600 & sleep 600") as program:
        remains = Remains()
        program.wait_for(lambda: len(remains.processes()) >= 11, 60)  # sleeps, shells, first ones, unshare, the switch
        os.kill(program.pid, signal.SIGKILL)
        remains.wait_until_dead()
    if state().get("pid") == remains.lab:  # else another lab has cleaned up already
        assert remains.groups.exists()
        assert "no lab runs" in run("lab", "set", "--host", "b", "--rate", "1gbit").require(2).err
        ended = lab(*next_one).require(0)
        if next_one == ("clean",):
            assert ended.out.startswith(f"removed {remains.groups}, {STATE.parent}/")
            assert lab("clean").require(0).out == "nothing was left of a lab\n"
    remains.require_nothing()


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ("exit 75", 75, ""),
        ("[ $RANK = 1 ] && exit 75; exit 0", 75, ""),
        ("[ $RANK = 1 ] && kill -9 $$; exit 0", 1, "rank 1 on host b was killed by SIGKILL"),
        (
            "[ $RANK = 0 ] && exit 1; [ $RANK = 1 ] && exit 2; sleep 600",
            2,
            "rank 2 (c) did not end after the failure of another and was killed",
        ),
    ],
)
def test_the_exit_status_is_that_of_the_ranks(script: str, status: int, says: str) -> None:
    ended = lab("--hosts", "3", "--", "exec", "sh", "-c", script).require(status)
    assert says in ended.err


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hosts", "2"], "nothing to run on the hosts"),
        (["--hosts", "2", "train"], "comes after `--`: paceline lab ... -- train"),
        (["--hosts", "2", "train", "--preset", "tiny"], "comes after `--`: paceline lab ... -- train"),
        (["exec", "--", "true"], "comes after `--`: paceline lab ... -- exec"),
        (["--hosts", "27", "--", "exec", "true"], "--hosts is 27"),
        (["--hots", "2", "--", "exec", "true"], "did you mean '--hosts'"),
        (["--rate", "fast", "--", "exec", "true"], "'fast' is not a rate"),
        (["--nproc", "2", "--", "exec", "true"], "exec runs one process a host"),
        (["--", "trian"], "did you mean 'train'"),
        (["--", "exec", "no-such-program"], "there is no program 'no-such-program'"),
        (["--", "lab", "--", "train"], "'lab' is neither"),
        (["set", "--rate", "1gbit"], "which host?"),
        (["set", "--host", "b"], "nothing to change on host b"),
        (["clean", "--all"], "takes no options"),
    ],
)
def test_what_cannot_be_is_refused(capfd: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["lab", *arguments]) == 2
    assert says in capfd.readouterr().err


def test_the_help_of_a_verb_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["lab", "--hosts", "2", "--", "report", "--help"])
    assert left.value.code == 0
    assert capfd.readouterr().out.count("usage: paceline report") == 1


def test_the_help_of_a_script_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a script whose own option is -h runs here, as root and with the machine's network."""
    monkeypatch.setattr("paceline.cli.lab.run_lab", lambda *arguments: 7)
    assert main(["lab", "--", "train", "--out", "x", "--", "script.py", "-h", "128"]) == 7


def test_another_user_than_root_is_told_so() -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="takes root, and this is user 65534"):
            check_machine()
    finally:
        os.seteuid(0)


def test_a_missing_program_is_named_with_its_package(tmp_path: Path) -> None:
    ended = run("lab", "--", "train", env={"PATH": str(tmp_path)}).require(2)
    assert "needs the program `ip`, which is not here; try: apt install iproute2" in ended.err


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("sys_admin", "could not make a network namespace: unshare: unshare failed: Operation not permitted"),
        ("net_admin", "could not make a bridge: RTNETLINK answers: Operation not permitted"),
    ],
)
def test_a_root_without_rights_is_told_which_it_lacks(lacks: str, says: str) -> None:
    """As in a container that was not started with --privileged."""
    weaker = ("setpriv", f"--bounding-set=-{lacks}", f"--inh-caps=-{lacks}", sys.executable, "-m", "paceline")
    with Program("lab", "--hosts", "1", "--", "exec", "true", command=weaker) as program:
        ended = program.wait().require(2)
    assert says in ended.err
    assert "--privileged" in ended.err
