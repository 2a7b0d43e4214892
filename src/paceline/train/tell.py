"""What a step leaves behind: the ranks' exchange, a row of metrics, a line for the person who watches."""

import dataclasses
import math
import time
from typing import Any, NamedTuple

from paceline.base import units
from paceline.model import cost
from paceline.record.console import rate
from paceline.record.rows import EvalRow, StepRow
from paceline.train.evaluate import Evaluation, evaluate
from paceline.train.guard import StopRequest
from paceline.train.state import Run
from paceline.train.step import StepResult
from paceline.train.stragglers import Over
from paceline.train.trouble import Trouble, flip_a_bit


def exchange(run: Run, result: StepResult, started: float, stop: StopRequest, lr: float) -> str | None:
    """The step's one small collective: loss, times and votes of all ranks. Returns why to stop, if any rank asks.

    Costs 10 float64 numbers a rank. `started` is this rank's clock at the step's beginning.
    """
    fault = run.at("exchange")
    if fault == "flip":
        flip_a_bit(next(iter(run.replica.sync.weights().values())))
    times, stop_reason = result.times, stop.reason
    mine = Exchanged(
        loss_sum=result.loss_sum,
        elapsed_s=run.stopwatch.elapsed_s,
        asks_to_stop=float(stop_reason is not None),
        saves=float(run.saver.is_busy),
        data_ms=times.data_ms,
        forward_ms=times.forward_ms,
        backward_ms=times.backward_ms,
        exposed_comm_ms=times.exposed_comm_ms,
        optim_ms=times.optim_ms,
        own_ms=(time.perf_counter() - started) * 1e3,
    )
    rows = [Exchanged(*values) for values in run.group.share(list(mine))]
    step_ms = (time.perf_counter() - started) * 1e3
    times.add(run.group.take_traffic(), run.clock)
    run.somebody_saves = any(theirs.saves for theirs in rows)
    num_tokens = run.settings.plan.global_batch_size * run.config.data.seq_len
    progress = run.progress
    if result.skipped and (run.before_trouble is None or not progress.skips_in_row):  # None: resumed amid trouble
        run.before_trouble = dataclasses.replace(progress)
    progress.step += 1
    progress.val_loss = None
    progress.tokens += num_tokens
    progress.elapsed_s = rows[0].elapsed_s
    progress.skips_in_row = progress.skips_in_row + 1 if result.skipped else 0
    row = step_row(run, result, rows, step_ms, num_tokens, lr)
    _tell_step(run, row, result.trouble)
    voters = [str(rank) for rank, theirs in enumerate(rows) if theirs.asks_to_stop]
    return f"{stop_reason or 'signal'} on rank {', '.join(voters)}" if voters else None


class Exchanged(NamedTuple):
    """What a rank tells the others of its step."""

    loss_sum: float
    elapsed_s: float  # of training
    asks_to_stop: float
    saves: float
    data_ms: float
    forward_ms: float
    backward_ms: float
    exposed_comm_ms: float  # until this exchange
    optim_ms: float
    own_ms: float  # from the step's beginning to this exchange


def step_row(
    run: Run, result: StepResult, rows: list[Exchanged], step_ms: float, num_tokens: int, lr: float
) -> StepRow:
    """Returns the row of the step that ended just now. rows: by rank."""
    times = result.times
    tokens_per_s = num_tokens / step_ms * 1e3
    flops_per_s = tokens_per_s * cost.flops_per_token(run.config.model, run.config.data.seq_len)
    return StepRow(
        step=run.progress.step,
        loss=math.fsum(theirs.loss_sum for theirs in rows) / num_tokens,
        lr=lr,
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        tokens=run.progress.tokens,
        step_ms=step_ms,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_s / run.world_peak if run.world_peak else None,
        compute_ms=times.compute_ms,
        data_ms=times.data_ms,
        forward_ms=times.forward_ms,
        backward_ms=times.backward_ms,
        comm_ms=times.comm_ms,
        exposed_comm_ms=times.exposed_comm_ms,
        optim_ms=times.optim_ms,
        other_ms=step_ms - times.compute_ms - times.exposed_comm_ms - times.optim_ms,
        comm_bytes=round(times.comm_bytes),
        world_size=run.world.world_size,
        rank_step_ms=[theirs.own_ms for theirs in rows],
        rank_compute_ms=[theirs.data_ms + theirs.forward_ms + theirs.backward_ms for theirs in rows],
        rank_data_ms=[theirs.data_ms for theirs in rows],
        rank_forward_ms=[theirs.forward_ms for theirs in rows],
        rank_backward_ms=[theirs.backward_ms for theirs in rows],
        rank_exposed_comm_ms=[theirs.exposed_comm_ms + max(0.0, step_ms - theirs.own_ms) for theirs in rows],
        rank_optim_ms=[theirs.optim_ms for theirs in rows],
    )


