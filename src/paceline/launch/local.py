"""`--nproc N --max-restarts M`: runs N ranks of this command on this machine; if one fails, all of them start again.

Ranks record their exit statuses in a folder, because torch's launcher knows only success and failure: 75 ("saved, start
me again") is neither. A later attempt runs the same command line; PACELINE_JOB tells its ranks which run folder is
theirs, and they resume from it.
"""

import contextlib
import logging
import os
import shlex
import signal
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.base.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER, RunError
from paceline.base.net import require_loopback
from paceline.base.status import LAUNCHER, STATUS_FOLDER, Status, read_statuses
from paceline.launch.job import ATTEMPT, JOB
from paceline.launch.restarts import Failure, Records, delay_s, is_loop
from paceline.launch.scratch import scratch
from paceline.launch.signals import StopSignals

_INTERRUPTED = 130  # exit status of a rank that Ctrl-C ended


def start_ranks(
    num_ranks: int,
    command: Sequence[str],
    run: Path,
    *,
    max_restarts: int = 0,
    port: int = 0,
    interface: str = "",
) -> int:
    """Runs the command as ranks 0..num_ranks-1 of the run in this folder and returns their common exit status.

    After a failure that the user's input did not cause, all ranks start again, at most max_restarts times. port: of the
    ranks' store, on loopback; 0: any free one. Without an interface all other traffic also uses loopback.

    Raises UserError if loopback is down; RunError naming the rank that died without a message, or listing all attempts;
    KeyboardInterrupt after a second Ctrl-C, or one before anything was saved.
    """
    require_loopback()
    if not interface and (loopback := _loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ[JOB] = uuid.uuid4().hex
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # its tracebacks would bury the rank's message
    with StopSignals() as signals, scratch() as folder:
        return _Attempts(num_ranks, command, run, max_restarts, port, signals, folder).run()


@dataclass
class _Ended:
    """How one attempt ended, over all ranks."""

    status: int  # 2 beats 1 beats 75 beats 0
    what: str = ""  # who failed, and how
    was_said: bool = True  # by a rank, on the terminal
    rank: int | None = None  # the first to blame


@dataclass
class _Attempts:
    num_ranks: int
    command: Sequence[str]
    run_folder: Path
    most: int  # restarts
    port: int
    signals: StopSignals
    scratch: Path

    def __post_init__(self) -> None:
        self._records = Records(self.run_folder)
        self._begun_at = self._records.last_step()
        self._failures: list[Failure] = []
        self._num_repeated = 0

    def run(self) -> int:
        """Returns the common exit status. Raises RunError for what no rank has printed."""
        while True:
            ended = self._attempt()
            if ended.status not in (EXIT_FAILED, _INTERRUPTED):
                if number := len(self._failures):
                    _say(f"{number} restart{'s'[: number != 1]}; {self._num_repeated} steps were made twice")
                return ended.status
            self._failures.append(Failure(ended.what, self._records.last_step()))
            self._records.close(ended.what, ended.was_said)
            delay = None if self.signals.first else delay_s(self._failures, self._begun_at, self.most)
            if delay is None:
                return self._give_up(ended)
            self._announce(delay)
            if self.signals.wait(delay):
                return self._stopped_before_training()

    def _attempt(self) -> _Ended:
        from paceline.launch.attempt import run_attempt  # imports torch: a second

        attempt = len(self._failures)
        statuses = self.scratch / f"statuses-{attempt}"
        statuses.mkdir()
        os.environ[STATUS_FOLDER], os.environ[ATTEMPT] = str(statuses), str(attempt)
        before = self._records.last_step()
        ends = run_attempt(self.num_ranks, self.command, os.environ[JOB], self.port, self.signals, statuses)
        began_at = self._records.began_at()
        if attempt and began_at is not None:
            self._num_repeated += max(0, before - began_at)
        if self.signals.is_urgent:
            raise KeyboardInterrupt
        found = read_statuses(statuses)
        if self.signals.first and not any(status.is_failure for status in found.values()):
            is_early = ends.get(0) == -signal.SIGTERM  # rank 0, which prints, had not begun to train
            if is_early or not any(status.is_good for status in found.values()):
                return _Ended(self._stopped_before_training())
        return _judge(found, ends, self.num_ranks, self.signals.first)

    def _announce(self, delay: float) -> None:
        last, number = self._failures[-1], len(self._failures)
        when = f" in {delay:.0f} s" if delay else ""
        _say(f"{last.what}, after step {last.reached}; restart {number} of {self.most}{when}")

    def _give_up(self, ended: _Ended) -> int:
        """Returns the exit status after the last failure; raises RunError for what no rank has printed."""
        way_out = self._way_out()
        if len(self._failures) == 1:
            if not ended.was_said:
                raise RunError(f"{self._death(ended)}{f'. {way_out}' if way_out else ''}")
            if way_out:
                _say(way_out)
            return ended.status
        lines = [f"attempt {k}: {failed.what}, after step {failed.reached}" for k, failed in enumerate(self._failures)]
        why = "three times in a row at the same step" if is_loop(self._failures) else f"after {self.most} restarts"
        saved = f". {way_out}" if way_out else ""
        logs = f"the logs of the ranks are in {self.run_folder / 'ranks'}"
        raise RunError(f"the run failed {why}; {logs}{saved}\n  " + "\n  ".join(lines))

    def _death(self, ended: _Ended) -> str:
        """Returns who died, where and when, and which log says more."""
        reached = self._records.last_step()
        text = f"{ended.what}, on {socket.gethostname()}" + (f", after step {reached}" if reached else "")
        if self.num_ranks > 1:
            text += "; the other ranks were stopped"
        log = self._records.log_of(ended.rank) if ended.rank is not None else None
        return f"{text}. The log of rank {ended.rank} is {log}" if log else text

    def _way_out(self) -> str:
        """Returns how to resume the run; empty if there is nothing to resume."""
        resume = f"`paceline resume {shlex.quote(str(self.run_folder))}`"
        if (newest := self._records.newest_checkpoint()) is not None:
            return f"The newest checkpoint is of step {newest}: {resume} resumes from there"
        return f"Nothing had been saved: {resume} begins again at step 0" if self._records.last_step() else ""

    def _stopped_before_training(self) -> int:
        """Returns the exit status after a signal that came before any rank could act on it."""
        assert self.signals.first is not None
        if self.signals.first == signal.SIGINT and self._records.newest_checkpoint() is None:
            raise KeyboardInterrupt
        way_out = self._way_out() or "Nothing was saved: start the same command again"
        _say(f"stopped by {self.signals.first.name} before training began. {way_out}")
        return EXIT_RESUMABLE


def _judge(found: dict[int, Status], ends: dict[int, int], num_ranks: int, first: signal.Signals | None) -> _Ended:
    """Returns one exit status for all ranks, and who is to blame: first those that died without a message."""
    if EXIT_USER in [status.code for status in found.values()]:
        return _Ended(EXIT_USER)
    own = {rank: status for rank, status in found.items() if status.is_failure}
    # A rank that has only begun to import does not handle signals yet.
    stopped = {rank for rank, code in ends.items() if rank not in found and first and code == -signal.SIGTERM}
    silent = [rank for rank in ends if rank not in found and rank not in stopped]
    if own and all(ends[rank] == -signal.SIGKILL for rank in silent):
        silent = []  # killed by the watchdog of those ranks, which printed why
    if silent:
        code = next((ends[rank] for rank in silent if ends[rank] < 0), ends[silent[0]])
        dead = sorted(rank for rank in silent if ends[rank] == code)
        return _Ended(EXIT_FAILED, _who_died(dead, code, is_explained=bool(own)), was_said=False, rank=dead[0])
    if own:
        rank = next((rank for rank in ends if rank in own), min(own))
        return _Ended(own[rank].code, f"rank {rank} failed", rank=rank)
    if suffered := [status.consequence for status in found.values() if status.consequence]:
        return _Ended(EXIT_FAILED, str(suffered[0]), was_said=False)  # nobody died, and nobody printed why
    if len(found) + len(stopped) < num_ranks:
        hanging = ", ".join(str(rank) for rank in range(num_ranks) if rank not in found and rank not in stopped)
        name = first.name if first else "the failure of another"
        return _Ended(EXIT_FAILED, f"rank {hanging} did not end after {name} and was killed", was_said=False)
    return _Ended(max(status.code for status in found.values()))


def _who_died(ranks: list[int], code: int, *, is_explained: bool) -> str:
    who = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
    if code >= 0:
        return f"{who} ended without a word (exit status {code})"
    name = signal.Signals(-code).name
    hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" and not is_explained else ""
    return f"{who} {'were' if len(ranks) > 1 else 'was'} killed by {name}{hint}"


def _loopback() -> str | None:
    found = psutil.net_if_addrs().items()
    return next((str(name) for name, known in found if any(a.address == "127.0.0.1" for a in known)), None)


def _say(line: str) -> None:
    """Prints a line of the launcher. A closed terminal does not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
