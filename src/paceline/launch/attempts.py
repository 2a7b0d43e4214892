"""Attempt after attempt, until a run is done, stopped, or has failed too often: what a launcher does, whether its ranks
are on this host (local.py) or on several (coordinator.py)."""

import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from paceline.base import units
from paceline.base.errors import EXIT_FAILED, EXIT_RESUMABLE, RunError
from paceline.base.process import EXIT_INTERRUPTED, say
from paceline.launch.ends import Ended, Ends, how_it_ended
from paceline.launch.restarts import Failure, delay_s, is_loop
from paceline.launch.signals import StopSignals


class Progress(Protocol):
    """A run's progress, as its records show it (restarts.Records)."""

    def last_step(self) -> int: ...
    def began_at(self) -> int | None: ...
    def newest_checkpoint(self) -> int | None: ...
    def log_of(self, rank: int) -> Path | None: ...
    def close(self, what: str, was_said: bool) -> None: ...
    def host_of(self, rank: int | None) -> str: ...


class Attempts:
    """One run of a command."""

    def __init__(
        self,
        run_attempt: Callable[[int], Ends | None],
        records: Progress,
        run: Path,
        most: int,
        grace_s: float,
        signals: StopSignals,
    ):
        """run_attempt: runs one attempt; None: a signal came before it began. run: the run folder. most: allowed
        restarts. grace_s: how long ranks may save after a signal."""
        self._run_attempt, self._records, self._run_folder = run_attempt, records, run
        self._most, self._grace_s, self._signals = most, grace_s, signals
        self._failures: list[Failure] = []
        self._num_repeated = self._world_size = 0
        self._stop: signal.Signals | None = None  # the signal that ends the run

    def run(self) -> int:
        """Returns the common exit status of all ranks. Raises RunError for what no rank has printed, and
        KeyboardInterrupt after a second Ctrl-C, or one before anything was saved."""
        attempt, begun_at = 0, self._records.last_step()
        while True:
            ended = self._attempt(attempt)
            attempt += 1
            if ended is None:
                continue
            if ended.status not in (EXIT_FAILED, EXIT_INTERRUPTED):
                if number := len(self._failures):
                    say(f"{units.plural(number, 'restart')}; {self._num_repeated} steps were made twice")
                return ended.status
            self._failures.append(Failure(ended.what, self._records.last_step()))
            self._records.close(ended.what, ended.was_said)
            delay = None if self._stop else delay_s(self._failures, begun_at, self._most)
            if delay is None:
                return self._give_up(ended)
            self._announce(delay)
            if self._signals.wait(delay):
                return self._stopped_before_training()

    def _attempt(self, attempt: int) -> Ended | None:
        """Returns how one attempt ended; None if only the hosts are to change."""
        before = self._records.last_step()
        ends = self._run_attempt(attempt)
        if self._signals.is_urgent:
            raise KeyboardInterrupt
        if ends is None:
            return Ended(status=self._stopped_before_training())
        began_at = self._records.began_at()
        self._world_size = len(ends.ranks)
        if attempt and began_at is not None:
            self._num_repeated += max(0, before - began_at)
        stop = self._stop = self._signals.first
        ends = replace(ends, stop=stop, grace_s=self._grace_s, has_begun=began_at is not None)
        ended = how_it_ended(ends)
        if ended.is_early:
            return replace(ended, status=self._stopped_before_training())
        if ends.lost and 0 in ends.reports and ends.reports[0].is_good:  # rank 0 ends last: the run is saved
            ended = Ended(status=ends.reports[0].code)
        if ended.status == EXIT_RESUMABLE and ends.makes_room and not stop:
            return None
        if ended.status == EXIT_FAILED and ends.lost and not stop:
            what = f"lost {' and '.join(ends.lost)}"
            self._records.close(what, was_said=False)
            say(f"{what}, after step {self._records.last_step()}")
            return None
        return ended

    def _announce(self, delay: float) -> None:
        last, number = self._failures[-1], len(self._failures)
        when = f" in {delay:.0f} s" if delay else ""
        say(f"{last.what}, after step {last.reached}; restart {number} of {self._most}{when}")

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
        logs = f"the logs of the ranks are in {self._run_folder / 'ranks'}"
        raise RunError(f"the run failed {why}; {logs}{saved}\n  " + "\n  ".join(lines))

    def _death(self, ended: Ended) -> str:
        """Returns who died, where and when, and which log says more."""
        reached = self._records.last_step()
        text = f"{ended.what}, on {self._records.host_of(ended.rank)}" + (f", after step {reached}" if reached else "")
        if self._world_size > 1:
            text += "; the other ranks were stopped"
        log = self._records.log_of(ended.rank) if ended.rank is not None else None
        return f"{text}. The log of rank {ended.rank} is {log}" if log else text

    def _way_out(self) -> str:
        resume = f"`paceline resume {shlex.quote(str(self._run_folder))}`"
        if (newest := self._records.newest_checkpoint()) is not None:
            return f"The newest checkpoint is of step {newest}: {resume} resumes from there"
        return f"Nothing had been saved: {resume} begins again at step 0" if self._records.last_step() else ""

    def _stopped_before_training(self) -> int:
        """Returns the exit status after a signal that came before any rank could act on it."""
        by = self._signals.first
        assert by is not None
        if by == signal.SIGINT and self._records.newest_checkpoint() is None:
            raise KeyboardInterrupt
        way_out = self._way_out() or "Nothing was saved: start the same command again"
        say(f"stopped by {by.name} before training began. {way_out}")
        return EXIT_RESUMABLE