def _tell_step(run: Run, row: StepRow, trouble: Trouble | None) -> None:
    if trouble:
        run.event("skipped step", step=row.step, loss_scale=run.replica.scaler.scale, **dataclasses.asdict(trouble))
        run.console.say(f"step {row.step} made no update: {trouble} was not finite", style="yellow")
    if row.step % run.config.log.every == 0:
        _append(run, row)
    if run.totals.has_warmed_up and row.step != run.config.train.profile:
        run.totals.add(row)
        _watch_ranks(run, row)
    run.totals.has_warmed_up = True
    steps = run.settings.num_steps
    validation = f"  val {run.evaluation.loss:.3f}" if run.evaluation else ""
    run.console.advance(
        row.step if steps is not None else run.progress.elapsed_s,
        f"step {row.step}" + (f"/{steps}" if steps is not None else ""),
        f"loss {row.loss:.3f}{validation}  {rate(row.tokens_per_s)}  ETA {units.duration(_seconds_left(run, row))}",
    )


def _watch_ranks(run: Run, row: StepRow) -> None:
    """Notes who is found slow in this step, and who is not any more."""
    for found in run.stragglers.observe(row.step, row.parts()):
        rank, host = found.rank, run.hosts()[found.rank]
        if isinstance(found, Over):
            run.event("straggler over", step=row.step, rank=rank, host=host, cost_s=round(found.cost_s, 3))
            run.console.say(f"rank {rank} ({host}) is as fast as the others again; it cost {found.cost_s:.1f} s")
            continue
        facts = {"phase": found.phase, "ms": round(found.ms, 2), "median_ms": round(found.median_ms, 2)}
        run.event("straggler", step=row.step, rank=rank, host=host, since_step=found.since_step, **facts)
        run.console.say(
            f"rank {rank} ({host}) is slow since step {found.since_step}: {found.phase} takes it {found.ms:.1f} ms, "
            f"the median rank {found.median_ms:.1f} ms; all wait for it",
            style="yellow",
        )


def _seconds_left(run: Run, row: StepRow) -> float:
    if run.settings.num_steps is None:
        return max(0.0, run.config.train.time_budget - run.progress.elapsed_s)
    mean_ms = run.totals.sum("step_ms") / run.totals.num_steps if run.totals.num_steps else row.step_ms
    return (run.settings.num_steps - row.step) * mean_ms / 1e3


def evaluate_now(run: Run) -> Evaluation:
    """Returns the validation loss of this step, told and recorded. Collective."""
    started = time.perf_counter()
    found = evaluate(
        run.replica.model,
        run.validation,
        run.feed.blend,
        run.group,
        batch=run.settings.plan.device_batch_size,
        lockstep=run.replica.sync.lockstep,
        at=run.at,
    )
    run.group.take_traffic()  # it belongs to no step
    run.evaluation = found
    run.progress.val_loss = found.loss
    run.progress.best_val_loss = min(found.loss, run.progress.best_val_loss or math.inf)
    row = EvalRow(
        step=run.progress.step,
        val_loss=found.loss,
        val_bpb=found.bpb,
        tokens=run.progress.tokens,
        val_tokens=found.num_tokens,
        eval_ms=(time.perf_counter() - started) * 1e3,
        elapsed_s=run.progress.elapsed_s,
    )
    _append(run, row)
    run.console.say(f"step {row.step}: {found.shown}")
    return found


def _append(run: Run, row: StepRow | EvalRow) -> None:
    if run.world.is_main:
        run.folder.append_metrics({name: _json_safe(value) for name, value in dataclasses.asdict(row).items()})


def _json_safe(value: Any) -> Any:
    """NaN and infinity as null: JSON has neither, and most readers stop at them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
