"""What the coordinator of several hosts decides, without hosts."""

import fcntl
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.base import clock
from paceline.base.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER, RunError, UserError
from paceline.base.process import Status
from paceline.launch import agent, coordinator
from paceline.launch.agent import Greeting, HostRanks, Silence, State
from paceline.launch.attempts import Attempts
from paceline.launch.coordinator import Hosts, Job
from paceline.launch.ends import how_it_ended
from paceline.launch.nodes import Node, check_answers, order_for, ranked
from paceline.launch.options import NamedHost
from paceline.launch.restarts import Records
from paceline.launch.signals import StopSignals
from paceline.launch.ssh import Connection, Ssh


class Agent:
    """A connection that has reported this state."""

    def __init__(self, state: State):
        self.state = state


def node(name: str, newest: int | None) -> Node:
    made = Node(NamedHost(name, "1"))
    made.connection = Agent(State(num_ranks=1, newest=newest))  # type: ignore[assignment]
    return made


def test_the_newest_checkpoint_has_rank_0_then_the_last_one_that_had_it_then_the_first_host() -> None:
    """Mutation: the host with an older checkpoint has rank 0, and the run loses steps."""
    a, b, c = node("a", None), node("b", 20), node("c", 20)
    assert [each.name for each in ranked([a, b, c], None)] == ["b", "a", "c"]
    assert [each.name for each in ranked([a, b, c], c)] == ["c", "a", "b"]
    assert [each.name for each in ranked([a, b, c], a)] == ["b", "a", "c"]
    assert ranked([a], None) == [a]


def test_hosts_that_cannot_be_used_are_not_taken_for_one(capfd: pytest.CaptureFixture[str]) -> None:
    """Finds: two hosts that ssh reached at no address, for which `--min-hosts` refuses the run: "name it once"."""
    hosts = [node(name, None) for name in "abc"]
    for each, address in zip(hosts, ("10.0.0.1", "", ""), strict=True):
        each.connection.greeting = Greeting("", address)  # type: ignore[union-attr]
        each.problem = "" if address else "ssh reached it at ''"
    check_answers(hosts, 1)
    assert capfd.readouterr().err.count("warning: cannot start on ") == 2
    hosts[1].problem, hosts[1].connection.greeting = "", Greeting("", "10.0.0.1")  # type: ignore[union-attr]
    with pytest.raises(UserError, match="two names lead to one host"):
        check_answers(hosts, 1)


@pytest.mark.parametrize(
    ("is_lost", "has_failed", "makes_room", "order"),
    [(0, 0, 0, ""), (0, 0, 1, "save"), (0, 1, 1, "fail"), (1, 0, 1, "end"), (1, 1, 0, "end")],
)
def test_what_ranks_are_told(is_lost: int, has_failed: int, makes_room: int, order: str) -> None:
    """Mutation: ranks whose peers are gone are asked to save, and wait for them."""
    assert order_for(bool(is_lost), bool(has_failed), bool(makes_room)) == order


def test_a_folder_that_another_run_writes_does_not_hold_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says who writes there. Finds: `launch` of a run that runs hangs, and hears no signal."""
    monkeypatch.setattr(agent, "_COPY_ENDS_S", 0.1)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        agent._wait_for_writer(tmp_path)


def test_a_pause_of_this_process_is_no_silence_of_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: a launcher that slept takes all hosts for lost when it wakes up."""
    now = time.monotonic()
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    silence = Silence(13.0)
    now += 60
    assert not silence.is_too_long(), "this process slept"
    for second in range(1, 16):
        now += 1
        assert silence.is_too_long() == (second > 12), "a second of the pause counts"
    silence.heard()
    assert not silence.is_too_long()


class Obedient:
    """A connection to a host whose ranks end at once, in each attempt with the next of these exit statuses."""

    def __init__(self, *codes: int):
        self.codes, self.greeting = list(codes), "hello"
        self.state = State(num_ranks=1, port=1, newest=5)

    def send(self, message: dict[str, Any] | None = None) -> None:
        if place := (message or {}).get("place"):
            code, rank = self.codes.pop(0), str(place["first_rank"])
            began_at = 5 if code == EXIT_RESUMABLE else None
            reports = {rank: asdict(Status(code))}
            self.state = replace(self.state, attempt=place["attempt"], began_at=began_at, reports=reports)

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        self.greeting = ""

    def wait(self, until_s: float) -> None:
        assert not self.greeting


@pytest.mark.parametrize(("least", "status"), [(1, EXIT_FAILED), (2, EXIT_USER)])
def test_a_host_that_comes_back_unfit_does_not_end_the_others(least: int, status: int) -> None:
    """Finds: a driver that is not loaded after a reboot, and the run of the healthy hosts is refused at night."""
    job = Job(command=[], run=Path("run"), least=least, max_restarts=0, grace_s=1.0, timeout_s=1.0)
    signals = cast(StopSignals, SimpleNamespace(first=None, is_urgent=False))
    crew = Hosts([NamedHost(name, "1") for name in "abc"], job, Ssh("false", "python", "/"), signals)
    a, b, c = crew.nodes
    c.is_refused = True
    crew._have_answered = True
    healthy = Obedient(EXIT_RESUMABLE, EXIT_USER, EXIT_RESUMABLE)
    a.connection = cast(Connection, healthy)
    b.connection = cast(Connection, Obedient(EXIT_RESUMABLE))
    for each in (a, b):
        each.has_task = True
    assert crew.run(0)
    b.connection = cast(Connection, Obedient(EXIT_USER))
    ends = crew.run(1)
    assert ends
    assert how_it_ended(ends).status == status
    if status == EXIT_FAILED:
        assert ends.lost == ("b",)
        assert crew.run(2)
        assert not healthy.codes
        assert [each.name for each in crew._members] == ["a"]


