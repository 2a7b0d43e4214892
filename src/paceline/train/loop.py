"""A complete run, in chapters. Read this file first.

prepare    the data, before ranks meet: it may take a while, and no rank should wait for it in a collective
meet       open the world; all ranks have the same versions, config and data, or none trains (meet.py)
restore    a checkpoint, when resuming (restoring.py)
train      steps (replica/step.py), with evaluation, checks and saves between them, until the horizon or an agreed stop
finish     last checkpoint, last evaluation, a summary
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from functools import partial

import torch

from paceline.base import faults, units
from paceline.base.clock import Stopwatch
from paceline.base.errors import EXIT_DONE, EXIT_RESUMABLE, RunError, UserError
from paceline.data.config import Quiet
from paceline.data.loader import Prefetcher
from paceline.model.gpt import GPT
from paceline.optim.schedule import lr_factor
from paceline.record.console import Console
from paceline.record.folder import COMPLETE
from paceline.replica.balance import Balancer
from paceline.replica.batch import Batch
from paceline.replica.contents import ReplicaContents
from paceline.replica.result import StepResult, Trouble
from paceline.replica.stopping import StopRequest
from paceline.sync.replicas import overall
from paceline.train import banner
from paceline.train.checks import Checks
from paceline.train.data import dropout_keys, dummy_micro_batch, layered, open_data
from paceline.train.evaluate import evaluate, say_sample
from paceline.train.follower import following
from paceline.train.meet import Setup, meet
from paceline.train.progress import Progress
from paceline.train.recorder import cause_of, shown
from paceline.train.request import Request
from paceline.train.resolve import out_of_memory
from paceline.train.restoring import restore_or_begin
from paceline.train.saves import Saves
from paceline.world.env import Environment
from paceline.world.group import SPEAKS_FIRST_S, PeerLost
from paceline.world.runtime import open_world


def train(request: Request, env: Environment) -> int:
    """Trains as the rank in `env`, and returns the exit status: 0, or 75 (stopped early, saved). Raises UserError or
    RunError. The caller must then end this process, so that the other ranks notice."""
    console = Console(env.rank)
    faults.install(env.rank, env.world_size, env.attempt)

    # ---- prepare ----
    stopping = StopRequest(request.config.train.stop_after, is_training=False)
    with stopping as stop, following(request.config, console, lambda: bool(stop.vote)) as follower:
        with console.reading() as report:
            is_first = env.local_rank == 0  # of its host: it checks files, and says what it prepares itself
            is_new = not (request.resume or request.is_restart)
            data = open_data(request.config, report if is_first else Quiet(), checks=is_first, is_new=is_new)

        # ---- meet ----
        with open_world(request.config.parallel, env) as world:
            try:
                setup = meet(request, world, data, console, stop)
                if world.is_main:
                    follower.start(setup.folder)
                with setup.watchdog, _failure_recorded(setup):
                    # ---- restore ----
                    restore_or_begin(setup)

                    # ---- train ----
                    training = Training(setup)
                    stop.is_training = True  # from now on signals set the stop flag, and progress is saved
                    reason = training.steps()

                    # ---- finish ----
                    return training.finish(reason)
            except UserError as error:
                if error.reach == "host":
                    error.reach = "rank"  # the other ranks may not see this error
                raise


@contextlib.contextmanager
def _failure_recorded(setup: Setup) -> Iterator[None]:
    """Records this rank's failure without a collective: other ranks may be gone, or in another collective."""
    try:
        yield
    except BaseException as error:
        told = error
        if isinstance(error, PeerLost):
            text, culprits = setup.watchdog.explained(error)  # which the first of the other ranks prints
            told = type(error)(text, reach="rank" if setup.world.is_first(culprits) else "world")
        elif isinstance(error, torch.OutOfMemoryError):
            told = out_of_memory(error, setup.settings, setup.world.facts[setup.world.rank])
        setup.checkpoints.saver.abandon()
        setup.recorder.failed(setup.progress.step, told.with_traceback(error.__traceback__))
        if told is not error:
            raise told from error
        raise
    finally:
        setup.folder.close()
        setup.console.close()


