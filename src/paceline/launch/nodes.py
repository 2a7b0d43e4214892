"""The hosts of a run, as its coordinator sees them: in what order they have their ranks, what their ranks are told, and
which of them lacks the newest checkpoint."""

import os
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

from paceline.base.errors import RunError, UserError
from paceline.base.process import Status, die_with_parent, say
from paceline.launch.agent import State
from paceline.launch.attempt import Order
from paceline.launch.options import NamedHost
from paceline.launch.signals import StopSignals
from paceline.launch.ssh import Connection, Ssh

_TRY_AGAIN_S = 3.0  # after a copy failed
_LAST_TRIES = 3  # to copy the last checkpoint
_REPORTED_S = 2.0  # a host that has received a checkpoint says so within this time
_LOOK_EVERY_S = 0.05


class Node:
    """A host of the list, whether it is there or not."""

    def __init__(self, host: NamedHost):
        self.name, self.num_ranks = host.name, host.num_ranks
        self.connection: Connection | None = None
        self.address = ""
        self.has_task = self.is_refused = False
        self.problem = ""  # why it could not be used at first, or when it came back
        self.tried_s = float("-inf")  # monotonic: the last attempt to connect
        self.order: Order = ""  # the latest, in this attempt

    @property
    def state(self) -> State:
        """What it reported last; an empty state if it is not there."""
        return (self.connection.state if self.connection else None) or State()

    @property
    def is_ready(self) -> bool:
        return self.state.num_ranks > 0 and not self.state.is_running

    @property
    def newest(self) -> int:
        """The step of its newest checkpoint; -1: none."""
        return -1 if self.state.newest is None else self.state.newest

    def has_ended(self, attempt: int) -> bool:
        """Whether its ranks of this attempt have ended."""
        return self.state.attempt == attempt and not self.state.is_running

    def ended_well(self) -> bool:
        """Whether all its ranks have finished, or stopped with their state saved."""
        reports = [Status(**report) for report in self.state.reports.values()]
        return len(reports) == self.state.num_ranks and all(report.is_good for report in reports)


def ranked(nodes: Sequence[Node], leader: Node | None) -> list[Node]:
    """Returns the hosts in the order of their ranks: first the one with the newest checkpoint; among equals the last
    one that had rank 0, else the first of the list."""
    first = max(nodes, key=lambda node: (node.newest, node is leader, -nodes.index(node)))
    return [first, *(node for node in nodes if node is not first)]


def order_for(is_lost: bool, has_failed: bool, makes_room: bool) -> Order:
    """Returns what the ranks that still run are to do."""
    if is_lost:
        return "end"  # they wait for ranks that are gone
    if has_failed:
        return "fail"
    return "save" if makes_room else ""


def check_answers(nodes: Sequence[Node], least: int) -> None:
    """Raises UserError naming the hosts that cannot be used at first, unless enough others can."""
    problems = [f"{node.name}: {node.problem}" for node in nodes if node.problem]
    if len(nodes) - len(problems) < least:
        raise UserError("cannot start on " + "; ".join(problems))
    for problem in problems:
        say(f"warning: cannot start on {problem}")
    greetings = {node.name: node.connection.greeting for node in nodes if node.connection and not node.problem}
    addresses = {name: greeting.address for name, greeting in greetings.items() if greeting}
    if len(set(addresses.values())) < len(addresses):
        both = ", ".join(f"{name} is {address}" for name, address in addresses.items())
        raise UserError(f"two names lead to one host ({both}); name it once, with all its ranks")


def too_few(nodes: Sequence[Node], least: int, waited_s: float) -> RunError:
    """Returns the error of a run for which too few hosts are there. waited_s: for those that were lost; 0: the run has
    not begun."""
    absent = [node.name for node in nodes if not node.is_ready]
    if waited_s and least < len(nodes):
        return RunError(
            f"waited {waited_s:g} s for hosts: {len(nodes) - len(absent)} of {len(nodes)} are here, at least {least} "
            f"must be; not {', '.join(absent)}"
        )
    return RunError(
        f"host {' and '.join(absent)} is lost: its agent was killed, or the connection has ended; the other hosts "
        "were stopped. `train ... --resume auto` continues from the newest checkpoint; --min-hosts lets the others "
        "train on"
    )