class Training(Obedient):
    """A connection to a host whose rank has begun to train, and is asked to save. `leads`: then the host is lost; else
    its rank waits for the others, and ends."""

    def __init__(self, signals: SimpleNamespace, leads: bool):
        super().__init__()
        self.signals, self.leads = signals, leads

    def send(self, message: dict[str, Any] | None = None) -> None:
        if place := (message or {}).get("place"):
            self.state = replace(self.state, attempt=place["attempt"], is_running=True)
            self.state = replace(self.state, began_at=5 if self.leads else None)
        elif "order" in (message or {}):
            reports = {"1": asdict(Status(1, "rank 1 lost the other ranks"))}
            self.state = replace(self.state, is_running=False, reports=reports, exits={"1": 1})
        elif "signal" in (message or {}):
            self.is_asked = True

    def is_lost(self) -> bool:
        if self.state.is_running:
            self.signals.first = signal.SIGINT
        return self.leads and hasattr(self, "is_asked")

    def cut(self) -> None:
        self.greeting = ""

    def status(self) -> int:
        return -signal.SIGKILL

    def problem(self, _: bool) -> str:
        return ""


def test_the_loss_of_rank_0s_host_amid_the_last_save_is_a_failure() -> None:
    """It said "stopped by SIGINT before training began", and ended with 75: everything is saved."""
    job = Job(command=[], run=Path("run"), least=2, max_restarts=3, grace_s=1.0, timeout_s=1.0)
    signals = SimpleNamespace(first=None, is_urgent=False, passed_on=signal.SIGINT)
    crew = Hosts([NamedHost(name, "1") for name in "ab"], job, Ssh("false", "python", "/"), cast(StopSignals, signals))
    crew._have_answered = True
    for each, leads in zip(crew.nodes, (True, False), strict=True):
        each.connection, each.has_task = cast(Connection, Training(signals, leads)), True
    attempts = Attempts(crew.run, crew, job.run, job.max_restarts, job.grace_s, cast(StopSignals, signals))
    with pytest.raises(RunError, match=r"rank 1 lost the other ranks.*The newest checkpoint is of step 5"):
        attempts.run()


class Leaving(Obedient):
    """A connection to a host whose rank fails at once; then the connection ends."""

    num_looks = 0

    def is_lost(self) -> bool:
        self.num_looks += bool(self.state.reports)
        return self.num_looks > 1

    def cut(self) -> None:
        self.greeting = ""

    def status(self) -> int:
        return EXIT_FAILED

    def problem(self, _: bool) -> str:
        return ""


class Waiting(Obedient):
    """A connection to a host whose rank ends when it is told to."""

    def send(self, message: dict[str, Any] | None = None) -> None:
        if place := (message or {}).get("place"):
            self.rank = str(place["first_rank"])
            self.state = replace(self.state, attempt=place["attempt"], is_running=True)
        elif "order" in (message or {}):
            reports = {self.rank: asdict(Status(1, "lost the other ranks"))}
            self.state = replace(self.state, is_running=False, reports=reports, exits={self.rank: 1})


@pytest.mark.parametrize("leader", ["a", "b"])
def test_a_host_whose_connection_ends_after_its_ranks_is_lost(leader: str) -> None:
    """Finds: an AssertionError that ends the run where it had just come back; else rank 0 counts as hanging."""
    job = Job(command=[], run=Path("run"), least=1, max_restarts=0, grace_s=1.0, timeout_s=1.0)
    signals = cast(StopSignals, SimpleNamespace(first=None, is_urgent=False))
    crew = Hosts([NamedHost(name, "1") for name in "ab"], job, Ssh("false", "python", "/"), signals)
    crew._have_answered = True
    staying, leaving = Waiting(), Leaving(EXIT_FAILED)
    crew._trained = [cast(Connection, staying)]
    for each, connection in zip(crew.nodes, (staying, leaving), strict=True):
        connection.state = replace(connection.state, newest=5 + (each.name == leader))
        each.connection, each.has_task = cast(Connection, connection), True
    ends = crew.run(0)
    crew._copier.stop()
    assert ends
    assert ends.lost == ("b",)


def test_a_host_that_comes_back_hears_nothing_before_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a sign of life amid the new connection, which its agent reads in place of the task, and it fails."""
    sent: list[object] = []
    monkeypatch.setattr(coordinator, "Connection", lambda *_: SimpleNamespace(send=sent.append))

    class Watched(Node):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "connection" and value:
                crew.send_all()  # as the thread does that tells hosts each second that the coordinator lives

    job = Job(command=[], run=Path("run"), least=1, max_restarts=0, grace_s=1.0, timeout_s=1.0)
    signals = cast(StopSignals, SimpleNamespace(first=None, is_urgent=False))
    crew = Hosts([], job, Ssh("false", "python", "/"), signals)
    back = Watched(NamedHost("a", "1"))
    back.has_task, crew.nodes, crew._members = True, [back], [back]
    crew._connect(back)
    assert back.connection
    assert not sent


def test_an_agent_reports_at_once_where_its_ranks_began_to_train(tmp_path: Path) -> None:
    """Its host may be lost before they end."""
    records, posts = Records(tmp_path), list[dict[str, Any]]()
    told = SimpleNamespace(was_silent=False, order="save", post=lambda **changed: posts.append(changed))
    for _ in range(3):
        assert agent._order(cast(agent.Coordinator, told), cast(HostRanks, None), records) == "save"
        (tmp_path / "events.jsonl").write_text('{"event": "resume", "step": 5}\n')
    assert posts == [{"began_at": 5}]