class Training:
    """The steps of a run and what comes between them, on one rank."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.progress, self.config = setup, setup.progress, setup.config
        self.checks = Checks(setup)
        self.saves = Saves(setup, self.checks)
        self.stopwatch = Stopwatch(setup.progress.elapsed_s)
        self.before_skips: Progress | None = None  # before the current run of skipped steps
        self.troubles: list[Trouble | None] = []  # of the current run of skipped steps
        self.is_warm = False  # this process has made a step
        sequences = setup.loader.plan_at(setup.progress.step).num_sequences()
        self.balancer = Balancer(sequences) if self.config.parallel.shares == "auto" else None

    # ---- train ----

    def steps(self) -> str | None:
        """Trains to the horizon (returns None) or to an agreed stop (returns its reason)."""
        setup, config, progress = self.setup, self.config, self.progress
        setup.group.take_traffic()  # meeting and restoring belong to no step
        shown_progress = setup.console.progress(1.0)
        with Prefetcher(setup.loader) as loader, shown_progress:
            # An earlier attempt may have ended after its save, before the evaluation.
            is_missing = progress.step > 0 and progress.val_loss is None and setup.settings.share_done(progress) < 1.0
            if is_missing and self._is_evaluation_due() and (reason := self._evaluate()):
                return reason
            while (done := setup.settings.share_done(progress)) < 1.0:
                self.stopwatch.start()
                lr = setup.settings.lr * lr_factor(config.optim, progress.step, done)
                with setup.recorder.profiled(progress.step + 1):
                    result = self._step(loader, lr)
                    self.stopwatch.pause()  # inside: writing a trace is no training time
                self._advance(result, lr)
                self._tighten_timeouts(result.times.step_ms / 1e3)
                if progress.skips_in_row >= config.train.max_skips:
                    self._give_up()
                if result.stop_reason or progress.step == config.train.stop_at_step:
                    return result.stop_reason or "train.stop-at-step"
                if reason := self._between_steps():
                    return reason
        return None

    def _step(self, loader: Prefetcher, lr: float) -> StepResult:
        """Makes one update. Collective; the learning rate is the same on all ranks."""
        setup, replica = self.setup, self.setup.replica
        plan = setup.loader.plan_at(self.progress.step)
        for group in replica.param_groups():
            group["lr"] = lr
        model = replica.model
        assert isinstance(model, GPT)
        together, number = self.config.train.layered_micro_batches, self.progress.step
        batch = Batch(
            lambda: layered(loader.micro_batches(number), together),
            count=math.ceil(plan.num_micro_batches(setup.world.rank) / together),
            passes=plan.passes,
            stand_in=partial(dummy_micro_batch, setup.loader),
        )
        step = replica.step(batch, total=setup.settings.tokens_per_step)
        for micro_batch, sizes in step:
            keys = dropout_keys(model.config.dropout, micro_batch, self.config.train.seed)
            loss = model(micro_batch.tokens, micro_batch.targets, keys, micro_batch.documents, sizes)
            step.backward(loss, weight=micro_batch.targets.numel(), is_sum=True)
        self.checks.own_state()
        numbers = (self.stopwatch.elapsed_s, float(setup.checkpoints.saver.is_busy))
        return step.finish(max_norm=self.config.optim.grad_clip, numbers=numbers)

    def _advance(self, result: StepResult, lr: float) -> None:
        """Advances the progress by a step, the same on all ranks, and records the step."""
        progress = self.progress
        if result.skipped:
            if self.before_skips is None or not progress.skips_in_row:  # None: resumed amid skipped steps
                self.before_skips, self.troubles = dataclasses.replace(progress), []
            self.troubles.append(result.skipped)
        self.saves.any_rank_saving = any(is_busy for _, is_busy in result.numbers)
        progress.step += 1
        progress.val_loss = None
        progress.tokens += round(result.weight)
        progress.elapsed_s = result.numbers[0][0]
        progress.skips_in_row = progress.skips_in_row + 1 if result.skipped else 0
        sequences = self.setup.loader.plan_at(progress.step - 1).num_sequences()
        self.setup.recorder.step(progress, result, sequences, lr, self.setup.replica.scaler.scale)
        self._rebalance(sequences, result)
        progress.sequences = self.setup.loader.plan_at(progress.step).num_sequences()

    def _rebalance(self, sequences: list[int], result: StepResult) -> None:
        """Changes the shares from the step after the next on, which is being read: the same on all ranks."""
        change = self.balancer.observe(sequences, result.by_rank) if self.balancer else None
        if change is None:
            return
        loader, first = self.setup.loader, self.progress.step + 1
        loader.change(first, loader.plan_at(first).with_shares(change.shares))
        self.setup.recorder.rebalanced(first + 1, change, sequences)

    def _between_steps(self) -> str | None:
        """Checks, saves and evaluates if due, the same on all ranks. Returns why to stop. Saves before the evaluation,
        so that a run that ends during a long evaluation resumes here."""
        every = self.config.parallel.check_every
        if self.setup.settings.share_done(self.progress) >= 1.0:
            self.saves.report()
            return None  # `finish` saves, evaluates and compares
        if every and self.progress.step % every == 0:
            self.checks.replicas()
        self.saves.save_if_due()
        return self._evaluate() if self._is_evaluation_due() else None

    def _is_evaluation_due(self) -> bool:
        every = self.config.train.eval_every
        return every > 0 and self.progress.step % every == 0

    def _evaluate(self) -> str | None:
        """Evaluates this step, and saves it if it is the best so far. Collective. Returns why to stop, if a rank's stop
        flag was set meanwhile. Then the step may have no validation loss until the run is resumed."""
        setup, progress = self.setup, self.progress
        with setup.replica.sync.shared_weights():
            row = evaluate(setup)
        reason = setup.replica.agree_to_stop()  # now, since the next step may take too long
        setup.group.take_traffic()  # it belongs to no step
        if row is None:
            return reason
        progress.val_loss = row.val_loss
        if self.config.checkpoint.keep_best:
            self.saves.forget_lost_best()
        if math.isfinite(row.val_loss) and (progress.best_val_loss is None or row.val_loss < progress.best_val_loss):
            progress.best_val_loss = row.val_loss
        setup.recorder.evaluated(row)
        if self.config.checkpoint.keep_best and progress.is_best:
            self.saves.save_best()
        return reason

    def _tighten_timeouts(self, step_s: float) -> None:
        """Shortens the timeouts after this process's first step, when compiling, reading and meeting are over: to
        parallel.step-timeout-s, or ten times the step's time if that is longer."""
        if self.is_warm:
            return
        self.is_warm = True
        group, watchdog = self.setup.group, self.setup.watchdog
        slowest_s = max(row[0] for row in group.share([step_s]))
        watchdog.timeout_s = max(self.config.parallel.step_timeout_s, 10 * slowest_s)
        group.set_timeout(watchdog.timeout_s + SPEAKS_FIRST_S)
        group.take_traffic()

    def _give_up(self) -> None:
        """Raises RunError after too many skipped steps in a row. Saves the state before the first of them."""
        before = self.before_skips
        assert before is not None
        try:
            self.saves.save_and_wait(before)
            saved = f"is saved as step {before.step}"
        except RunError as error:
            saved = f"is not saved: {error}"
        self.saves.send_the_rest()  # this process ends now, and another machine may continue the run
        raise RunError(
            f"the gradient was not finite in {self.progress.skips_in_row} steps in a row, up to step "
            f"{self.progress.step}; no update was made in them, and the state before them {saved}. Try this: "
            f"{cause_of(self.troubles, self.setup.recorder.hosts)}",
            reach="world",
        )

    # ---- finish ----

    def finish(self, stop_reason: str | None) -> int:
        """Saves, evaluates and prints the result. Returns the exit status."""
        setup, step, config = self.setup, self.progress.step, self.config
        console, recorder = setup.console, setup.recorder
        if stop_reason:
            console.say(f"stopping at step {step} ({stop_reason}): saving")
        is_done = setup.settings.share_done(self.progress) >= 1.0  # also if it was stopped in its last step
        if is_done and setup.replica.merge():
            self.saves.has_changed()
        self.saves.save_and_wait(self.progress)
        if stop_reason is None and config.train.eval_every >= 0 and self.progress.val_loss is None:
            reason = self._evaluate()
            stop_reason = reason if self.progress.val_loss is None else None  # else the run is complete
            self.saves.report()
        setup.at("end")
        weights = setup.replica.sync.full_weights()
        digest = overall(weights)
        tensors, _, _ = ReplicaContents(setup.replica, "").state()
        states = setup.group.share_text(overall({str(item): tensor for item, tensor in tensors.items()}))
        self.saves.send_the_rest()
        recorder.ended(step, stop_reason or COMPLETE, digest=digest, state_digests=states)
        if setup.checkpoints.storage is not None:
            setup.checkpoints.storage.release()
        if stop_reason:
            console.say(f"stopped at step {step} ({stop_reason}); everything is saved")
        elif config.train.sample_tokens:
            say_sample(setup, weights)
        if row := recorder.evaluation:
            trained = f"{units.count(self.progress.tokens)} tokens, {units.duration(self.progress.elapsed_s)}"
            console.say(f"\n{shown(row)} at step {row.step}, {trained} of training", style="bold")
        console.say(f"run folder {setup.folder.shown}   digest of the weights {digest}")
        banner.next_commands(
            console, setup.settings, setup.data, self.progress, setup.folder.shown, finished=stop_reason is None
        )
        return EXIT_RESUMABLE if stop_reason else EXIT_DONE
