"""Records a run: a row of metrics for each step, events, a trace, and lines on the console."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.profiler

from paceline.base import units
from paceline.base.files import set_mode
from paceline.model import cost
from paceline.record.balance import listed
from paceline.record.console import Console
from paceline.record.folder import RunFolder
from paceline.record.rows import MOST_LISTED, EvalRow, StepRow
from paceline.record.stragglers import Over, Stragglers
from paceline.record.summary import Totals
from paceline.replica.balance import Change
from paceline.replica.result import StepResult, StepTimes, Trouble
from paceline.train.progress import Progress
from paceline.train.resolve import Settings
from paceline.world.runtime import World

_BY_RANK = ("step_ms", "compute_ms", "data_ms", "forward_ms", "backward_ms", "optim_ms")  # of StepTimes, in each row


class Recorder:
    """Rank 0's records and console lines; other ranks keep their logs only."""

    def __init__(
        self, world: World, folder: RunFolder, console: Console, settings: Settings, world_peak: float | None
    ) -> None:
        """world_peak: FLOP/s of all ranks together; None: not known."""
        self.hosts = [peer.host for peer in world.peers]  # by rank
        self.totals, self.stragglers = Totals(), Stragglers(world.world_size)
        self.evaluation: EvalRow | None = None  # the last one
        self._world, self._folder, self._console = world, folder, console
        self._settings, self._config, self._peak = settings, settings.config, world_peak

    def event(self, kind: str, **facts: Any) -> None:
        if self._world.is_main:
            self._folder.append_event(kind, **facts)

    def step(self, progress: Progress, result: StepResult, sequences: list[int], lr: float, loss_scale: float) -> None:
        """Records and shows a step that has just ended. sequences: that each rank computed. What takes time in
        proportion to the number of ranks, rank 0 does alone."""
        step, num_steps = progress.step, self._settings.num_steps
        if result.skipped:
            self.event("skipped step", step=step, loss_scale=loss_scale, **dataclasses.asdict(result.skipped))
            self._console.say(f"step {step} made no update: {result.skipped} was not finite", style="yellow")
        if self._world.is_main:
            self._record(self._row(progress, result, sequences, lr))
        validation = f"  val {self.evaluation.val_loss:.3f}" if self.evaluation else ""
        left = units.duration(self._seconds_left(progress, result.times.step_ms))
        tokens_per_s = self._settings.tokens_per_step / result.times.step_ms * 1e3
        self._console.advance(
            self._settings.share_done(progress),
            f"step {step}" if num_steps is None else f"step {step}/{num_steps}",
            f"loss {result.loss:.3f}{validation}  {units.count(round(tokens_per_s))} tok/s  ETA {left}",
        )

    def rebalanced(self, step: int, change: Change, before: list[int]) -> None:
        """Records and shows shares that are in force from this step (1, 2, ...) on."""
        self.event("shares", step=step, sequences=list(change.shares), before=before, why=change.why)
        self._console.say(f"from step {step} on ranks compute {listed(change.shares)} sequences: {change.why}")

    def evaluated(self, row: EvalRow) -> None:
        self.evaluation = row
        if self._world.is_main:
            self._folder.append_metrics(row.recorded())
        self._console.say(f"step {row.step}: {shown(row)}")

    @contextlib.contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Traces its body by torch's profiler, on every rank, if `step` is train.profile's. Each rank writes
        RUN/profile/step-K-rank-R.json on its host. If that fails, training continues."""
        if step != self._config.train.profile:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # stops its messages on stderr
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            yield
        path = self._folder.path / "profile" / f"step-{step:08d}-rank-{self._world.rank:05d}.json"
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            profiler.export_chrome_trace(str(path))
            set_mode(path, 0o600)
        except (OSError, RuntimeError) as error:
            self._console.say(f"the trace of step {step} could not be written to {path}: {error}", style="yellow")
            return
        self.event("profile", step=step, path=f"profile/{path.name}")
        self._console.say(f"traced step {step}: open {path.parent} in https://ui.perfetto.dev (a file a rank)")

    def _record(self, row: StepRow) -> None:
        if row.step % self._config.log.every == 0:
            self._folder.append_metrics(row.recorded(self.stragglers.reported))
        if row.world_size > MOST_LISTED and row.step % self._config.log.ranks_every == 0:
            self._folder.append_ranks({"step": row.step, **row.lists()})
        if self.totals.has_warmed_up and row.step != self._config.train.profile:
            self.totals.add(row)
            self._report_stragglers(row)
        self.totals.has_warmed_up = True

    def _row(self, progress: Progress, result: StepResult, sequences: list[int], lr: float) -> StepRow:
        times, step_ms = result.times, result.times.step_ms
        times_RT = np.fromiter(itertools.chain.from_iterable(result.by_rank), float).reshape(-1, len(times))
        ranks: Any = StepTimes(*times_RT.T)  # arrays by rank
        tokens_per_s = self._settings.tokens_per_step / step_ms * 1e3
        flops_per_s = tokens_per_s * cost.flops_per_token(self._config.model, self._config.data.seq_len)
        # Of rank 0, from its part of the all-gather to the end of the step, without waits: other ranks did the same.
        own = result.by_rank[self._world.rank]
        after_ms = max(0.0, (step_ms - times.exposed_comm_ms) - (own.step_ms - own.exposed_comm_ms))
        return StepRow(
            step=progress.step,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped is not None,
            tokens=progress.tokens,
            tokens_per_s=tokens_per_s,
            mfu=flops_per_s / self._peak if self._peak else None,
            compute_ms=times.compute_ms,
            other_ms=step_ms - times.compute_ms - times.exposed_comm_ms - times.optim_ms,
            world_size=self._world.world_size,
            rank_sequences=sequences,
            rank_exposed_comm_ms=ranks.exposed_comm_ms + np.maximum(0.0, step_ms - after_ms - ranks.step_ms),
            **{f"rank_{name}": getattr(ranks, name) for name in _BY_RANK},
            **{**times._asdict(), "comm_bytes": round(times.comm_bytes)},
        )

    def _report_stragglers(self, row: StepRow) -> None:
        for found in self.stragglers.observe(row.step, row.rank_sequences, row.parts()):
            rank, host = found.rank, self.hosts[found.rank]
            if isinstance(found, Over):
                self.event("straggler over", step=row.step, rank=rank, host=host, cost_s=round(found.cost_s, 3))
                self._console.say(f"rank {rank} ({host}) is as fast as the others again; it cost {found.cost_s:.1f} s")
                continue
            facts = {"phase": found.phase, "ms": round(found.ms, 2), "median_ms": round(found.median_ms, 2)}
            self.event("straggler", step=row.step, rank=rank, host=host, since_step=found.since_step, **facts)
            self._console.say(
                f"rank {rank} ({host}) has been slow since step {found.since_step}: its {found.phase} takes "
                f"{found.ms:.1f} ms, the median rank {found.median_ms:.1f} ms; all wait for it",
                style="yellow",
            )

    def _seconds_left(self, progress: Progress, step_ms: float) -> float:
        if self._settings.num_steps is None:
            return progress.elapsed_s * max(0.0, 1 / self._settings.share_done(progress) - 1)
        mean_ms = self.totals.mean("step_ms") if self.totals.num_steps else step_ms
        return (self._settings.num_steps - progress.step) * mean_ms / 1e3


def shown(row: EvalRow) -> str:
    text = f"validation loss {row.val_loss:.4f}"
    return text if row.val_bpb is None else f"{text}, {row.val_bpb:.4f} bits per byte"


def cause_of(troubles: list[Trouble | None], hosts: list[str]) -> str:
    """Returns advice on gradients that were not finite, from the last steps."""
    ranks = {tuple(trouble.ranks or ()) for trouble in troubles if trouble is not None}
    if len(ranks) == 1 and len(only := next(iter(ranks))) == 1 and len(hosts) > 1:
        return (
            f"all of them came from rank {only[0]} ({hosts[only[0]]}): check its memory, its device and its data, or "
            "continue without that host"
        )
    return "lower --optim.lr, or use --train.dtype bfloat16 or float32"
