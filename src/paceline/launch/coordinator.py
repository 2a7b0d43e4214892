"""`paceline launch`: one coordinator starts a run on several hosts by ssh, watches it, and restarts it with the hosts
that answer. An agent on each host (agent.py) starts its ranks and reports how they end; everything is decided here.

Between attempts each host waits. The one with the newest checkpoint gets rank 0; the coordinator tells every host its
place. During an attempt the others get copies of each new checkpoint (copies.py). A host that is lost ends the attempt;
one that comes back is taken in when the ranks have saved.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.base.errors import EXIT_FAILED, EXIT_USER, RunError
from paceline.base.net import LOOPBACK
from paceline.base.process import Status, say
from paceline.launch.agent import LIFE_EVERY_S, Greeting, Task
from paceline.launch.attempt import Place
from paceline.launch.attempts import Attempts
from paceline.launch.ends import Ends
from paceline.launch.job import JOB
from paceline.launch.nodes import Copier, Node, check_answers, order_for, ranked, too_few
from paceline.launch.options import NamedHost
from paceline.launch.signals import StopSignals
from paceline.launch.ssh import Connection, Output, Ssh

_LOOK_EVERY_S = 0.05
_TRY_AGAIN_S = 3.0  # after a host was lost
_TAKE_IN_EVERY_S = 10.0  # a host that comes and goes must not keep the others from training
_REFUSED_S = 2.0  # for other hosts to say that they refuse the command, too
_END_S = 10.0  # for a command to end when its ranks have had their time to save
_PASSED_ON = ("PACELINE_", "OMP_", "NCCL_", "GLOO_", "WANDB_", "MLFLOW_", "TRACKIO_")  # beginnings of variables


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `launch` runs."""

    command: Sequence[str]  # train or resume, with its options, perhaps with `--` and a script
    run: Path  # the run folder, on each host
    least: int  # hosts, to train
    max_restarts: int
    grace_s: float  # for ranks to save
    timeout_s: float  # to wait for hosts that were lost


class _Refused(Exception):
    """A host has printed what the user must change."""


def launch(hosts: Sequence[NamedHost], job: Job, ssh: Ssh) -> int:
    """Runs the job on all hosts, and returns the exit status. Nothing of it runs on any host afterwards. Raises
    UserError if a host cannot be used, RunError if the run fails, Stopped or KeyboardInterrupt after a signal."""
    with StopSignals() as signals, _open(hosts, job, ssh, signals) as crew:
        try:
            status = Attempts(crew.run, crew, job.run, job.max_restarts, job.grace_s, signals).run()
        except _Refused:
            return EXIT_USER
        except RunError:
            crew.conclude(EXIT_FAILED)
            raise
        crew.conclude(status)
        return status


