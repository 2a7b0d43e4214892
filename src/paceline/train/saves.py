"""Decides when a run is saved, the same on all ranks; each rank writes its part while training continues.

A save copies tensors during the next forward and backward pass, which change none of them, and writes the copies during
later steps. Two saves never overlap: one that comes due meanwhile waits until an all-gather of a step shows that none
is under way. Training waits for the disk only for the best weights so far, at the end, and briefly if writing takes a
large part of the interval between saves.
"""

import contextlib
import dataclasses
import errno
import os
import shlex
import time
from collections.abc import Iterator
from functools import partial

from paceline.base import units
from paceline.base.errors import RunError
from paceline.base.process import has_launcher
from paceline.checkpoint import retention
from paceline.checkpoint.save import Outcome
from paceline.checkpoint.steps import list_steps
from paceline.train.checks import Checks
from paceline.train.meet import Setup
from paceline.train.progress import Progress
from paceline.world.group import SPEAKS_FIRST_S

_DISK_TIMEOUT_S = 600.0  # without one more byte on the disk; writers wait for each other as long
_ROUND_S = 0.2  # how often ranks that wait for a save meet
_SAY_EVERY_S = 10.0  # while others wait for rank 0
_RETRY_EVERY_S = 5.0  # after a failed last save
# If saves are less than _OFTEN_S apart, training waits for each, at most _WAIT_S, so that a crash repeats one interval.
_OFTEN_S, _WAIT_S = 4.0, 1.0


