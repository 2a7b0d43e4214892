"""`--nproc N --max-restarts M`: N ranks of this command on this machine; when one fails, all of them anew.

An attempt is one life of the ranks (agent.py). Each rank notes its exit status in a folder of ours, because the agent's
own report knows only success and failure: 75 ("saved, start me again") is neither. A later attempt runs the same
command line; its ranks learn from PACELINE_JOB that the run folder is theirs, and go on with it.
"""

import contextlib
import gc
import logging
import os
import shlex
import signal
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.base.errors import EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER, RunError
from paceline.base.status import LAUNCHER, STATUS_FOLDER, Status, read_statuses
from paceline.launch.job import ATTEMPT, JOB
from paceline.launch.restarts import Failure, Records, delay_s, is_loop
from paceline.launch.scratch import scratch
from paceline.launch.signals import Asked

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

    After a failure that is nobody's input all ranks are started again, at most max_restarts times. port is that of the
    ranks' store, 0: any free one; it listens on the loopback interface. Without an interface everything else stays
    there, too.

    Raises RunError naming the rank that died without a word of its own, or telling of all attempts; KeyboardInterrupt
    after a Ctrl-C before there was anything to save, or a second one.
    """
    if not interface and (loopback := _loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ[JOB] = uuid.uuid4().hex
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # its tracebacks bury the message of the rank concerned
    with Asked() as asked, scratch() as folder:
        return _Attempts(num_ranks, command, run, max_restarts, port, asked, folder).run()


@dataclass
class _Ended:
    """How one attempt ended, of all ranks together."""

    status: int  # 2 beats 1 beats 75 beats 0
    what: str = ""  # who failed, and how
    was_said: bool = True  # by a rank, on the terminal


class _Attempts:
    """The lives of the ranks, one after the other."""

    def __init__(
        self,
        num_ranks: int,
        command: Sequence[str],
        run: Path,
        most: int,
        port: int,
        asked: Asked,
        scratch: Path,
    ):
        self._num_ranks, self._command, self._run, self._most = num_ranks, command, run, most
        self._port, self._asked, self._scratch = port, asked, scratch
        self._records = Records(run)
        self._begun_at = self._records.last_step()
        self._failures: list[Failure] = []
        self._num_repeated = 0

    def run(self) -> int:
        while True:
            ended = self._attempt()
            if ended.status not in (EXIT_FAILED, _INTERRUPTED):
                self._sum_up()
                return ended.status
            self._failures.append(Failure(ended.what, self._records.last_step()))
            delay = None if self._asked.first else delay_s(self._failures, self._begun_at, self._most)
            if delay is None:
                return self._give_up(ended)
            self._announce(delay)
            if self._asked.wait(delay):
                return self._stopped_before_training()

    def _attempt(self) -> _Ended:
        """One life of the ranks, from their start until none of them is left."""
        from paceline.launch.agent import run_attempt  # torch from here on: a second

        attempt = len(self._failures)
        statuses = self._scratch / f"statuses-{attempt}"
        statuses.mkdir()
        os.environ[STATUS_FOLDER], os.environ[ATTEMPT] = str(statuses), str(attempt)
        before = self._records.last_step()
        ends = run_attempt(self._num_ranks, self._command, os.environ[JOB], self._port, self._asked, statuses)
        gc.collect()  # the agent's store would go on listening
        began_at = self._records.began_at()
        if attempt and began_at is not None:
            self._num_repeated += max(0, before - began_at)
        if self._asked.is_urgent:
            raise KeyboardInterrupt
        found = read_statuses(statuses)
        if self._asked.first and not any(status.is_good or status.is_failure for status in found.values()):
            return _Ended(self._stopped_before_training())
        return _judge(found, ends, self._num_ranks, self._asked)

    def _announce(self, delay: float) -> None:
        last, number = self._failures[-1], len(self._failures)
        when = f" in {delay:.0f} s" if delay else ""
        _say(f"{last.what}, after step {last.reached}; restart {number} of {self._most}{when}")

    def _give_up(self, ended: _Ended) -> int:
        """The exit status after the last failure; raises RunError for what no rank has said."""
        if len(self._failures) == 1:
            if ended.was_said:
                return ended.status
            raise RunError(f"{ended.what}; the other ranks were stopped" if self._num_ranks > 1 else ended.what)
        lines = [f"attempt {k}: {failed.what}, after step {failed.reached}" for k, failed in enumerate(self._failures)]
        why = "three times in a row at the same step" if is_loop(self._failures) else f"after {self._most} restarts"
        saved = f", and {self._resume_hint()}" if self._records.has_checkpoint() else ""
        logs = f"the logs of the ranks are in {self._run / 'ranks'}"
        raise RunError(f"the run failed {why}; {logs}{saved}\n  " + "\n  ".join(lines))

    def _resume_hint(self) -> str:
        return f"`paceline resume {shlex.quote(str(self._run))}` goes on where it was last saved"

    def _stopped_before_training(self) -> int:
        """The exit status where the end was asked for while no rank could agree to it."""
        assert self._asked.first is not None
        message = f"stopped by {self._asked.first.name} before training began"
        if not self._records.has_checkpoint():
            if self._asked.first == signal.SIGINT:
                raise KeyboardInterrupt
            raise RunError(message)
        _say(f"{message}; {self._resume_hint()}")
        return EXIT_RESUMABLE

    def _sum_up(self) -> None:
        if number := len(self._failures):
            _say(f"{number} restart{'s'[: number != 1]}; {self._num_repeated} steps were made twice")


def _judge(found: dict[int, Status], ends: dict[int, int], num_ranks: int, asked: Asked) -> _Ended:
    """One exit status for all ranks, and who is to blame: those who died without a word before those who spoke."""
    if EXIT_USER in [status.code for status in found.values()]:
        return _Ended(EXIT_USER)
    own = {rank: status for rank, status in found.items() if status.is_failure}
    silent = [rank for rank in ends if rank not in found]
    if own and all(ends[rank] == -signal.SIGKILL for rank in silent):
        silent = []  # the watchdog of those who spoke did that, and said why
    if silent:
        return _Ended(EXIT_FAILED, _who_died(silent, ends, is_explained=bool(own)), was_said=False)
    if own:
        rank = next((rank for rank in ends if rank in own), min(own))
        return _Ended(own[rank].code, f"rank {rank} failed")
    if suffered := [status.consequence for status in found.values() if status.consequence]:
        return _Ended(EXIT_FAILED, str(suffered[0]), was_said=False)  # nobody died, and nobody said why
    if len(found) < num_ranks:
        hanging = ", ".join(str(rank) for rank in range(num_ranks) if rank not in found)
        name = asked.first.name if asked.first else "the failure of another"
        return _Ended(EXIT_FAILED, f"rank {hanging} did not end after {name} and was killed", was_said=False)
    return _Ended(max(status.code for status in found.values()))


def _who_died(silent: list[int], ends: dict[int, int], *, is_explained: bool) -> str:
    """Names the ranks that died as the first of them did."""
    code = next((ends[rank] for rank in silent if ends[rank] < 0), ends[silent[0]])
    ranks = sorted(rank for rank in silent if ends[rank] == code)
    who = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
    if code >= 0:
        return f"{who} ended without a word (exit status {code})"
    name = signal.Signals(-code).name
    hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" and not is_explained else ""
    return f"{who} {'were' if len(ranks) > 1 else 'was'} killed by {name}{hint}"


def _loopback() -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    return None


def _say(line: str) -> None:
    """The launcher's own voice. A terminal that has gone away does not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
