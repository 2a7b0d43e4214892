"""What rank 0 records of steps: a row of metrics for each, and the ranks that others wait for."""

import itertools
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from paceline.base import units
from paceline.checkpoint.save import Outcome
from paceline.record import summary
from paceline.record.config import LogConfig
from paceline.record.console import Console
from paceline.record.folder import RunFolder, last_event
from paceline.record.rows import MOST_LISTED, StepRow
from paceline.record.state import read_state
from paceline.record.stragglers import Over, Stragglers
from paceline.record.summary import Totals
from paceline.replica.result import StepResult, StepTimes
from paceline.world.processor import peak_flops
from paceline.world.runtime import World

_BY_RANK = ("step_ms", "compute_ms", "data_ms", "forward_ms", "backward_ms", "optim_ms")  # of StepTimes, in each row


class StepRecorder:
    """Rank 0's records of steps and events, and its sums over steps; on other ranks it records nothing."""

    def __init__(self, world: World, folder: RunFolder, console: Console, log: LogConfig):
        self.hosts = [peer.host for peer in world.peers]  # by rank
        self.totals, self.stragglers = Totals(), Stragglers(world.world_size)
        self.world, self.folder, self.console = world, folder, console
        self._log = log

    def event(self, kind: str, **facts: Any) -> None:
        if self.world.is_main:
            self.folder.append_event(kind, **facts)

    def machines(self) -> dict[str, Any]:
        """Returns the hosts and devices by rank, of an attempt's first event: `paceline plan --cluster RUN` plans for
        these machines."""
        names = ("device", "processor", "threads", "free_bytes")
        devices = [{name: getattr(each, name) for name in names} for each in self.world.facts]
        shares_memory = self.world.facts[0].shares_memory  # so nothing is sent
        return {"world_size": len(devices), "hosts": self.hosts, "devices": devices, "shares_memory": shares_memory}

    def record(
        self,
        result: StepResult,
        step: int,
        *,
        is_usual: bool = True,
        more: Mapping[str, Any] | None = None,
        skipped: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> None:
        """Records a step. is_usual: it counts for the sums and for stragglers; a traced step does not, nor does the
        first, which is warm-up. more: further values of the row; skipped: of the event, if no rank updated. facts: see
        `step_row`. What takes time in proportion to the number of ranks, rank 0 does alone."""
        if result.skipped:
            self.event("skipped step", step=step, **(skipped or {}), **asdict(result.skipped))
        if self.world.is_main:
            self._record(step_row(result, self.world, step=step, **facts), is_usual, more or {})

    def say_progress(self, step: int, num_steps: int | None, facts: str, done: float, left_s: float | None) -> None:
        """Shows how far a loop is. left_s: None: not known."""
        at = f"step {step}" if num_steps is None else f"step {step}/{num_steps}"
        self.console.advance(done, at, facts if left_s is None else f"{facts}  ETA {units.duration(left_s)}")

    def seconds_left(self, num_steps: int, step_ms: float) -> float:
        """Returns how long so many steps will take; step_ms: of the newest one, as long as no other counts."""
        return num_steps * (self.totals.mean("step_ms") if self.totals.num_steps else step_ms) / 1e3

    def _record(self, row: StepRow, is_usual: bool, more: Mapping[str, Any]) -> None:
        if row.step % self._log.every == 0:
            slow_ranks = self.stragglers.reported if row.world_size > MOST_LISTED else ()  # else the row lists all
            self.folder.append_metrics({**row.recorded(slow_ranks), **more})
        if row.world_size > MOST_LISTED and row.step % self._log.ranks_every == 0:
            self.folder.append_ranks({"step": row.step, **row.lists()})
        if self.totals.has_warmed_up and is_usual:
            self.totals.add(row)
            if row.world_size > 1:  # else nobody waits
                self._report_stragglers(row)
        self.totals.has_warmed_up = True

    def saved(self, outcome: Outcome) -> None:
        """Records how a save ended."""
        if outcome.problem:
            self.event("checkpoint failed", step=outcome.step, error=outcome.problem)
        else:
            self.event("checkpoint", step=outcome.step, seconds=round(outcome.seconds, 3), bytes=outcome.num_bytes)

    def failed(self, step: int, error: BaseException) -> None:
        """Records why this rank ends; its traceback goes to its log. An end that is recorded stays the run's: a resume
        that was refused has changed nothing. No collective: other ranks may be gone."""
        self.console.log(f"stopped at step {step}\n{''.join(traceback.format_exception(error))}")
        if self.world.is_main and last_event(self.folder.path).get("event") != "end":
            self.event("failed", step=step, error=str(error) or type(error).__name__)

    def ended(self, step: int, reason: str, unit: str = "tokens", dealt: str = "sequences", **facts: Any) -> None:
        """Records the end of the run, and prints where the time went. reason: COMPLETE, or why it stopped. unit, dealt:
        what rows count, and what is divided among the ranks."""
        cost_s = round(self.stragglers.cost_ms / 1e3, 3)
        self.event("end", step=step, **facts, reason=reason, straggler_cost_s=cost_s)
        rate = read_state(self.folder).rate if self.world.is_main else None
        summary.where_time_went(self.console, self.totals, rate, self.world.world_size, unit)
        summary.who_did_what(self.console, self.totals, unit, dealt)
        summary.who_was_slow(self.console, self.stragglers, self.totals, self.hosts)

    def _report_stragglers(self, row: StepRow) -> None:
        for news in self.stragglers.observe(row.step, row.rank_sequences, row.parts()):
            rank, host = news.rank, self.hosts[news.rank]
            if isinstance(news, Over):
                self.event("straggler over", step=row.step, rank=rank, host=host, cost_s=round(news.cost_s, 3))
                self.console.say(f"rank {rank} ({host}) is as fast as the others again; it cost {news.cost_s:.1f} s")
                continue
            facts = {"phase": news.phase, "ms": round(news.ms, 2), "median_ms": round(news.median_ms, 2)}
            self.event("straggler", step=row.step, rank=rank, host=host, since_step=news.since_step, **facts)
            self.console.say(
                f"rank {rank} ({host}) has been slow since step {news.since_step}: its {news.phase} takes "
                f"{news.ms:.1f} ms, the median rank {news.median_ms:.1f} ms; all wait for it",
                style="yellow",
            )


def peak_of_all_ranks(world: World, dtype: torch.dtype) -> float | None:
    """Returns the peaks of all ranks' devices together, in FLOP/s; None if one is not known. Collective."""
    peaks = [row[0] for row in world.group.share([peak_flops(world.device, dtype).flops_per_s or 0.0])]
    return sum(peaks) if all(peaks) else None


def step_row(
    result: StepResult,
    world: World,
    *,
    step: int,
    lr: float,
    num_items: int,
    items_so_far: int,
    items_by_rank: Sequence[int],
    flops_per_item: float = 0.0,
    peak_flops_per_s: float | None = None,
) -> StepRow:
    """Returns rank 0's row of a step. Items: tokens or samples, by rank sequences or samples. peak_flops_per_s: of all
    ranks together; None: not known."""
    times, step_ms = result.times, result.times.step_ms
    times_RT = np.fromiter(itertools.chain.from_iterable(result.by_rank), float).reshape(-1, len(times))
    ranks: Any = StepTimes(*times_RT.T)  # arrays by rank
    items_per_s = num_items / step_ms * 1e3
    # Of rank 0, from its part of the all-gather to the end of the step, without waits: other ranks did the same.
    before_update = result.by_rank[world.rank]
    after_ms = max(0.0, (step_ms - times.exposed_comm_ms) - (before_update.step_ms - before_update.exposed_comm_ms))
    return StepRow(
        step=step,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        skipped=result.skipped is not None,
        tokens=items_so_far,
        tokens_per_s=items_per_s,
        mfu=items_per_s * flops_per_item / peak_flops_per_s if peak_flops_per_s and flops_per_item else None,
        compute_ms=times.compute_ms,
        other_ms=step_ms - times.compute_ms - times.exposed_comm_ms - times.optim_ms,
        world_size=world.world_size,
        rank_sequences=items_by_rank,
        rank_exposed_comm_ms=ranks.exposed_comm_ms + np.maximum(0.0, step_ms - after_ms - ranks.step_ms),
        **{f"rank_{name}": getattr(ranks, name) for name in _BY_RANK},
        **{**times._asdict(), "comm_bytes": round(times.comm_bytes)},
    )
