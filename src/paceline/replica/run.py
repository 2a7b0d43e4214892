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
import json
import math
import shlex
import sys
import tomllib
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.base import units
from paceline.base.errors import EXIT_RESUMABLE, UserError
from paceline.checkpoint.save import Outcome
from paceline.record import folder as run_folder
from paceline.record import summary
from paceline.record.config import LogConfig
from paceline.record.console import Console
from paceline.record.folder import COMPLETE, RunFolder
from paceline.record.rows import StepRow
from paceline.record.state import read_config, read_state
from paceline.replica.checkpoints import Checkpoints
from paceline.replica.joining import at_failing, at_hang, at_leaving
from paceline.replica.recorder import StepRecorder, step_row
from paceline.replica.replica import Replica
from paceline.replica.result import StepResult
from paceline.replica.step import Step
from paceline.world.calls import mistake
from paceline.world.group import from_rank_0
from paceline.world.processor import peak_flops
from paceline.world.watchdog import Verdict

_TAKEN = {*(field.name for field in dataclasses.fields(StepRow)), "unit", "val_loss", "elapsed_s"}
_OPEN: dict[Path, "Run"] = {}  # by folder: a notebook cell that runs again makes it again


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
        every: int = 1,
        unit: str = "samples",
        flops_per_sample: float = 0.0,
        **objects: Any,
    ):
        """Makes the run in this folder, or restores the one that is there from its newest complete checkpoint.
        Collective. Make it after the objects and before the loop over steps.

        objects, keep, keep_every, keep_best: see `Checkpoints`; the first Replica is the one whose steps are recorded.
        config: settings of the script, which go into config.toml: numbers, texts, lists, dicts of these. every: steps
        for each row. unit: what weights of micro-batches count, such as "tokens". flops_per_sample: forward and
        backward, of one such unit, for MFU; 0: not known.

        Raises UserError on all ranks if the folder holds something else or cannot be written, and as `Checkpoints`.
        """
        replicas = [thing for thing in objects.values() if isinstance(thing, Replica)]
        if not replicas:
            raise mistake("paceline.Run needs at least one Replica, by a name: net=replica")
        if "run" in objects:
            raise mistake('an object of paceline.Run cannot have the name "run", which is that of its own state')
        self.replica, self.world = replicas[0], replicas[0].world
        self.world.calls.record("Run")
        self.folder, self._unit, self._flops = RunFolder(Path(folder)), unit, flops_per_sample
        self._state: dict[str, Any] = {"step": 0, "items": 0, "elapsed_s": 0.0}  # of the last step that is counted
        self._step: Step | None = None  # of the loop `steps`
        self._numbers: dict[str, float] = {}  # of `log`, since the last row
        self._evaluated: tuple[int, float] | None = None  # step and loss
        self._is_over = False
        if (earlier := _OPEN.pop(self.folder.path, None)) is not None:
            earlier._let_go()
        from_rank_0(self.world.group, lambda: _check_folder(self.folder))
        self.checkpoints = Checkpoints(
            folder, keep=keep, keep_every=keep_every, keep_best=keep_best, run=self._state, **objects
        )
        changed = from_rank_0(self.world.group, lambda: self._open(config or {}))
        if not self.world.is_main:
            run_folder.create(self.folder.path)  # on a host that does not see rank 0's
        self._console = Console(self.world.rank)
        self._console.open_log(self.folder.rank_log(self.world.rank), takes_output=False)
        self._recorder = StepRecorder(self.world, self.folder, self._console, LogConfig(every=every))
        self._peak = self._peak_of_all_ranks()
        self._begin(changed)
        _OPEN[self.folder.path] = self
        self.checkpoints.on_outcome = self._record_save
        at_leaving(self._leave)
        at_failing(self._fail)
        at_hang(self._record_hang)

    def steps(
        self, source: Any, *, max_steps: int | None = None, epochs: int | None = None, **sharing: Any
    ) -> Iterator[Step]:
        """Yields steps as `Replica.steps`, and records each when its body has ended. When a signal asked for a stop,
        saves after the current step and exits with EXIT_RESUMABLE (75), on all ranks."""
        num_steps = _num_steps(source, max_steps, epochs)
        if num_steps is not None:
            self._recorder.event("loop", num_steps=num_steps)
        with self._console.progress(1.0 if num_steps else None):
            for step in self.replica.steps(source, max_steps=max_steps, epochs=epochs, stop_on_signals=True, **sharing):
                lr = float(self.replica.param_groups()[0]["lr"])
                self._step = step
                try:
                    yield step
                finally:  # also after `break`
                    if step.result is not None:
                        self.record(step.result, lr, num_steps)
        if self.replica.stop_reason and not hasattr(sys, "ps1"):  # at an interactive prompt the person decides
            self._stop(self.replica.stop_reason)

    def record(self, result: StepResult, lr: float | None = None, num_steps: int | None = None) -> None:
        """Records a step of a loop of your own, which `finish` or `Replica.train` returned, before it is saved; `steps`
        does it by itself. lr: that of the step; None: that of the first param group now. num_steps: in all, for the
        time left."""
        self._count(result)
        numbers, self._numbers = self._numbers, {}
        step = self.replica.num_steps
        if result.skipped:
            self._recorder.event("skipped step", step=step, **dataclasses.asdict(result.skipped))
        if self.world.is_main:
            row = step_row(
                result,
                self.world,
                step=step,
                lr=float(self.replica.param_groups()[0]["lr"]) if lr is None else lr,
                num_items=round(result.weight),
                items_so_far=self._state["items"],
                items_by_rank=[round(weight) for weight in result.weights],
                flops_per_item=self._flops,
                peak_flops_per_s=self._peak,
            )
            self._recorder.record(row, more={"unit": self._unit, **numbers})
        rate = f"{units.count(round(result.weight / result.times.step_ms * 1e3))} {self._unit}/s"
        shown = "".join(f"  {name} {value:.4g}" for name, value in numbers.items())
        totals = self._recorder.totals
        mean_ms = totals.mean("step_ms") if totals.num_steps else result.times.step_ms
        left = units.duration((num_steps - step) * mean_ms / 1e3) if num_steps else ""
        self._console.advance(
            step / num_steps if num_steps else 0.0,
            f"step {step}/{num_steps}" if num_steps else f"step {step}",
            f"loss {result.loss:.4g}{shown}  {rate}" + (f"  ETA {left}" if left else ""),
        )
        self.world.group.take_traffic()  # what was sent since the step ended belongs to no step

    def log(self, **numbers: float | torch.Tensor | None) -> None:
        """Adds numbers to the row of this step: means over the ranks, weighted by what each had of the batch, so the
        same at any number of ranks. Call it after `step.finish()`; in a loop of your own before `record`, where each
        rank counts once. None: this rank has no number, as without a micro-batch. Collective."""
        self.world.calls.record("Run.log")
        if taken := sorted(_TAKEN.intersection(numbers)):
            raise mistake(f"run.log was given {', '.join(taken)}, which a row has already: take another name")
        here = {name: None if value is None else float(value) for name, value in numbers.items()}
        by_rank = self.world.group.share_json(here)
        result = self._step.result if self._step else None
        weights = result.weights if result else [1.0] * len(by_rank)
        for name in dict.fromkeys(name for row in by_rank for name in row):
            weighted = [
                (row[name], weight) for row, weight in zip(by_rank, weights, strict=True) if row.get(name) is not None
            ]
            total = math.fsum(weight for _, weight in weighted)
            if total and math.isfinite(mean := math.fsum(value * weight for value, weight in weighted) / total):
                self._numbers[name] = mean

    def evaluated(self, loss: float | torch.Tensor | None = None, **numbers: float | torch.Tensor) -> None:
        """Records an evaluation of this step, such as what `Replica.evaluate` returned: rank 0's numbers. loss: what
        `keep_best` compares, if this step is saved after it."""
        step = self.replica.num_steps
        values = {name: float(value) for name, value in numbers.items()}
        if loss is not None:
            values["val_loss"] = float(loss)
            self._evaluated = step, float(loss)
        row = {"step": step, **values, "tokens": self._state["items"], "unit": self._unit}
        if self.world.is_main:
            self.folder.append_metrics({**row, "elapsed_s": self._state["elapsed_s"]})
        self._console.say(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def save_every(self, num_steps: int) -> bool:
        """Saves if the number of steps made is a multiple of num_steps; returns whether it saved. Collective."""
        self._count(self._step.result if self._step else None)
        return self.checkpoints.save_every(num_steps, self._val_loss())

    def save(self) -> None:
        """Saves this step, while training continues. Collective."""
        self._count(self._step.result if self._step else None)
        self.checkpoints.save(self._val_loss())

    # ---- inside ----

    def _count(self, result: StepResult | None) -> None:
        """Adds the newest step to the state, once: a save may come before its row."""
        state = self._state
        if result is None or self.replica.num_steps == state["step"]:
            return
        state["step"] = self.replica.num_steps
        state["items"] += round(result.weight)
        state["elapsed_s"] += result.by_rank[0].step_ms / 1e3  # rank 0's: the state is the same on all ranks

    def _val_loss(self) -> float | None:
        step, loss = self._evaluated or (-1, 0.0)
        return loss if step == self.replica.num_steps else None

    def _open(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Locks the folder and writes config.toml, on rank 0. Returns what differs from the config that was there."""
        before = read_config(self.folder.config)
        try:
            run_folder.create(self.folder.path)
            self.folder.lock()
            facts = {"unit": self._unit, "command": shlex.join([Path(sys.executable).name, *sys.argv])}
            self.folder.write_setup(_to_toml({"run": facts, "config": config}), None)
        except OSError as error:
            raise UserError(f"cannot write to {self.folder.path}: {error.strerror}") from None
        now = read_config(self.folder.config)
        names = sorted(name for name in before.keys() | now.keys() if name.startswith("config."))
        return {
            name: [before.get(name), now.get(name)] for name in names if before and before.get(name) != now.get(name)
        }

    def _begin(self, changed: Mapping[str, Any]) -> None:
        """Restores the newest checkpoint, if there is one, and records how the run begins. Collective."""
        step = self.checkpoints.restore()
        reached = self.folder.forget_after(step or 0) if self.world.is_main else 0
        facts = {**self._recorder.machines(), "version": __version__, "torch": torch.__version__}
        if step is not None:
            facts |= {"step": step, "reached": reached, **({"changed": dict(changed)} if changed else {})}
        self._recorder.event("start" if step is None else "resume", **facts)

    def _peak_of_all_ranks(self) -> float | None:
        """Returns the ranks' peaks together, in FLOP/s; None if one is not known, or nobody asks. Collective."""
        if not self._flops:
            return None
        peak = peak_flops(self.world.device, self.replica.dtype)
        peaks = [row[0] for row in self.world.group.share([peak.flops_per_s or 0.0])]
        return sum(peaks) if all(peaks) else None

    def _record_save(self, outcome: Outcome) -> None:
        if outcome.problem:
            self._recorder.event("checkpoint failed", step=outcome.step, error=outcome.problem)
        else:
            facts = {"seconds": round(outcome.seconds, 3), "bytes": outcome.num_bytes}
            self._recorder.event("checkpoint", step=outcome.step, **facts)

    def _stop(self, reason: str) -> None:
        """Saves, and ends this process so that the same command continues. Collective."""
        self.save()
        self.checkpoints.finish()
        self._end(reason)
        self._console.say(f"stopped at step {self.replica.num_steps} ({reason}); everything is saved")
        raise SystemExit(EXIT_RESUMABLE)

    def _leave(self) -> None:
        """At the end of the script: saves the last step, and shows where the time went. Collective."""
        if self._is_over:
            return
        if self.replica.num_steps > (self.checkpoints.saver.begun_at or 0):
            self.save()
        self.checkpoints.finish()
        leaving = sys.exc_info()[1]  # sys.exit() inside `with paceline.join()` leaves without an error
        code = leaving.code if isinstance(leaving, SystemExit) else None
        self._end(f"exit status {code}" if code else COMPLETE)
        shown = shlex.quote(self.folder.shown)
        self._console.say(f"run folder {shown}\n\nTry next:\n  paceline report {shown}   # one page of plots")

    def _let_go(self) -> None:
        """Ends the records of this object; those of the folder may go on by another one."""
        self._is_over = True
        self.folder.close()
        _OPEN.pop(self.folder.path, None)

    def _end(self, reason: str) -> None:
        recorder, cost_s = self._recorder, self._recorder.stragglers.cost_ms / 1e3
        recorder.event("end", step=self.replica.num_steps, reason=reason, straggler_cost_s=round(cost_s, 3))
        rate = read_state(self.folder).rate if self.world.is_main else None
        summary.where_time_went(self._console, recorder.totals, rate, self.world.world_size, self._unit)
        summary.who_was_slow(self._console, recorder.stragglers, recorder.totals, recorder.hosts)
        self._let_go()

    def _fail(self, error: BaseException) -> None:
        """Records why this rank ends; no collective."""
        self._console.log("".join(traceback.format_exception(error)))
        if not self._is_over:
            text = str(error) or type(error).__name__
            self._recorder.event("failed", step=self.replica.num_steps, error=text)
            self._let_go()

    def _record_hang(self, verdict: Verdict) -> None:
        """Records a hang on the rank that prints it, where it sees the folder."""
        if self.world.rank == verdict.speaker(self.world.world_size) and self.folder.config.exists():
            self.folder.append_event("hang", message=verdict.message, ranks=list(verdict.culprits))
            self._is_over = True


def _check_folder(folder: RunFolder) -> None:
    """Raises UserError if the folder holds something that is no run of a script."""
    try:
        names = sorted(entry.name for entry in folder.path.iterdir()) if folder.path.exists() else []
        document = tomllib.loads(folder.config.read_text(encoding="utf-8")) if "config.toml" in names else {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {folder.path} as a run folder: {error}") from None
    if "train" in document:
        raise UserError(
            f"{folder.path} is a run of `paceline train`, which `paceline resume` continues; name another folder"
        )
    foreign = [] if "run" in document else [name for name in names if name not in (*run_folder.MADE_HERE, ".lock")]
    if foreign:
        raise UserError(
            f"{folder.path} holds files of something else ({units.listed(foreign)}); name a folder that is empty or "
            "does not exist yet"
        )


def _num_steps(source: Any, max_steps: int | None, epochs: int | None) -> int | None:
    """Returns how many steps a loop makes in all; None if the source does not say it."""
    known = [] if max_steps is None else [max_steps]
    if epochs is not None and not hasattr(source, "__getitem__"):  # a data set counts samples
        with contextlib.suppress(TypeError):
            known.append(epochs * len(source))
    return min(known, default=None)


def _to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns tables of TOML. Dicts within are written as names with dots; what TOML lacks, as text."""
    lines: list[str] = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{json.dumps(name)} = {_value(value)}" for name, value in _flat(values)), ""]
    return "\n".join(lines)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    is_plain = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    return json.dumps(value if is_plain else str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
