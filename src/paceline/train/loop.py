"""A whole run, in chapters. The file to read first.

prepare    the data set, before ranks meet: it may take a while and nobody should wait for it in a collective
meet       open the world; all ranks have the same versions, config and data, or none trains (meet.py)
restore    a checkpoint, when resuming (keep.py)
train      steps (step.py), with evaluation, checks and saves between them, until the horizon or an agreed stop
finish     last evaluation, last checkpoint, a summary
"""

import time
import traceback
from functools import partial

import torch

from paceline import __version__
from paceline.base import faults, units
from paceline.base.clock import Stopwatch
from paceline.base.errors import EXIT_DONE, EXIT_RESUMABLE, RunError, UserError
from paceline.data.prefetch import Prefetcher
from paceline.data.prepare import Quiet
from paceline.model.generate import generate
from paceline.model.gpt import build
from paceline.optim.schedule import lr_factor
from paceline.record.console import Console
from paceline.record.folder import COMPLETE
from paceline.sync.replicas import overall
from paceline.train import banner
from paceline.train.check import check_own_state, check_replicas
from paceline.train.feed import open_feed
from paceline.train.guard import StopRequest, tighten_timeouts
from paceline.train.keep import restore_run, save_if_due, save_now, tell_outcome
from paceline.train.meet import meet
from paceline.train.profile import profiled
from paceline.train.request import Request
from paceline.train.state import Run
from paceline.train.step import train_step
from paceline.train.tell import evaluate_now, exchange
from paceline.world.env import Environment
from paceline.world.group import PeerLost
from paceline.world.runtime import open_world

_SAMPLE_TEMPERATURE = 0.7


def train(request: Request, env: Environment) -> int:
    """Trains as asked, as the rank that `env` says, and returns the exit status: 0, or 75 (stopped early, saved).

    Raises UserError or RunError; whoever sees it ends this process, which is how the other ranks learn of it.
    """
    console = Console(env.rank)
    faults.install(env.rank, env.world_size, env.attempt)

    # ---- prepare ----
    with console.reading() as report:
        feed = open_feed(request.config, report if env.local_rank == 0 else Quiet())

    # ---- meet ----
    with open_world(request.config.parallel, env) as world:
        try:
            run = meet(request, world, feed, console)
            with run.watchdog:
                return _train_and_record(run)
        except UserError as error:
            if error.reach == "host":
                error.reach = "rank"  # the ranks have met: what one sees now the others need not see
            raise


def _train_and_record(run: Run) -> int:
    try:
        is_resumed = (run.request.resume or run.request.goes_on) and restore_run(run)
        if not is_resumed:
            begin(run)
        with StopRequest(run.config.train.stop_after) as stop:
            stop_reason = _steps(run, stop)
            return _finish(run, stop_reason)
    except PeerLost as error:
        _fail(run, error)
        raise type(error)(f"{error}. {run.watchdog.explain() or ''}".rstrip(". "), reach="world") from error
    except BaseException as error:
        _fail(run, error)
        raise
    finally:
        run.folder.close()
        run.console.close()


def _fail(run: Run, error: BaseException) -> None:
    """Notes how this rank's part ended. No collective: the other ranks may be gone, or somewhere else entirely."""
    run.saver.abandon()
    run.console.log(f"stopped at step {run.progress.step}\n{traceback.format_exc()}")
    run.event("failed", step=run.progress.step, error=str(error) or type(error).__name__)


def begin(run: Run) -> None:
    """From step 0: a new run, or one that died before it had saved anything."""
    reached = run.folder.forget_after(0) if run.world.is_main else 0
    facts = {"reached": reached} if reached else {}
    versions = {"version": __version__, "torch": torch.__version__}
    run.event("start", world_size=run.world.world_size, hosts=run.hosts(), **versions, **facts)
    if run.request.resume or run.request.goes_on:
        run.console.say("nothing had been saved yet: this run begins again at step 0\n", style="yellow")


def _steps(run: Run, stop: StopRequest) -> str | None:
    """Trains until the horizon (returns None) or an agreed stop (returns its reason)."""
    config, settings = run.config, run.settings
    run.stopwatch = Stopwatch(run.progress.elapsed_s)
    run.saved_at_s = run.progress.elapsed_s  # what was resumed from is saved
    run.group.take_traffic()  # meeting and restoring belong to no step
    run.replica.before_update = partial(_before_update, run)
    shown = run.console.progress(settings.num_steps or config.train.time_budget)
    with Prefetcher(run.loader) as loader, shown:
        while (done := run.share_done()) < 1.0:
            run.stopwatch.start()
            started = time.perf_counter()
            lr = settings.lr * lr_factor(config.optim, run.progress.step, done)
            with profiled(run):
                result = train_step(
                    run.replica,
                    loader,
                    run.group,
                    run.clock,
                    run.at,
                    step=run.progress.step,
                    lr=lr,
                    max_norm=config.optim.grad_clip,
                )
            vote = exchange(run, result, started, stop, lr)
            run.stopwatch.pause()
            tighten_timeouts(run, time.perf_counter() - started)
            if run.progress.skips_in_row >= config.train.max_skips:
                _give_up(run)
            if vote or run.progress.step == config.train.stop_at_step:
                return vote or "train.stop-at-step"
            _between_steps(run)
    return None