class Saves:
    """The saves of one run, on one rank."""

    def __init__(self, setup: Setup, checks: Checks) -> None:
        self._setup, self._checks = setup, checks
        self._config, self._group, self._progress = setup.config.checkpoint, setup.group, setup.progress
        self._folder, self._saver = setup.checkpoints.checkpoints, setup.checkpoints.saver
        self.any_rank_saving = False  # as of the last step's all-gather
        self._due: list[int] = []  # steps whose save is due, and waits for the one that is under way
        self._saved_at_s = setup.progress.elapsed_s  # training time at the start of the last save
        self._saved_step = setup.progress.step  # of the newest checkpoint; 0: of none
        self._restored_step = setup.progress.step  # whose checkpoint is there; 0: it may be none
        self._best: dict[int, float] = {}  # step and loss of the best one, while it is written
        # Hosts of `launch` have copies.
        self._has_noted = setup.world.rank in setup.checkpoints.writers or has_launcher()
        self._best_step = 0  # of the last one that was to be kept as the best
        self._is_best_lost = False  # on rank 0: its save failed

    def has_changed(self) -> None:
        """The weights are no longer those that were restored, and perhaps evaluated: what is there is not of them."""
        self._restored_step = 0
        self._progress.val_loss = None

    def save_if_due(self) -> None:
        """Starts a save of this step if one is due, by its number or by the time since the last save."""
        every, since_s = self._config.every, self._progress.elapsed_s - self._saved_at_s
        is_late = self._config.every_s > 0 and since_s >= self._config.every_s
        self._save(is_due=self._progress.step % every == 0 if every else is_late)

    def _save(self, is_due: bool) -> None:
        """Starts a save of this step if one is due, or waits."""
        self.report()
        if not self.any_rank_saving:
            self._note()
        if is_due and self.any_rank_saving and not self._due:  # printed once
            self._setup.console.say(
                f"step {self._progress.step}: the last checkpoint is still being written, the next one waits for it. "
                "Writing takes longer than the checkpoint interval",
                style="yellow",
            )
            self._setup.recorder.event("checkpoint postponed", step=self._progress.step)
        if is_due:
            self._due.append(self._progress.step)
        if self._due and not self.any_rank_saving:
            is_often = self._progress.elapsed_s - self._saved_at_s < _OFTEN_S
            self._begin(self._progress)
            if is_often and self._setup.world.is_main:  # the others wait for rank 0 in the next step
                self._saver.finish(within_s=_WAIT_S)

    def forget_lost_best(self) -> None:
        """If the save of the best step failed, the best loss is that of a checkpoint that is there. Collective."""
        self.report()
        best = self._progress.best_val_loss
        if self._is_best_lost:
            with contextlib.suppress(OSError):
                best, self._is_best_lost = retention.mark(self._folder, {}), False
        self._progress.best_val_loss = self._group.broadcast_json(best)

    def save_best(self) -> None:
        """Keeps this step as the best so far: its checkpoint that was just started, or a new one."""
        assert self._progress.val_loss is not None
        self._best_step = self._progress.step
        if self._saved_step == self._progress.step:
            self._best = {self._progress.step: self._progress.val_loss}
            self.report()
            return
        if self.any_rank_saving:
            with self._disk_timeout():
                self._finish()
            self.any_rank_saving = False
        self._save(is_due=True)

    def save_and_wait(self, progress: Progress) -> None:
        """Saves as of `progress` and waits until it is on the disk. Collective. If the disk fails, retries for
        checkpoint.retry-s, then raises RunError on all ranks.

        Then sets checkpoints of later steps aside, so that this one is the newest.
        """
        began_s, is_again = time.monotonic(), False
        while (problem := self._try(progress, is_again)) is not None:
            left_s = self._config.retry_s - (time.monotonic() - began_s)
            is_over, newest = self._group.broadcast_json([left_s <= 0, self._newest()])
            if is_over:
                raise RunError(
                    f"training reached step {progress.step}, and its last checkpoint could not be saved: {problem}. "
                    f"{newest}. {_remedy(problem)} and continue by "
                    f"`paceline resume {shlex.quote(self._setup.folder.shown)}`",
                    reach="world",
                )
            if not is_again:
                self._setup.console.say(
                    f"this is the last checkpoint of the run. {newest}. {_remedy(problem)}: it is tried again every "
                    f"{_RETRY_EVERY_S:.0f} s, for {units.duration(left_s)} (--checkpoint.retry-s)",
                    style="red",
                )
            is_again = True
            self._sleep(min(_RETRY_EVERY_S, max(0.0, left_s)))

    def report(self, is_again: bool = False) -> Outcome | None:
        """Prints and records the result of a save once, and returns it; the failure of a retry goes to the log only."""
        outcome = self._saver.take_outcome()
        if outcome is not None and self._setup.world.is_main:
            self._record(outcome, is_again)
            self._is_best_lost |= bool(outcome.problem) and outcome.step == self._best_step
        self._report_news()
        if self._best and not self._saver.is_busy:
            if self._setup.world.is_main:
                with contextlib.suppress(OSError):  # the failed checkpoint was already reported
                    retention.mark(self._folder, self._best)
            self._best = {}
        return outcome

    def send_the_rest(self) -> None:
        """Returns when checkpoint.to has all checkpoints, or that is given up. Collective."""

        def wait() -> None:
            self._setup.watchdog.enter("save", self._progress.step)
            self._report_news()

        with self._disk_timeout():
            self._setup.checkpoints.send_the_rest(wait)
            self._report_news()

    def _report_news(self) -> None:
        say = partial(self._setup.console.say, style="yellow")
        self._setup.checkpoints.report_news(self._setup.recorder.event, say)

    def _record(self, outcome: Outcome, is_again: bool) -> None:
        recorder, console, step = self._setup.recorder, self._setup.console, outcome.step
        if outcome.problem and is_again:
            console.log(f"the checkpoint of step {step}: {outcome.problem}")
        else:
            recorder.saved(outcome)
        if outcome.problem and not is_again:
            console.say(f"the checkpoint of step {step} could not be saved: {outcome.problem}", style="red")
        if outcome.remark:
            console.say(outcome.remark, style="yellow")
            recorder.event("checkpoints gone", step=step, remark=outcome.remark)

    def _begin(self, progress: Progress) -> None:
        """Starts a save of weights and state as of `progress`. Collective. Raises RunError, before anything is saved,
        if replicas differ."""
        # It also stands for the steps that came due while the last one was being written.
        due_before = [step for step in self._due if self._config.every and step < progress.step]
        self._due.clear()
        self._saved_at_s, self._saved_step = self._progress.elapsed_s, progress.step
        self._restored_step = 0  # this save may remove it
        if self._setup.config.parallel.check_every:
            self._checks.replicas(before_save=True)
        self._setup.at("save")
        facts = {
            "progress": dataclasses.asdict(progress),
            "val_loss": progress.val_loss,
            "due_steps": [*due_before, progress.step],
            "data": self._setup.data.blend.fingerprint,
            "config": dataclasses.asdict(self._setup.config),
        }
        self._setup.checkpoints.begin(progress.step, facts)
        self._group.take_traffic()

    def _try(self, progress: Progress, is_again: bool) -> str | None:
        """Saves and waits. Returns the problem; None: it is on the disk. Collective."""
        with self._disk_timeout():
            self._finish()
            self.report()
            error: str | None = None
            if not progress.step or progress.step != self._restored_step:  # else it is there, and every byte was read
                self._begin(progress)
                self._finish()
                outcome = self.report(is_again)
                error = outcome.problem if outcome else "its writer did not finish"
            # Not before: if this save fails, a resume needs the later ones.
            if error is None and self._setup.world.is_main and progress.step < self._progress.step:
                with contextlib.suppress(OSError):  # then a resume begins at a later one
                    retention.set_aside(self._folder, progress.step)
            problem: str | None = self._group.broadcast_json(error)
            if problem is None:
                self._note()
        return problem

    def _note(self) -> None:
        """Notes on a host that does not see rank 0's folder that the run has checkpoints, which may be lost there."""
        if self._saved_step and not self._has_noted:
            self._has_noted = True
            with contextlib.suppress(OSError):
                self._setup.folder.saved_elsewhere.touch(0o600)

    def _finish(self) -> None:
        """Waits until no rank has a save under way. Collective: ranks meet meanwhile, and their watchdogs see progress
        unless no byte has come to the disk for _DISK_TIMEOUT_S."""
        began_s, said_s = time.monotonic(), _SAY_EVERY_S
        grown_s, seen = began_s, -1
        while True:
            num_bytes = self._saver.num_written_bytes if self._setup.world.is_main else 0
            rows = self._group.share_integers([int(self._saver.is_busy), num_bytes])
            if not any(is_busy for is_busy, _ in rows):
                return
            now_s = time.monotonic()
            if rows[0][1] != seen:
                grown_s, seen = now_s, rows[0][1]
            if now_s - grown_s <= _DISK_TIMEOUT_S:
                self._setup.watchdog.enter("save", self._progress.step)
            if now_s - began_s > said_s:
                self._setup.console.say(f"saving the checkpoint of step {self._saver.begun_at}: {said_s:.0f} s")
                said_s *= 2
            self._saver.finish(within_s=_ROUND_S)

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._setup.watchdog.enter("save", self._progress.step)
            time.sleep(0.2)

    def _newest(self) -> str:
        try:
            steps = list_steps(self._folder) if self._setup.world.is_main else []
        except OSError as error:  # as of a network disk that is away
            return f"Which checkpoint is the newest cannot be seen now: {error.strerror}"
        return f"The newest checkpoint is of step {steps[-1]}" if steps else "Nothing was saved before"

    @contextlib.contextmanager
    def _disk_timeout(self) -> Iterator[None]:
        """Lengthens the ranks' timeout: a slow disk is no hang."""
        usual_s = self._group.timeout_s
        self._group.set_timeout(max(usual_s, _DISK_TIMEOUT_S + SPEAKS_FIRST_S))
        yield
        self._group.set_timeout(usual_s)
        self._group.take_traffic()


def _remedy(problem: str) -> str:
    """Returns what to do about a save that failed for this reason."""
    is_full = any(os.strerror(number) in problem for number in (errno.ENOSPC, errno.EDQUOT))
    return "Make room" if is_full else "Mend what the disk refuses"