class Hosts:
    """All hosts of a run, as one crew of ranks."""

    def __init__(self, hosts: Sequence[NamedHost], job: Job, ssh: Ssh, signals: StopSignals):
        self._job, self._ssh, self._signals, self._output = job, ssh, signals, Output()
        self.nodes = [Node(host) for host in hosts]
        self._members: list[Node] = []  # of the latest attempt, in the order of their ranks
        self._name = uuid.uuid4().hex
        self._num_passed_on = 0  # signals
        self._took_in_s = float("-inf")
        self._trained: list[Connection | None] = []  # of the hosts that trained last
        self._reached = 0  # the last step that rank 0 recorded
        self._began_at: int | None = None  # the step at which the latest attempt began to train
        self._copier = Copier(ssh, job.run)
        self._have_answered = False  # all hosts, each with a greeting or a problem: the command may begin

    # ---- what Attempts asks for ----

    def last_step(self) -> int:
        leaders = self._members[:1] if self._members and self._members[0].connection else self.nodes
        self._reached = max(self._reached if leaders is self.nodes else 0, *(node.state.step for node in leaders), 0)
        return self._reached

    def began_at(self) -> int | None:
        return self._began_at

    def newest_checkpoint(self) -> int | None:
        newest = max(node.newest for node in self.nodes)
        return None if newest < 0 else newest

    def log_of(self, rank: int) -> Path | None:
        return self._job.run / "ranks" / f"rank-{rank:05d}.log"

    def close(self, what: str, was_said: bool) -> None:
        if self._members and (connection := self._members[0].connection):
            connection.send({"close": [what, was_said]})

    def host_of(self, rank: int | None) -> str:
        names = [node.name for node in self._members for _ in range(node.state.num_ranks)]
        return names[rank] if rank is not None and rank < len(names) else " and ".join(n.name for n in self._members)

    def run(self, attempt: int) -> Ends | None:
        """Raises UserError, RunError or _Refused if there are too few hosts."""
        members = self._gather()
        if not members:
            return None
        self._place(members, attempt)
        lost: list[Node] = []
        step_then = max(self._members[0].state.step, self._members[0].newest)
        makes_room, self._began_at = False, None
        running = list(members)
        while running:
            self._look()
            told = [node.state.began_at for node in members if node.state.attempt == attempt]
            self._began_at = next((step for step in told if step is not None), self._began_at)
            lost += [node for node in running if node.connection is None]
            running = [node for node in running if node.connection and not node.has_ended(attempt)]
            ended = [node for node in members if node not in running and node not in lost]
            makes_room = makes_room or (bool(running) and not lost and self._should_take_in(members, step_then))
            order = order_for(bool(lost), any(not node.ended_well() for node in ended), makes_room)
            for node in running:
                if order != node.order and node.connection:
                    node.order = order
                    node.connection.send({"order": order})
        lost += [node for node in members if node.connection is None and node not in lost]  # after its ranks' end
        if unfit := self._leave_out(members, lost):
            return Ends(ranks=range(0), reports={}, exits={}, lost=tuple(node.name for node in unfit))
        return self._outcome(members, lost, makes_room)

    # ---- between attempts ----

    def _gather(self) -> list[Node]:
        """Returns the hosts of the next attempt, in the order of their ranks; none after a signal."""
        began_s, has_said, is_first = time.monotonic(), False, not self._members
        while not self._signals.first:
            self._look()
            awaited = self.nodes if is_first else self._members
            coming = [node for node in awaited if node.connection and not node.is_ready]
            ready = [node for node in self.nodes if node.is_ready]
            waited_s = time.monotonic() - began_s
            if not coming and len(ready) >= self._job.least:
                return ranked(ready, self._members[0] if self._members else None)
            if not coming and (is_first or self._job.least == len(self.nodes) or waited_s > self._job.timeout_s):
                raise too_few(self.nodes, self._job.least, self._job.timeout_s if self._members else 0.0)
            if waited_s > _TRY_AGAIN_S and not coming and not has_said:
                has_said = True
                say(f"waiting for hosts: {len(ready)} of {len(self.nodes)} are here, {self._job.least} must be")
        return []

    def _place(self, members: list[Node], attempt: int) -> None:
        if not self._members or members[0] is not self._members[0]:
            self._copier.stop()  # its target may have rank 0 now
        if attempt and len(members) < len(self.nodes):
            names = ", ".join(node.name for node in members)
            say(f"training on {len(members)} of {len(self.nodes)} hosts: {names}")
        self._members = members
        world_size, first_rank = sum(node.state.num_ranks for node in members), 0
        for node in members:
            assert node.connection
            address, port = members[0].address, members[0].state.port
            place = Place(first_rank, node.state.num_ranks, world_size, address, port, None, attempt)
            first_rank += node.state.num_ranks
            node.order = ""
            node.connection.send({"place": asdict(place)})

    # ---- all the time ----

    def _look(self) -> None:
        """Looks after the connections, signals and copies, for a moment."""
        for node in self.nodes:
            if node.connection is None:
                self._connect(node)
            elif node.connection.is_lost():
                self._drop(node, node.connection)
            elif node.connection.greeting and not (node.is_refused or node.has_task):
                self._give_task(node, node.connection, node.connection.greeting)
        if not self._have_answered and all(not node.connection or node.connection.greeting for node in self.nodes):
            check_answers(self.nodes, self._job.least)
            self._have_answered = True
        wanted = (self._signals.first is not None) + self._signals.is_urgent
        if wanted > self._num_passed_on:
            for _ in range(wanted - self._num_passed_on):
                self.send_all({"signal": self._signals.passed_on.name})
            self._num_passed_on = wanted
        if self._members:
            self._copier.look(self.nodes, self._members[0])
        time.sleep(_LOOK_EVERY_S)

    def send_all(self, message: dict[str, object] | None = None) -> None:
        """Sends a message, or a sign of life, to each agent."""
        for node in self.nodes:
            if (connection := node.connection) and node.has_task:
                connection.send(message)

    def _connect(self, node: Node) -> None:
        """Connects to a host for the first time, or to one that was lost, since the run began."""
        waited_s = time.monotonic() - node.tried_s
        is_lost = bool(self._members) and not node.is_refused and waited_s > _TRY_AGAIN_S
        if self._signals.first or not (is_lost or waited_s == float("inf")):
            return
        node.has_task, node.tried_s = False, time.monotonic()  # first: another thread sends to those that have one
        node.connection = Connection(node.name, self._ssh.line(node.name, "paceline.launch.agent"), self._output)

    def _give_task(self, node: Node, connection: Connection, greeting: Greeting) -> None:
        if problem := connection.problem(len(self.nodes) > 1):
            node.problem, node.is_refused = problem, True
            connection.close()
            return
        if not self._have_answered:
            return
        node.address = greeting.address if len(self.nodes) > 1 else LOOPBACK
        words = list(self._job.command)
        place = words.index("--") if "--" in words else len(words)  # a script comes after that
        line = ["-m", "paceline", *words[:place], "--nproc", node.num_ranks, *words[place:]]
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        connection.send(asdict(Task(line, self._ssh.folder, {**passed_on, JOB: self._name}, node.address)))
        node.has_task = True

    def _drop(self, node: Node, connection: Connection) -> None:
        """Lets a connection go that has ended. Raises _Refused or RunError if the command did not start there."""
        if connection.greeting:
            connection.cut()  # it may be silent, and not have ended
        until_s = time.monotonic() + _REFUSED_S
        while (status := connection.status()) is None and time.monotonic() < until_s:
            time.sleep(_LOOK_EVERY_S)
        node.problem = node.problem or connection.problem(len(self.nodes) > 1)
        connection.cut()
        node.connection, node.tried_s = None, time.monotonic()
        if not connection.greeting:
            return
        if status == EXIT_USER:
            node.is_refused = True
            if node in self._members or not self._members:
                time.sleep(_REFUSED_S)
                raise _Refused
        elif status == EXIT_FAILED and not self._members:
            raise RunError(f"on host {node.name} the command ended with status {status} before training")

    def _should_take_in(self, members: Sequence[Node], step_then: int) -> bool:
        """Whether ranks are to save, so that a host that has come back can train: when they have trained."""
        new = [node for node in self.nodes if node not in members and node.is_ready]
        now = time.monotonic()
        if not new or now - self._took_in_s < _TAKE_IN_EVERY_S or members[0].state.step <= step_then:
            return False
        say(f"host {new[0].name} is back: saving, to take it in")
        self._took_in_s = now
        return True

    def _leave_out(self, members: Sequence[Node], lost: Sequence[Node]) -> list[Node]:
        """Lets go of hosts that have come (back) if the ranks could not begin to train with them: the others can, which
        trained before. Returns these hosts."""
        if self._began_at is not None:
            self._trained = [node.connection for node in members]
            return []
        new = [node for node in members if node.connection not in self._trained]
        is_well = all(node.ended_well() for node in members)
        if lost or is_well or self._signals.first or len(members) - len(new) < self._job.least:
            return []
        for node in new:
            assert node.connection
            say(f"warning: ranks cannot begin with {node.name}, and train without it; to use it, start `launch` again")
            node.is_refused = True
            node.connection.close()
            node.connection.wait(time.monotonic() + _REFUSED_S)
            node.connection = None
        return new

    # ---- the end ----

    def _outcome(self, members: Sequence[Node], lost: Sequence[Node], makes_room: bool) -> Ends:
        states = [node.state for node in members if node not in lost]
        reports = {int(rank): Status(**report) for state in states for rank, report in state.reports.items()}
        exits = {int(rank): code for state in states for rank, code in state.exits.items()}
        ranks = range(max((*reports, *exits, sum(state.num_ranks for state in states) - 1)) + 1)
        names = tuple(node.name for node in lost)
        return Ends(ranks=ranks, reports=reports, exits=exits, lost=names, makes_room=makes_room)

    def conclude(self, status: int) -> None:
        """Ends the run: each host that is here gets the last checkpoint, then its agent ends."""
        if self._members:
            self._copier.copy_the_last(self.nodes, self._members[0], self._signals)
        self.send_all({"end": status})

    def end(self) -> None:
        """Ends what still runs, without printing what those hosts say about it."""
        self._output.is_closed = True
        self._copier.stop()
        until_s = time.monotonic() + self._job.grace_s + _END_S
        for node in self.nodes:
            if node.connection:
                node.connection.close()
        for node in self.nodes:
            if node.connection and node.connection.greeting:
                node.connection.wait(until_s)
            elif node.connection:
                node.connection.cut()  # there is no agent yet


@contextlib.contextmanager
def _open(hosts: Sequence[NamedHost], job: Job, ssh: Ssh, signals: StopSignals) -> Iterator[Hosts]:
    """Yields hosts with which a connection is open; at the end nothing of them is left."""
    crew, closed = Hosts(hosts, job, ssh, signals), threading.Event()

    def live() -> None:
        while not closed.wait(LIFE_EVERY_S):
            crew.send_all()

    try:
        threading.Thread(target=live, daemon=True).start()
        yield crew
    finally:
        closed.set()
        crew.end()