def lacking(nodes: Sequence[Node], source: Node) -> list[Node]:
    """Returns the hosts whose newest checkpoint is older than that of `source`."""
    return [node for node in nodes if node.state.num_ranks and node.newest < source.newest]


class Copier:
    """Copies the newest checkpoint of rank 0's host to the hosts that lack it, one at a time."""

    def __init__(self, ssh: Ssh, run: Path):
        self._num_failed = 0
        self._ssh, self._run = ssh, os.path.join(ssh.folder, run)
        self._processes: list[subprocess.Popen[bytes]] = []  # of the copy that is under way: sender and receiver
        self._what = ""  # it copies, and where to
        self._failed_s = float("-inf")  # monotonic
        self._complaint = ""
        self._copied: dict[str, tuple[int, float]] = {}  # by host: the step of its last copy, and when it was complete
        self._target: tuple[str, int] = ("", 0)  # host and step of the copy that is under way
        self._tried_s: dict[str, float] = {}  # by host: when its last copy began, monotonic

    def look(self, nodes: Sequence[Node], source: Node) -> None:
        """Ends a copy that is complete or has failed; begins the next one."""
        if self._processes:
            self._end_copy(*self._processes)
        elif source.connection and time.monotonic() - self._failed_s > _TRY_AGAIN_S:
            # Who was tried longest ago: a host whose disk is full must not keep the others from theirs.
            waiting = sorted(self._waiting(nodes, source), key=lambda node: self._tried_s.get(node.name, 0.0))
            for target in waiting[:1]:
                self._start(source, target)

    def _waiting(self, nodes: Sequence[Node], source: Node) -> list[Node]:
        """Returns the hosts that lack the newest checkpoint, but those that have just received it: they say it soon."""
        waiting, now_s = [], time.monotonic()
        for node in lacking(nodes, source):
            step, copied_s = self._copied.get(node.name, (-1, 0.0))
            if step != source.newest or now_s - copied_s >= _REPORTED_S:
                waiting.append(node)
        return waiting

    def copy_the_last(self, nodes: Sequence[Node], source: Node, signals: StopSignals) -> None:
        """Returns when each host that is here has the last checkpoint, or does not get it."""
        most = self._num_failed + _LAST_TRIES
        while (self._processes or lacking(nodes, source)) and source.connection and not signals.is_urgent:
            self.look(nodes, source)
            for node in nodes:
                if node.connection and node.connection.is_lost():
                    node.connection.cut()
                    node.connection = None
            if self._num_failed >= most:
                break
            time.sleep(_LOOK_EVERY_S)
        if behind := lacking(nodes, source):
            names = ", ".join(node.name for node in behind)
            say(f"{names}: the run folder may lack the last checkpoint; {source.name} has it")

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    def _end_copy(self, sender: subprocess.Popen[bytes], receiver: subprocess.Popen[bytes]) -> None:
        if receiver.poll() is None:
            return
        failed = receiver if sender.poll() in (None, 0) else sender  # the cause, if both have
        self.stop()
        if receiver.returncode == 0:
            host, step = self._target
            self._copied[host] = step, time.monotonic()
            return
        self._failed_s, self._num_failed = time.monotonic(), self._num_failed + 1
        assert failed.stderr
        said = failed.stderr.read().decode(errors="replace").strip().splitlines()
        problem = (said or ["the connection has ended"])[-1]
        if problem != self._complaint:
            self._complaint = problem
            say(f"{self._what}: {problem}; trying again")

    def _start(self, source: Node, target: Node) -> None:
        step_before, _ = self._copied.get(target.name, (-1, 0.0))
        self._num_failed += step_before == source.newest  # it was copied, and is not there
        self._target, self._tried_s[target.name] = (target.name, source.newest), time.monotonic()
        self._what = f"step {source.newest} cannot be copied to {target.name}"
        stream: int | IO[bytes] = subprocess.DEVNULL
        for node, verb in ((source, "send"), (target, "receive")):
            process = subprocess.Popen(
                self._ssh.line(node.name, "paceline.launch.copies", verb, self._run, str(source.newest)),
                stdin=stream,
                stdout=subprocess.PIPE if verb == "send" else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            self._processes.append(process)
            stream = process.stdout or stream
        assert not isinstance(stream, int)
        stream.close()  # the receiver has it
