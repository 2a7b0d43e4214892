"""A script's training as a run: the folder, records and checkpoints of `paceline train`, for a model of your own.

    with paceline.join() as world:
        replica = paceline.Replica(model, optimizer, world)
        run = paceline.Run("runs/net", config={"lr": 3e-4}, net=replica, ema=ema)  # new, or the one there, restored
        for step in run.steps(loader, epochs=3):                                   # Replica.steps, recorded
            for x, y in step:
                step.backward(criterion(model(x), y))
            step.finish(max_norm=1.0)
            run.log(accuracy=accuracy)                                             # joins the row of this step
            run.save_every(500)
        run.evaluated(loss=val_loss)

`paceline watch`, `runs`, `report` and `track` show it, while it trains and later. When a signal asks it to stop, it
saves and exits with status 75; the same command continues it. record/folder.py lists the files.
"""

import contextlib
import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.base import units
from paceline.base.errors import EXIT_RESUMABLE, RunError, UserError
from paceline.base.jsonl import last_rows
from paceline.base.sums import exact_sum
from paceline.record import folder as run_folder
from paceline.record.config import LogConfig
from paceline.record.console import Console
from paceline.record.folder import COMPLETE, RunFolder
from paceline.record.rows import StepRow, finite
from paceline.record.state import read_config
from paceline.replica import script
from paceline.replica.checkpoints import Checkpoints
from paceline.replica.joining import at_failing, at_hang, at_leaving, exit_status
from paceline.replica.mistakes import warn
from paceline.replica.recorder import StepRecorder, peak_of_all_ranks
from paceline.replica.replica import Replica
from paceline.replica.result import StepResult
from paceline.replica.share import Share
from paceline.replica.step import Step
from paceline.world.calls import mistake
from paceline.world.group import from_rank_0
from paceline.world.watchdog import Verdict

_WRITE_EVERY_S = 0.5  # training time of rank 0, which all ranks know: rows, and one exchange of what was logged
_OF_EVALUATIONS = {"step", "tokens", "unit", "val_loss", "elapsed_s"}
_BESIDE_ROW = {"least_median_most", "slow_ranks", "num_steps"}
_TAKEN = _OF_EVALUATIONS | {field.name for field in dataclasses.fields(StepRow)} | _BESIDE_ROW
_OPEN: dict[Path, "Run"] = {}  # by folder


@dataclasses.dataclass
class _Waiting:
    """A step whose row is not written yet."""

    result: StepResult
    step: int
    lr: float
    num_items: int  # so far
    num_steps: int | None  # of the loop
    logged: dict[str, float | None]  # on this rank


