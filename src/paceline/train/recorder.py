"""Records a run: a row of metrics for each step, events, a trace, and lines on the console."""

import contextlib
import os
from collections.abc import Iterator

import torch.profiler

from paceline.base import units
from paceline.base.files import set_mode
from paceline.model import cost
from paceline.record.balance import listed
from paceline.record.console import Console
from paceline.record.folder import RunFolder
from paceline.record.rows import EvalRow
from paceline.replica.balance import Change
from paceline.replica.recorder import StepRecorder
from paceline.replica.result import StepResult, Trouble
from paceline.train.progress import Progress
from paceline.train.resolve import Settings
from paceline.world.runtime import World


class Recorder(StepRecorder):
    """Rank 0's records and console lines; other ranks keep their logs only."""

    def __init__(
        self, world: World, folder: RunFolder, console: Console, settings: Settings, world_peak: float | None
    ) -> None:
        """world_peak: FLOP/s of all ranks together; None: not known."""
        super().__init__(world, folder, console, settings.config.log)
        self.evaluation: EvalRow | None = None  # the last one
        self._settings, self._config, self._peak = settings, settings.config, world_peak

    def step(self, progress: Progress, result: StepResult, sequences: list[int], lr: float, loss_scale: float) -> None:
        """Records and shows a step that has just ended. sequences: that each rank computed."""
        step = progress.step
        if result.skipped:
            self.console.say(f"step {step} made no update: {result.skipped} was not finite", style="yellow")
        self.record(
            result,
            step,
            is_usual=step != self._config.train.profile,
            skipped={"loss_scale": loss_scale},
            lr=lr,
            num_items=self._settings.tokens_per_step,
            items_so_far=progress.tokens,
            items_by_rank=sequences,
            flops_per_item=cost.flops_per_token(self._config.model, self._config.data.seq_len),
            peak_flops_per_s=self._peak,
        )
        validation = f"  val {self.evaluation.val_loss:.3f}" if self.evaluation else ""
        tokens_per_s = self._settings.tokens_per_step / result.times.step_ms * 1e3
        self.say_progress(
            step,
            self._settings.num_steps,
            f"loss {result.loss:.3f}{validation}  {units.count(round(tokens_per_s))} tok/s",
            done=self._settings.share_done(progress),
            left_s=self._seconds_left(progress, result.times.step_ms),
        )

    def rebalanced(self, step: int, change: Change, before: list[int]) -> None:
        """Records and shows shares that are in force from this step (1, 2, ...) on."""
        self.event("shares", step=step, sequences=list(change.shares), before=before, why=change.why)
        self.console.say(f"from step {step} on ranks compute {listed(change.shares)} sequences: {change.why}")

    def evaluated(self, row: EvalRow) -> None:
        self.evaluation = row
        if self.world.is_main:
            self.folder.append_metrics(row.recorded())
        self.console.say(f"step {row.step}: {shown(row)}")

    @contextlib.contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Traces its body by torch's profiler, on every rank, if `step` is train.profile's. Each rank writes
        RUN/profile/step-K-rank-R.json on its host. If that fails, training continues."""
        if step != self._config.train.profile:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # stops its messages on stderr
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            yield
        path = self.folder.path / "profile" / f"step-{step:08d}-rank-{self.world.rank:05d}.json"
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            profiler.export_chrome_trace(str(path))
            set_mode(path, 0o600)
        except (OSError, RuntimeError) as error:
            self.console.say(f"the trace of step {step} could not be written to {path}: {error}", style="yellow")
            return
        self.event("profile", step=step, path=f"profile/{path.name}")
        self.console.say(f"traced step {step}: open {path.parent} in https://ui.perfetto.dev (a file a rank)")

    def _seconds_left(self, progress: Progress, step_ms: float) -> float:
        if self._settings.num_steps is None:
            return progress.elapsed_s * max(0.0, 1 / self._settings.share_done(progress) - 1)
        return self.seconds_left(self._settings.num_steps - progress.step, step_ms)


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
