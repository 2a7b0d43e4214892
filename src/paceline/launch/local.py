"""`--nproc N --max-restarts M`: runs N ranks of this command on this machine; if one fails, all of them start again.
With `--hosts` the ranks of other hosts belong to the run, too (hosts.py).

Ranks report their ends in the run folder (base/status.py), because torch's launcher knows only success and failure: 75
("saved, start me again") is neither. A later attempt runs the same command line; PACELINE_JOB tells its ranks which run
folder is theirs, and they resume from it.
"""

import contextlib
import os
import shlex
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from paceline.base import units
from paceline.base.errors import EXIT_FAILED, EXIT_RESUMABLE, PacelineError, RunError, UserError
from paceline.base.net import require_loopback
from paceline.base.say import say
from paceline.base.status import LAUNCHER, STATUS_FOLDER, Status, end_path, read_statuses
from paceline.launch import warm
from paceline.launch.attempt import Grace, run_attempt
from paceline.launch.ends import Ended, Ends, how_it_ended
from paceline.launch.job import ATTEMPT, JOB
from paceline.launch.place import LOOPBACK, Collected, Order, Place, Verdict
from paceline.launch.restarts import Failure, Records, delay_s, is_loop
from paceline.launch.signals import StopSignals
from paceline.launch.warm import WarmServer

_INTERRUPTED = 130  # exit status of a rank that Ctrl-C ended


class Group(Protocol):
    """The hosts of a run."""

    def meet(self, failures: list[Failure]) -> Place | Verdict: ...
    def order(self) -> Order: ...
    def collect(self, found: dict[int, Status], ends: dict[int, int]) -> Collected | None: ...
    def host_of(self, rank: int) -> str: ...
    def conclude(self, status: int, message: str = "") -> None: ...
    def close(self) -> None: ...


def start_ranks(
    command: Sequence[str],
    run: Path,
    open_group: Callable[[StopSignals], Group],
    *,
    max_restarts: int = 0,
    grace_s: float = 120.0,
    job: str = "",
    address: str = LOOPBACK,
    preload: Sequence[str] = (),
) -> int:
    """Runs the command as the ranks of this host, of the run in this folder, and returns all ranks' common exit status.

    After a failure that the user's input did not cause, all ranks start again, at most max_restarts times. grace_s: how
    long they may save after a signal, see `Grace`. job: names all attempts; empty: a random name. address: of the
    interface that ranks use, unless their config names one, or the user does and it is not loopback; empty: the backend
    chooses. preload: modules that ranks import; if there are any, ranks are forked from one process that has imported
    them (warm.py).

    Raises UserError if loopback is down; RunError naming the rank that died without a message, or listing all attempts;
    KeyboardInterrupt after a second Ctrl-C, or one before anything was saved.
    """
    require_loopback()
    if address and (name := _interface_of(address)):
        if address == LOOPBACK:  # a variable that is exported for several hosts would open ports to them
            os.environ["GLOO_SOCKET_IFNAME"] = name
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ[JOB] = job or uuid.uuid4().hex
    is_new = not run.exists()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_refused, run, is_new)
        signals = stack.enter_context(StopSignals())
        server = WarmServer(preload, command) if preload and warm.is_supported() else None
        if server:
            stack.enter_context(closing(server))
        group = stack.enter_context(closing(open_group(signals)))
        try:
            status = _Attempts(command, run, max_restarts, grace_s, group, signals, server).run()
        except PacelineError as error:
            group.conclude(error.exit_status, str(error))
            raise
        except KeyboardInterrupt:
            group.conclude(EXIT_RESUMABLE)
            raise
        group.conclude(status)
        return status


