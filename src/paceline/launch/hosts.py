"""The hosts of a run that may leave and come back, each with a launcher and a run folder of its own.

Launchers read each other's state (peers.py), and each decides by one rule, so that nobody has to be asked:

    waiting   when no host trains, the one with the newest checkpoint leads: it posts a roster, the hosts of one attempt
    running   its ranks train; the leader ends the attempt if a host is lost, and saves to take one in
    judging   the leader collects how all ranks ended; then it ends the run, or waits for the next attempt
    over      the run has ended; each host takes the last checkpoint, and its launcher ends

Meanwhile the others copy each new checkpoint and the records (copying.py), so that any host may be the one that leaves.
"""

import dataclasses
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.base.errors import EXIT_DONE, EXIT_RESUMABLE, RunError, UserError
from paceline.base.net import listen
from paceline.base.say import say
from paceline.base.status import Status
from paceline.launch.copying import Copies, Take
from paceline.launch.options import HostsOptions
from paceline.launch.peers import Member, Peers, Roster, State, ended_well
from paceline.launch.place import Collected, Order, Place, Verdict
from paceline.launch.restarts import Failure, Records
from paceline.launch.signals import StopSignals

_LOOK_EVERY_S = 0.05
_LOOK_IN_RECORDS_S = 0.5
_COME_S = 5.0  # for a host to take its place in a new roster
_TAKE_IN_EVERY_S = 10.0  # a host that comes and goes must not keep the others from training
_SAY_AFTER_S = 2.0