def _before_update(run: Run) -> None:
    """Weights and state change now: whoever still reads them, or watches that they do not change, is done."""
    run.saver.wait_copied()
    check_own_state(run)


def _between_steps(run: Run) -> None:
    """What happens every so many steps. All ranks come to the same answers, so collectives are safe here."""
    config, step = run.config, run.progress.step
    if run.share_done() >= 1.0:
        tell_outcome(run)
        return  # _finish evaluates, compares and saves
    if config.parallel.check_every and step % config.parallel.check_every == 0:
        check_replicas(run)
    if config.train.eval_every > 0 and step % config.train.eval_every == 0:
        evaluate_now(run)
    is_best = config.checkpoint.keep_best and run.progress.is_best
    save_if_due(run, is_best or bool(config.checkpoint.every and step % config.checkpoint.every == 0))


def _give_up(run: Run) -> None:
    """Raises RunError after too many steps without an update. What is saved is the run before the first of them."""
    before, step = run.before_trouble, run.progress.step
    assert before is not None
    problem = save_now(run, before)
    saved = f"could not be saved: {problem}" if problem else f"is saved as step {before.step}"
    raise RunError(
        f"the gradient was not finite in {run.progress.skips_in_row} steps in a row, up to step {step}; no update was "
        f"made in them, and the state before them {saved}. Lower --optim.lr, or use --train.dtype bfloat16 or float32",
        reach="world",
    )


def _finish(run: Run, stop_reason: str | None) -> int:
    """Evaluates, saves, says what came out. Returns the exit status."""
    step, config, console = run.progress.step, run.config, run.console
    found = evaluate_now(run) if stop_reason is None and config.train.eval_every >= 0 else run.evaluation
    if problem := save_now(run, run.progress):
        raise RunError(
            f"training reached step {step}, and its last checkpoint could not be saved: {problem}", reach="world"
        )
    run.at("end")
    weights = run.replica.sync.full_weights()
    digest = overall(weights)
    state = run.group.share_text(overall({str(item): t for item, t in run.replica.optimizer.state().items()}))
    cost_s = round(run.stragglers.cost_ms / 1e3, 3)
    reason = stop_reason or COMPLETE
    run.event("end", step=step, digest=digest, state_digests=state, reason=reason, straggler_cost_s=cost_s)
    banner.where_time_went(console, run.totals, run.world)
    banner.who_was_slow(console, run.stragglers, run.totals, run.hosts())
    if stop_reason:
        console.say(f"stopped at step {step} ({stop_reason}); everything is saved")
    elif config.train.sample_tokens and run.world.is_main:
        _say_sample(run, weights)
    if found:
        trained = f"{units.count(run.progress.tokens)} tokens, {units.duration(run.progress.elapsed_s)} of training"
        console.say(f"\n{found.shown} at step {step}, {trained}", style="bold")
    console.say(f"run folder {run.folder.shown}   digest of the weights {digest}")
    banner.next_commands(console, config, run.folder.shown, finished=stop_reason is None)
    return EXIT_RESUMABLE if stop_reason else EXIT_DONE


def _say_sample(run: Run, weights: dict[str, torch.Tensor]) -> None:
    """Text from the trained model. Rank 0's alone, and no collective in it: the others wait at the end."""
    if run.feed.blend.tokenizer_json is None:
        return
    tokenizer, prompt = run.feed.blend.tokenizer(), run.config.train.sample_prompt
    start = tokenizer.prompt(prompt)
    if not start:
        return  # characters alone, which have nothing to begin with
    # A fresh model: where blocks are compiled, each new length would compile them again.
    model = build(run.config.model, run.config.train.seed, run.world.device)
    model.load_state_dict(weights)
    model.compute_dtype = run.settings.dtype
    ids = generate(
        model.eval(),
        start,
        run.config.train.sample_tokens,
        temperature=_SAMPLE_TEMPERATURE,
        top_k=50,
        generator=torch.Generator().manual_seed(run.config.train.seed),
    )
    run.console.say(f"A sample (temperature {_SAMPLE_TEMPERATURE}):")
    run.console.say(prompt + tokenizer.decode(list(ids)))