@dataclass
class _Attempts:
    command: Sequence[str]
    run_folder: Path
    most: int  # restarts
    grace_s: float
    group: Group
    signals: StopSignals
    server: WarmServer | None

    def __post_init__(self) -> None:
        self._records = Records(self.run_folder)
        self._begun_at = self._records.last_step()
        self._failures: list[Failure] = []
        self._num_repeated = self._num_attempts = self._world_size = 0
        self._stop: signal.Signals | None = None  # the signal that ends the run
        self._has_begun = False  # the attempt has begun to train

    def run(self) -> int:
        """Returns the common exit status. Raises RunError for what no rank has printed."""
        while True:
            place = self.group.meet(self._failures)
            if isinstance(place, Verdict):
                return self._obey(place)
            ended = self._attempt(place)
            if ended is None:
                continue
            if ended.status not in (EXIT_FAILED, _INTERRUPTED):
                if number := len(self._failures):
                    say(f"{units.plural(number, 'restart')}; {self._num_repeated} steps were made twice")
                return ended.status
            self._failures.append(Failure(ended.what, self._records.last_step()))
            if place.first_rank == 0 or place.knows_all:  # else rank 0, elsewhere, may still write
                self._records.close(ended.what, ended.was_said)
            delay = None if self._stop else delay_s(self._failures, self._begun_at, self.most)
            if delay is None:
                return self._give_up(ended)
            self._announce(delay)
            if self.signals.wait(delay):
                return self._stopped_before_training(self.signals.first)

    def _attempt(self, place: Place) -> Ended | None:
        """Returns how one attempt ended; None if another host judges that, or only the hosts are to change."""
        self._num_attempts, self._world_size = self._num_attempts + 1, place.world_size
        statuses, ranks = self._make_folder(place), place.own_ranks
        os.environ[STATUS_FOLDER], os.environ[ATTEMPT] = str(statuses.absolute()), str(place.attempt)
        before = self._records.last_step()
        grace = Grace(self.grace_s, self.run_folder / "checkpoints")
        ends = run_attempt(
            place, self.command, os.environ[JOB], self.signals, statuses, grace, self.group.order, self.server
        )
        began_at = self._records.began_at()
        self._has_begun = began_at is not None
        if place.attempt and began_at is not None:
            self._num_repeated += max(0, before - began_at)
        if self.signals.is_urgent:
            raise KeyboardInterrupt
        collected = self.group.collect(read_statuses(statuses, ranks, ends), ends)
        if collected is None:
            return None
        self._stop = self.signals.first or (signal.Signals[collected.stop] if collected.stop else None)
        return self._judge(place, collected)

    def _make_folder(self, place: Place) -> Path:
        """Returns the folder in which ranks report their ends, without the reports of an earlier attempt. Raises
        UserError if it cannot be written."""
        folder = self.run_folder / "ranks"
        try:
            for made in (self.run_folder, folder):
                made.mkdir(parents=True, exist_ok=True, mode=0o700)
            for rank in place.own_ranks:
                end_path(folder, rank).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot write in {folder}, where ranks report their ends: {error.strerror}") from None
        return folder

    def _judge(self, place: Place, collected: Collected) -> Ended | None:
        reports, lost = collected.found, collected.lost
        ends = Ends(
            ranks=place.judged,
            reports=reports,
            exits=collected.ends,
            stop=self._stop,
            grace_s=self.grace_s,
            has_begun=self._has_begun,
            are_all_known=not lost,
        )
        ended = how_it_ended(ends)
        if ended.is_early:
            return replace(ended, status=self._stopped_before_training(self._stop))
        if lost and 0 in reports and reports[0].is_good:  # rank 0 ends last: the run is saved
            ended = Ended(status=reports[0].code)
        if ended.status == EXIT_RESUMABLE and collected.takes_in and not self._stop:
            return None
        if ended.status == EXIT_FAILED and lost and not self._stop:
            what = f"lost {' and '.join(lost)}"
            self._records.close(what, was_said=False)
            say(f"{what}, after step {self._records.last_step()}")
            return None
        return ended

    def _obey(self, verdict: Verdict) -> int:
        if verdict.message:
            raise RunError(verdict.message)
        if verdict.stop:
            return self._stopped_before_training(signal.Signals[verdict.stop])
        return verdict.status

    def _announce(self, delay: float) -> None:
        last, number = self._failures[-1], len(self._failures)
        when = f" in {delay:.0f} s" if delay else ""
        say(f"{last.what}, after step {last.reached}; restart {number} of {self.most}{when}")

    def _give_up(self, ended: Ended) -> int:
        way_out = self._way_out()
        if len(self._failures) == 1:
            if not ended.was_said:
                raise RunError(f"{self._death(ended)}{f'. {way_out}' if way_out else ''}")
            if way_out:
                say(way_out)
            return ended.status
        lines = [f"attempt {k}: {failed.what}, after step {failed.reached}" for k, failed in enumerate(self._failures)]
        restarts = units.plural(len(lines) - 1, "restart")
        why = "three times in a row at the same step" if is_loop(self._failures) else f"after {restarts}"
        saved = f". {way_out}" if way_out else ""
        logs = f"the logs of the ranks are in {self.run_folder / 'ranks'}"
        raise RunError(f"the run failed {why}; {logs}{saved}\n  " + "\n  ".join(lines))

    def _death(self, ended: Ended) -> str:
        """Returns who died, where and when, and which log says more."""
        reached = self._records.last_step()
        where = socket.gethostname() if ended.rank is None else self.group.host_of(ended.rank)
        text = f"{ended.what}, on {where}" + (f", after step {reached}" if reached else "")
        if self._world_size > 1:
            text += "; the other ranks were stopped"
        log = self._records.log_of(ended.rank) if ended.rank is not None else None
        return f"{text}. The log of rank {ended.rank} is {log}" if log else text

    def _way_out(self) -> str:
        resume = f"`paceline resume {shlex.quote(str(self.run_folder))}`"
        if (newest := self._records.newest_checkpoint()) is not None:
            return f"The newest checkpoint is of step {newest}: {resume} resumes from there"
        return f"Nothing had been saved: {resume} begins again at step 0" if self._records.last_step() else ""

    def _stopped_before_training(self, by: signal.Signals | None) -> int:
        """Returns the exit status after a signal that came before any rank could act on it."""
        assert by is not None
        if by == signal.SIGINT and self._records.newest_checkpoint() is None:
            raise KeyboardInterrupt
        way_out = self._way_out() or "Nothing was saved: start the same command again"
        say(f"stopped by {by.name} before training began. {way_out}")
        return EXIT_RESUMABLE


def _forget_refused(run: Path, is_new: bool) -> None:
    """Removes what the launcher has made in the folder of a run that its ranks refused, or that was stopped at once."""
    if (run / "config.toml").exists():
        return
    with contextlib.suppress(OSError):
        for path in (run / "ranks").glob("rank-*.end"):
            path.unlink()
        (run / "ranks").rmdir()
        if is_new:
            run.rmdir()


def _interface_of(name: str) -> str | None:
    address = socket.gethostbyname(name)
    found = psutil.net_if_addrs().items()
    return next((str(name) for name, known in found if any(a.address == address for a in known)), None)
