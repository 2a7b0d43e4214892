"""The hosts of a run, as its coordinator sees them: in what order they have their ranks, what their ranks are told, and
which of them lacks the newest checkpoint."""

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.base.process import Status, say
from paceline.launch.agent import State
from paceline.launch.attempt import Order
from paceline.launch.copies import Copy
from paceline.launch.options import NamedHost
from paceline.launch.ssh import Connection, Ssh

_TRY_AGAIN_S = 3.0  # after a copy failed


class Node:
    """A host of the list, whether it is there or not."""

    def __init__(self, host: NamedHost):
        self.name, self.num_ranks = host.name, host.num_ranks
        self.connection: Connection | None = None
        self.address = ""
        self.has_task = self.is_refused = False
        self.tried_s = 0.0  # monotonic
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


def lacking(nodes: Sequence[Node], source: Node) -> list[Node]:
    """Returns the hosts whose newest checkpoint is older than that of `source`."""
    return [node for node in nodes if node.state.num_ranks and node.newest < source.newest]


class Copier:
    """Copies the newest checkpoint of rank 0's host to the hosts that lack it, one at a time."""

    def __init__(self, ssh: Ssh, run: Path):
        self.num_failed = 0
        self._ssh, self._run = ssh, str(run)
        self._copy: tuple[Node, Copy] | None = None
        self._failed_s = float("-inf")  # monotonic
        self._complaint = ""

    @property
    def is_busy(self) -> bool:
        return self._copy is not None

    def look(self, nodes: Sequence[Node], source: Node) -> None:
        """Ends a copy that is complete or has failed; begins the next one."""
        if self._copy:
            self._end_copy()
        elif source.connection and time.monotonic() - self._failed_s > _TRY_AGAIN_S:
            for target in lacking(nodes, source)[:1]:
                self._copy = target, self._start(source, target)

    def stop(self) -> None:
        if self._copy:
            self._copy[1].stop()
            self._copy = None

    def _end_copy(self) -> None:
        assert self._copy
        target, copy = self._copy
        if (problem := copy.problem()) is None:
            return
        self._copy = None
        if problem:
            self._failed_s, self.num_failed = time.monotonic(), self.num_failed + 1
            if problem != self._complaint:
                self._complaint = problem
                say(f"step {copy.step} cannot be copied to {target.name}: {problem}; trying again")

    def _start(self, source: Node, target: Node) -> Copy:
        step, module = source.newest, "paceline.launch.copies"
        lines = [
            self._ssh.line(node.name, module, verb, self._run, str(step), is_there=True)
            for node, verb in ((source, "send"), (target, "receive"))
        ]
        return Copy(step, *lines)