class Run:
    """The run of a script: every rank makes it and calls its methods, in the same order."""

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        keep: int = 2,
        keep_every: int = 0,
        keep_best: bool = False,
        frozen: bool = True,
        every: int = 1,
        unit: str = "samples",
        flops_per_sample: float = 0.0,
        to: str = "",
        **objects: Any,
    ):
        """Makes the run in this folder, or restores the one that is there from its newest complete checkpoint.
        Collective. Make it after the objects and before the loop over steps. Ends an earlier run of this script that
        has made steps and is in no loop.

        objects, keep, keep_every, keep_best, frozen, to: see `Checkpoints`; the first Replica is the one whose steps
        are recorded. config: settings of the script, which go into config.toml: numbers, texts, lists, dicts of these.
        every: steps for each row. unit: what weights of micro-batches count, such as "tokens". flops_per_sample:
        forward and backward, of one such unit, for MFU; 0: not known.

        Raises UserError on all ranks if the folder holds something else or cannot be written, and as `Checkpoints`.
        """
        replicas = [thing for thing in objects.values() if isinstance(thing, Replica)]
        if not replicas:
            raise mistake("paceline.Run needs at least one Replica, by a name: net=replica")
        if "run" in objects:
            raise mistake('an object of paceline.Run cannot have the name "run", which is that of its own state')
        if not isinstance(config, Mapping | None):
            raise mistake(f"config is a {type(config).__name__}; it is a dict, such as vars(arguments)")
        if every < 1:
            raise mistake(f"every is {every}; it is a number of steps for each row, at least 1")
        self.replica, self.world = replicas[0], replicas[0].world
        self.world.calls.record("Run")
        self.folder, self._unit, self._flops = RunFolder(Path(folder)), unit, flops_per_sample
        self._keeps_best = keep_best
        self._state: dict[str, Any] = {"step": 0, "items": 0, "elapsed_s": 0.0}  # of the last step that is counted
        self._loop: tuple[Step, int | None] | None = None  # the step of `steps`, and steps in all
        self._logged: dict[str, float | None] = {}  # on this rank, of the step that is not recorded yet
        self._waiting: list[_Waiting] = []  # recorded, and not written yet
        self._written_s = 0.0  # training time when rows were last written
        self._first = self._recorded = self.replica.num_steps  # before this run's first step; its last recorded one
        self._evaluated: tuple[int, float] | None = None  # step and loss of the last evaluation
        # Of evaluations of the first step that an earlier attempt recorded: the names in each row.
        self._repeated: list[set[str]] = []
        self._saved: tuple[int, float | None] | None = None  # the same, of the last save
        self._is_over = False
        before = _OPEN.get(self.folder.path)
        continued = before if before is not None and before._is_continued_by(replicas) else None
        for earlier in list(_OPEN.values()):
            earlier._make_room(self.folder.path)
        from_rank_0(self.world.group, lambda: script.check_folder(self.folder))
        self.checkpoints = Checkpoints(
            folder,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            frozen=frozen,
            to=to,
            run=self._state,
            **objects,
        )
        _OPEN[self.folder.path] = self
        self._open_records(every)
        self._peak = peak_of_all_ranks(self.world, self.replica.dtype) if flops_per_sample else None
        if continued is not None:
            self._state |= continued._state
            self._evaluated = continued._evaluated
            self._save_last()  # here, since the earlier replica cannot save any more
        self._begin(config or {})
        self._follow_ends()

    def _open_records(self, every: int) -> None:
        self.folder = self.checkpoints.run_folder  # which it has locked
        run_folder.create(self.folder.path)  # on each host: it may not see rank 0's
        self._console = Console(self.world.rank)
        self._console.open_log(self.folder.rank_log(self.world.rank), takes_output=False)
        self._recorder = StepRecorder(self.world, self.folder, self._console, LogConfig(every=every))
        self.checkpoints.before_save = self._before_save
        self.checkpoints.before_publishing = self.folder.sync
        self.checkpoints.on_outcome = self._recorder.saved
        self.checkpoints.on_news = self._recorder.event

    def _follow_ends(self) -> None:
        folder = self.folder.path
        at_leaving(partial(_of_open, folder, Run._leave))
        at_failing(partial(_of_open, folder, Run._fail))
        at_hang(partial(_of_open, folder, Run._record_hang))

    def steps(
        self, source: Any, *, max_steps: int | None = None, epochs: int | None = None, **sharing: Any
    ) -> Iterator[Step]:
        """Yields steps as `Replica.steps`, and records each when its body has ended. When a signal asked for a stop,
        saves after the current step and exits with EXIT_RESUMABLE (75), on all ranks."""
        self._require_open("steps")
        if "stop_on_signals" in sharing:
            raise mistake("run.steps hears signals in any case: leave stop_on_signals= out")
        try:
            with self._console.progress(1.0 if max_steps or epochs else None):
                for step in self.replica.steps(
                    source, max_steps=max_steps, epochs=epochs, stop_on_signals=True, **sharing
                ):
                    batches = self.replica.sources.of_steps(source, sharing)
                    self._loop = step, _num_steps(step.number, batches, max_steps, epochs)
                    yield step
                    self._end_body()
                    self._write_if_due()
                self._write()  # here, so that the last step is shown
        finally:  # after `break`, or an error on this rank alone: no collective
            self._end_body()
            self._loop = None
        if self.replica.stop_reason and not hasattr(sys, "ps1"):  # at an interactive prompt the person decides
            self._stop(self.replica.stop_reason)

    def record(self, result: StepResult, lr: float | None = None, num_steps: int | None = None) -> None:
        """Records a step of a loop of your own, which `finish` or `Replica.train` returned, before it is saved; `steps`
        does it by itself. lr: that of the step; None: that of the first param group now. num_steps: in all, for the
        time left. Collective, each half second."""
        self._require_open("record")
        lr = self._lr() if lr is None else _number("record", "lr", lr)
        self._record(result, lr, None if num_steps is None else int(num_steps))
        self._write_if_due()

    def log(self, **numbers: float | torch.Tensor | None) -> None:
        """Adds numbers to the row of this step: means over the ranks, weighted by what each had of the batch, so the
        same at any number of ranks. Call it before `save_every`, and in a loop of your own before `record`. None: this
        rank has no number, as without a micro-batch."""
        if taken := sorted(_TAKEN.intersection(numbers)):
            raise mistake(f"run.log was given {', '.join(taken)}, which a row has already: take another name")
        values = {name: None if value is None else _number("log", name, value) for name, value in numbers.items()}
        if self._loop is not None and self._loop[0].result is not None and self._recorded == self.replica.num_steps:
            warn(
                f"{', '.join(numbers)} of step {self._recorded} came after its save, when its row was written, and is "
                "left out: call run.log before run.save and run.save_every",
                self.world,
            )
        else:
            self._logged |= values

    def evaluated(self, loss: float | torch.Tensor | None = None, **numbers: float | torch.Tensor) -> None:
        """Records an evaluation of this step, such as what `Replica.evaluate` returned: rank 0's numbers. loss: what
        `keep_best` compares. Collective."""
        self._require_open("evaluated")
        if taken := sorted(_OF_EVALUATIONS.intersection(numbers)):
            raise mistake(f"run.evaluated was given {', '.join(taken)}, which its row has: loss= becomes val_loss")
        self.world.calls.record("Run.evaluated")
        if self._loop is not None:
            self._count(self._loop[0].result)
        self._write()
        step = self.replica.num_steps
        values = {name: _number("evaluated", name, value) for name, value in numbers.items()}
        if loss is not None:
            values["val_loss"] = _number("evaluated", "loss", loss)
        val_loss = self.world.group.broadcast_json(values.get("val_loss"))  # by it all ranks decide what to save
        if val_loss is not None:
            self._evaluated = (step, val_loss) if math.isfinite(val_loss) else None
        if self.world.is_main:
            row = {"step": step, "val_loss": None, **values, "tokens": self._state["items"], "unit": self._unit}
            row = {**finite(row), "elapsed_s": self._state["elapsed_s"]}
            if step != self._first or row.keys() not in self._repeated:
                self.folder.append_metrics(row)
        if self._keeps_best and self._saved == (step, None):
            self.save()  # it is there already, and gets its loss
        self._console.say(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def save_every(self, num_steps: int) -> bool:
        """Saves if the number of steps made is a multiple of num_steps; returns whether it saved. Collective."""
        self._require_open("save_every")
        return self.checkpoints.save_every(num_steps, self._val_loss())

    def save(self) -> None:
        """Saves this step, while training continues. Collective."""
        self._require_open("save")
        self.checkpoints.save(self._val_loss())

    # ---- rows ----

    def _lr(self) -> float:
        return float(self.replica.param_groups()[0].get("lr", 0.0))  # as Step.lr

    def _end_body(self) -> None:
        """Records the step of the loop, if it has been made, and is not recorded yet."""
        if self._loop is None:
            return
        step, num_steps = self._loop
        if step.result is not None:
            self._record(step.result, step.lr, num_steps)

    def _record(self, result: StepResult, lr: float, num_steps: int | None) -> None:
        self._count(result)
        step = self._state["step"]
        if step == self._recorded:
            return
        self._recorded = step
        self._waiting.append(_Waiting(result, step, lr, self._state["items"], num_steps, self._logged))
        self._logged = {}

    def _count(self, result: StepResult | None) -> None:
        """Adds the newest step to the state, once: an evaluation or a save may come before its row."""
        state = self._state
        if result is None or self.replica.num_steps == state["step"]:
            return
        state["step"] = self.replica.num_steps
        state["items"] += round(result.weight)
        state["elapsed_s"] += result.by_rank[0].step_ms / 1e3  # rank 0's: the state is the same on all ranks

    def _write_if_due(self) -> None:
        if self._state["elapsed_s"] - self._written_s >= _WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        """Writes the rows that wait, with the means over ranks of what was logged. Collective if there are any."""
        if not self._waiting:
            return
        self.world.calls.record("Run.record")
        by_rank = self.world.group.share_json([each.logged for each in self._waiting])
        steps = zip(zip(*by_rank, strict=True), self._waiting, strict=True)
        self._write_rows([_means(logged, waiting.result.weights) for logged, waiting in steps])

    def _write_rows(self, means: Sequence[Mapping[str, float | None]]) -> None:
        """Writes the rows that wait, with these numbers of each, and says how far the loop is."""
        waiting, self._waiting = self._waiting, []
        self._written_s = self._state["elapsed_s"]
        for each, numbers in zip(waiting, means, strict=True):
            self._write_row(each, numbers)
        newest, numbers = waiting[-1], means[-1]
        step, num_steps, step_ms = newest.step, newest.num_steps, newest.result.times.step_ms
        shown = "".join(f"  {name} {value:.4g}" for name, value in numbers.items() if value is not None)
        rate = f"{units.count(newest.result.weight / step_ms * 1e3)} {self._unit}/s"
        left_s = self._recorder.seconds_left(num_steps - step, step_ms) if num_steps else None
        done = step / num_steps if num_steps else 0.0
        self._recorder.say_progress(
            step, num_steps, f"loss {newest.result.loss:.4g}{shown}  {rate}", done=done, left_s=left_s
        )
        self.world.group.take_traffic()  # what was sent since the step ended belongs to no step

    def _write_row(self, each: _Waiting, numbers: Mapping[str, float | None]) -> None:
        horizon = {"num_steps": each.num_steps} if each.num_steps else {}
        self._recorder.record(
            each.result,
            each.step,
            more={"unit": self._unit, **horizon, **numbers},
            lr=each.lr,
            num_items=round(each.result.weight),
            items_so_far=each.num_items,
            items_by_rank=[round(weight) for weight in each.result.weights],
            flops_per_item=self._flops,
            peak_flops_per_s=self._peak,
        )

    # ---- saves ----

    def _before_save(self) -> None:
        """Writes the rows of all steps that the save holds: after a kill the same rows are there. Collective."""
        self._end_body()
        self._write()
        self._saved = self.replica.num_steps, self._val_loss()

    def _val_loss(self) -> float | None:
        step, loss = self._evaluated or (-1, 0.0)
        return loss if step == self.replica.num_steps else None

    # ---- begin and end ----

    def _begin(self, config: Mapping[str, Any]) -> None:
        """Restores the newest checkpoint, if there is one, and records how the run begins. Collective. Raises RunError
        on all ranks if the run's checkpoints are gone."""
        step = self.checkpoints.restore()
        if step is None and self.world.group.broadcast_json(self.world.is_main and self.folder.has_saved()):
            raise RunError(
                f"checkpoints of this run have been saved, and {self.folder.checkpoints} has none: is its disk "
                "mounted? Nothing was changed",
                reach="world",
            )
        self._first = self._recorded = self.replica.num_steps
        self._written_s = self._state["elapsed_s"]
        reached, changed = from_rank_0(self.world.group, lambda: self._write_setup(step or 0, config))
        facts = {**self._recorder.machines(), "version": __version__, "torch": torch.__version__}
        if step is not None:
            facts |= {"step": step, "reached": reached, **({"changed": changed} if changed else {})}
        self._recorder.event("start" if step is None else "resume", **facts)
        if step is not None and changed:
            shown = ", ".join(f"{name} {before!r} -> {now!r}" for name, (before, now) in changed.items())
            self._console.say(f"config was changed since the run began: {shown}", style="yellow")

    def _write_setup(self, step: int, config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Drops the rows of later steps and writes config.toml. Returns the last step that had a row, and what differs
        from the config that was there."""
        before = read_config(self.folder.config)
        facts = {"unit": self._unit, "command": script.command(), "directory": os.getcwd()}
        try:
            reached = self.folder.forget_after(step)
            earlier = last_rows(self.folder.metrics)
            self._repeated = [set(row) for row in earlier if row.get("step") == step and "loss" not in row]
            self.folder.write_setup(script.to_toml({"run": facts, "config": config}), None)
        except OSError as error:
            raise UserError(f"cannot write to {self.folder.path}: {error.strerror}") from None
        now = read_config(self.folder.config)
        names = sorted(name for name in before.keys() | now.keys() if name.startswith("config."))
        changed = {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}
        return reached, changed if before else {}

    def _make_room(self, folder: Path) -> None:
        """Ends this run where the script makes one of this folder: the same, or another one after its loop.
        Collective."""
        if folder == self.folder.path:
            self._write()
            if self._loop is None and self.replica.is_current and self.replica.num_steps > self._first:
                self._save_last()  # else the new one goes back to the save before, and drops the rows of what follows
            self._let_go()
        elif self._recorded > self._first and self._loop is None:
            self._leave()
            self.checkpoints._end()

    def _is_continued_by(self, replicas: Sequence[Replica]) -> bool:
        """Whether these replicas count on the steps that this run has made, as after unfreezing."""
        numbers = {each.replica.number for each in self.checkpoints._replicas.values()}
        has_steps = self._loop is None and self.replica.num_steps > self._first
        return has_steps and all(each.continues in numbers for each in replicas)

    def _require_open(self, verb: str) -> None:
        if self._is_over:
            raise mistake(
                f"run.{verb}: the run in {self.folder.shown} ended where another was made; make it again by "
                "paceline.Run with its folder, which restores it"
            )

    def _stop(self, reason: str) -> None:
        """Saves, and ends this process so that the same command continues. Collective."""
        self.save()
        self._finish_saves()
        self._end(reason)
        self._console.say(f"stopped at step {self.replica.num_steps} ({reason}); everything is saved")
        raise SystemExit(EXIT_RESUMABLE)

    def _leave(self) -> None:
        """At the end of the script: saves the last step, and shows where the time went. Collective."""
        if self._is_over:
            return
        self._write()
        if self._logged:
            warn(f"run.log gave {', '.join(self._logged)} after the last row, and no row has it", self.world)
        if not self.replica.is_current:
            warn("steps since the last save are not saved: another Replica was made of this run's model", self.world)
        elif self.replica.num_steps:
            self._save_last()
        self._finish_saves()
        code = exit_status()
        self._end(f"exit status {code}" if code else COMPLETE)
        shown = shlex.quote(self.folder.shown)
        self._console.say(f"run folder {shown}\n\nTry next:\n  paceline report {shown}   # one page of plots")

    def _save_last(self) -> None:
        """Saves the last step, unless it is saved, and waits until it is written. Collective."""
        if self._saved != (self.replica.num_steps, self._val_loss()):
            self.save()
        self._finish_saves()

    def _finish_saves(self) -> None:
        self.checkpoints.finish()
        self.checkpoints.send_the_rest(self.checkpoints.say_news)

    def _end(self, reason: str) -> None:
        self._recorder.ended(self.replica.num_steps, reason, self._unit, dealt=self._unit)
        self._let_go()

    def _let_go(self) -> None:
        """Ends the records of this object; those of the folder may go on by another one."""
        self._is_over = True
        self.folder.close()
        _OPEN.pop(self.folder.path, None)

    def _fail(self, error: BaseException) -> None:
        """Records why this rank ends; no collective, so without the means of what was logged."""
        if self._is_over:
            return
        self._end_body()
        if self._waiting:
            self._write_rows([{}] * len(self._waiting))
        self._recorder.failed(self.replica.num_steps, error)
        self._let_go()

    def _record_hang(self, verdict: Verdict) -> None:
        """Records a hang on the rank that prints it, where it sees the folder."""
        if self._waiting:
            self._write_rows([{}] * len(self._waiting))
        if self.world.rank == verdict.speaker(self.world.world_size) and self.folder.config.exists():
            self.folder.append_event("hang", message=verdict.message, ranks=list(verdict.culprits))
            self._is_over = True


def _of_open(folder: Path, call: Callable[..., None], *arguments: Any) -> None:
    """Calls a method of the folder's open run, if there is one. Named by folder, so that an ended run, with its model,
    is not kept alive."""
    if (run := _OPEN.get(folder)) is not None:
        call(run, *arguments)


def _means(by_rank: Sequence[Mapping[str, float | None]], weights: Sequence[float]) -> dict[str, float | None]:
    """Returns the mean of each number, weighted, over the ranks that have it; None if it is not finite."""
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for logged in by_rank for name in logged):
        pairs = [(logged.get(name), weight) for logged, weight in zip(by_rank, weights, strict=True)]
        known = [(value, weight) for value, weight in pairs if value is not None]
        total = exact_sum(weight for _, weight in known)
        if total:
            mean = exact_sum(value * weight for value, weight in known) / total
            means[name] = mean if math.isfinite(mean) else None
    return means


def _number(verb: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise mistake(
            f"run.{verb} was given {name}, a {type(value).__name__}{shape}: give one number, such as its mean"
        ) from None


def _num_steps(step: int, batches: Share, max_steps: int | None, epochs: int | None) -> int | None:
    """Returns how many steps there are at the end of a loop that makes this step of the batches, also if earlier loops
    had others; None if the source does not say it."""
    known = [] if max_steps is None else [max_steps]
    if epochs is not None:
        with contextlib.suppress(TypeError):  # only the end of a pass will tell
            known.append(step - batches.step + (epochs - batches.epoch) * len(batches))
    least = min(known, default=math.inf)
    return None if math.isinf(least) else math.ceil(least)