class Hosts:
    """This host's launcher among the others."""

    def __init__(self, options: HostsOptions, job: str, num_ranks: int, run: Path, signals: StopSignals, take: Take):
        """job: equal on all hosts if the command is. take: copies a checkpoint into the run folder."""
        self._options, self._node, self._signals = options, options.node, signals
        self._records = Records(run)
        self._state = State(job=job, start=secrets.token_hex(8), num_ranks=num_ranks, step=-1)
        self._run = run
        self._peers = Peers(options.addresses, options.node, run, self._own)  # first: another one may run here
        run.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents of a new folder get no mode
        self._mark(options.node).parent.mkdir(exist_ok=True, mode=0o700)
        self._mark(options.node).write_text(self._state.start)
        self._copies = Copies(self._peers, run, take, self._records.newest_checkpoint, self._source)
        self._posted_s = 0.0  # monotonic; when the latest roster began here
        self._saved_then, self._reached_then = -1, 0  # the newest checkpoint and the last step in the records then
        self._looked_s = 0.0
        self._took_in_s = float("-inf")
        self._takes_in = False

    # ---- between attempts ----

    def meet(self, failures: list[Failure]) -> Place | Verdict:
        """Waits until this host has its place in a new attempt, or the run is over.

        failures: of ranks, so far; becomes what the attempt's leader knows of them. Raises RunError if too few hosts
        come in time, UserError if another host runs another command.
        """
        self._note(phase="waiting", failures=tuple(failures))
        met_s = began_s = time.monotonic()
        has_said = False
        while not self._signals.is_urgent:
            others, now = self._others(), time.monotonic()
            if found := self._verdict(others) or self._adopt(others, failures):
                return found
            # What a host said before this one waited may have changed since.
            is_quiet = all(s.phase == "waiting" and self._peers.heard_s(n) > met_s for n, s in others.items())
            asked = self._asked_to_stop(others)
            is_shared = any(state.roster == self._state.roster for state in others.values() if state.roster)
            if asked and (not is_shared or (is_quiet and self._leads(others))):
                return Verdict(EXIT_RESUMABLE, stop=asked)
            if not is_quiet:
                began_s = now
            elif not asked and self._leads(others) and self._are_enough(others, now - began_s):
                return self._post(others, failures)
            elif now - began_s > _SAY_AFTER_S and not has_said:
                has_said = True
                say(f"waiting for hosts: {self._missing(others)}")
            time.sleep(_LOOK_EVERY_S)
        raise KeyboardInterrupt

    def _are_enough(self, others: Mapping[int, State], waited_s: float) -> bool:
        """Whether these hosts and this one may train. All are waited for before the first attempt."""
        num_hosts, timeout_s = 1 + len(others), self._options.timeout_s
        is_first = not any(state.roster for state in (self._state, *others.values()))
        if num_hosts == len(self._options.addresses):
            return True
        if num_hosts >= self._options.least and (not is_first or waited_s > timeout_s):
            return True
        if waited_s > timeout_s:
            raise RunError(f"waited {timeout_s:g} s for hosts: {self._missing(others)}")
        return False

    def _others(self) -> dict[int, State]:
        """Returns the living hosts that run the same command."""
        alive = self._peers.alive()
        if self._state.roster is None and (foreign := [n for n, s in alive.items() if s.job != self._state.job]):
            raise UserError(
                f"host {self._name(foreign[0])} runs another command, or another version: start the same command on "
                "all hosts (the way the run folder, the data and --nproc are named may differ)"
            )
        return {node: state for node, state in alive.items() if state.job == self._state.job}

    def _verdict(self, others: Mapping[int, State]) -> Verdict | None:
        """Returns how the run ended: by the hosts of this one's last attempt, or complete, by any."""
        for state in others.values():
            if (
                state.phase == "over"
                and state.roster
                and self._is_bound(state.status, state.roster, self._state.roster)
            ):
                self._note(roster=state.roster)
                return Verdict(state.status, state.message)
        return None

    @staticmethod
    def _is_bound(status: int, theirs: Roster, mine: Roster | None) -> bool:
        """Whether the end of an attempt, `theirs`, ends the run for a host whose last attempt is `mine`."""
        return status == EXIT_DONE or mine in (None, theirs)

    def _adopt(self, others: Mapping[int, State], failures: list[Failure]) -> Place | None:
        """Returns this host's place in a roster that another one has posted, if there is a new one."""
        number = self._state.roster.number if self._state.roster else 0
        for node, state in others.items():
            roster = state.roster
            if state.phase != "running" or roster is None or roster.number <= number or roster.leader.node != node:
                continue
            if any(member.start == self._state.start for member in roster.members):
                failures[:] = state.failures
                return self._begin(roster, None)
        return None

    def _leads(self, others: Mapping[int, State]) -> bool:
        """Whether this host has the newest checkpoint; among equals the last leader, else the first in the list."""

        def rank(node: int, state: State) -> tuple[int, int, int]:
            roster = state.roster
            return state.step, roster.number if roster and roster.leader.node == node else 0, -node

        return all(rank(self._node, self._own()) > rank(node, state) for node, state in others.items())

    def _post(self, others: Mapping[int, State], failures: list[Failure]) -> Place:
        states = {self._node: self._own(), **others}
        known: tuple[Failure, ...] = max((state.failures for state in states.values()), key=len)
        failures[:] = known
        listener = listen(self._options.addresses[self._node][0], self._options.store_port)
        number = 1 + max(state.roster.number if state.roster else 0 for state in states.values())
        members = tuple(Member(node, state.start, state.num_ranks) for node, state in states.items())
        roster = Roster(secrets.token_hex(8), number, members, listener.getsockname()[1])
        self._note(failures=tuple(failures))
        return self._begin(roster, listener)

    def _begin(self, roster: Roster, listener: socket.socket | None) -> Place:
        nodes = [member.node for member in roster.members]
        first = sum(member.num_ranks for member in roster.members[: nodes.index(self._node)])
        world_size = sum(member.num_ranks for member in roster.members)
        if listener is None:
            self._copies.start()
            say(f"this host has rank {first} of {world_size}; rank 0 is on {self._name(roster.leader.node)}")
        else:
            self._copies.stop()
            if len(nodes) < len(self._options.addresses) or roster.number > 1:
                names = ", ".join(map(self._name, nodes))
                say(f"training on {len(nodes)} of {len(self._options.addresses)} hosts: {names}")
        self._posted_s, self._takes_in = time.monotonic(), False
        self._saved_then, self._reached_then = self._own().step, self._records.last_step()
        self._note(phase="running", roster=roster, ranks=None)
        address = self._options.addresses[roster.leader.node][0]
        return Place(first, self._state.num_ranks, world_size, address, roster.port, listener, roster.number - 1)

    def _asked_to_stop(self, others: Mapping[int, State]) -> str:
        """Returns the signal by which a user has asked one of these launchers to stop; empty: none."""
        mine = self._state.roster
        told = [state.stop for state in others.values() if mine and state.roster and state.roster.id == mine.id]
        own = self._signals.first.name if self._signals.first else ""
        if stop := next(filter(None, (self._state.stop, own, *told)), ""):
            self._note(stop=stop)  # whoever asked may be gone before the run is
        return stop

    # ---- during an attempt ----

    def order(self) -> Order:
        """Returns what this host's ranks are to do."""
        roster = self._state.roster
        assert roster is not None
        alive = self._peers.alive()
        self._asked_to_stop(alive)
        if roster.leader.node != self._node:
            leader = alive.get(roster.leader.node)
            if leader is None or leader.start != roster.leader.start or leader.roster != roster:
                return "end"
            return "" if leader.phase == "running" or ended_well(leader) else "fail"
        if any(self._is_lost(member, alive) for member in roster.members[1:]):
            return "end"
        states = [alive[member.node] for member in roster.members[1:]]
        if any(state.roster == roster and state.ranks and not ended_well(state) for state in states):
            return "fail"
        return "save" if self._should_take_in(roster, alive) else ""

    def _is_lost(self, member: Member, alive: Mapping[int, State]) -> bool:
        state, roster = alive.get(member.node), self._state.roster
        if state is None or state.start != member.start:
            return True
        return state.roster != roster and time.monotonic() - self._posted_s > _COME_S

    def _should_take_in(self, roster: Roster, alive: Mapping[int, State]) -> bool:
        known = {member.node for member in roster.members}
        # Not those that have failed or were stopped; one that has completed the run ends it here, too.
        new = [n for n, s in alive.items() if n not in known and s.job == self._state.job and s.status == EXIT_DONE]
        now = time.monotonic()
        not_before_s = max(self._took_in_s + _TAKE_IN_EVERY_S, self._looked_s + _LOOK_IN_RECORDS_S)
        if self._takes_in or not new or now < not_before_s:
            return self._takes_in
        self._looked_s, reached = now, self._records.last_step()
        if reached == self._reached_then or reached <= self._saved_then:  # ranks do not train yet
            return False
        say(f"host {self._name(new[0])} is back: saving, to take it in")
        self._takes_in, self._took_in_s = True, now
        return True

    # ---- after an attempt ----

    def collect(self, found: dict[int, Status], ends: dict[int, int]) -> Collected | None:
        """Tells the others how the ranks of this host ended; returns how all have, or None if another host leads."""
        roster = self._state.roster
        assert roster is not None
        leads = roster.leader.node == self._node
        ranks = {"found": {rank: asdict(status) for rank, status in found.items()}, "ends": ends}
        self._note(phase="judging" if leads else "waiting", ranks=ranks)
        if not leads:
            return None
        states: dict[int, State] = {}
        lost: dict[int, Member] = {}
        while len(states.keys() | lost.keys()) < len(roster.members) - 1:
            alive = self._peers.alive()
            for member in roster.members[1:]:
                if self._is_lost(member, alive):
                    lost[member.node] = member
                elif alive[member.node].roster == roster and alive[member.node].ranks:
                    states[member.node] = alive[member.node]
            if self._signals.is_urgent:
                raise KeyboardInterrupt
            time.sleep(_LOOK_EVERY_S)
        for state in states.values():
            assert state.ranks is not None
            found |= {int(rank): Status(**status) for rank, status in state.ranks["found"].items()}
            ends |= {int(rank): code for rank, code in state.ranks["ends"].items()}
        names = tuple(self._name(node) for node in lost)
        return Collected(found, ends, names, self._asked_to_stop(states), self._takes_in)

    def host_of(self, rank: int) -> str:
        """Returns the name of the host that had this rank."""
        assert self._state.roster is not None
        nodes = [member.node for member in self._state.roster.members for _ in range(member.num_ranks)]
        return self._name(nodes[rank])

    def conclude(self, status: int, message: str = "") -> None:
        """Ends the run: tells the others, and waits until each of them has the last checkpoint; or takes it."""
        roster = self._state.roster
        leads = roster is not None and roster.leader.node == self._node
        if not leads:
            self._copies.finish()
        self._note(phase="over", status=status, message=message)
        while leads and roster and not self._signals.is_urgent:
            others = [s for s in self._peers.alive().values() if s.job == self._state.job and s.phase != "over"]
            if not any(self._is_bound(status, roster, other.roster) for other in others):
                return
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        self._copies.stop()
        self._peers.close()
        if self._shares_folder(self._node, self._state.start):
            self._mark(self._node).unlink(missing_ok=True)

    # ---- state ----

    def _own(self) -> State:
        newest = self._records.newest_checkpoint()
        return dataclasses.replace(self._state, step=-1 if newest is None else newest)

    def _note(self, **changed: Any) -> None:
        self._state = dataclasses.replace(self._state, **changed)

    def _source(self) -> tuple[int, State] | None:
        """Returns the host whose checkpoints are to be copied, and its state; None if it shares the run folder."""
        roster = self._state.roster
        if roster is None or roster.leader.node == self._node:
            return None
        state = self._peers.alive().get(roster.leader.node)
        if state is None or self._shares_folder(roster.leader.node, state.start):
            return None
        return roster.leader.node, state

    def _mark(self, node: int) -> Path:
        """Returns the file in which a launcher notes its start: hosts that read it share the run folder."""
        return self._run / "ranks" / f"launcher-{node}"

    def _shares_folder(self, node: int, start: str) -> bool:
        try:
            return self._mark(node).read_text() == start
        except OSError:
            return False

    def _name(self, node: int) -> str:
        host, port = self._options.addresses[node]
        return f"{host}:{port}"

    def _missing(self, others: Mapping[int, State]) -> str:
        count, options = len(others) + 1, self._options
        absent = [f"{self._name(n)} ({why})" for n, why in self._peers.problems.items() if n not in others]
        return f"{count} of {len(options.addresses)} are here, at least {options.least} must be; {', '.join(absent)}"
