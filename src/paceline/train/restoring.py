"""Resuming a run from a checkpoint, or beginning one."""

import contextlib
import shlex
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.base import faults, units
from paceline.base.errors import RunError, UserError
from paceline.checkpoint import retention
from paceline.checkpoint.steps import list_steps
from paceline.config import to_toml
from paceline.train.changes import HORIZONS, Changes, changes, changes_curve, makes_another_run
from paceline.train.meet import Setup, writing_to
from paceline.train.progress import Progress
from paceline.world.group import from_rank_0


def restore_or_begin(setup: Setup) -> None:
    """Restores the newest complete checkpoint, or the requested one, whose later records are then dropped; without
    checkpoints starts at step 0. Collective."""
    resumes = setup.request.resume or setup.request.is_restart
    if resumes and _restore(setup):
        return
    reached = _forget_later_steps(setup)
    facts = setup.recorder.machines() | {
        "sequences": setup.settings.plan.num_sequences(),
        "num_steps": setup.settings.num_steps,
    }
    facts |= {"version": __version__, "torch": torch.__version__, **({"reached": reached} if reached else {})}
    setup.recorder.event("start", **facts)
    if resumes:
        setup.console.say("nothing had been saved yet: this run begins again at step 0\n", style="yellow")


def _restore(setup: Setup) -> bool:
    """Restores the replica and the progress; returns False if nothing was ever saved. Collective. Raises RunError on
    all ranks if the run's checkpoints are gone."""
    checkpoints, console, progress = setup.checkpoints, setup.console, setup.progress
    checkpoints.progress = lambda: setup.watchdog.enter("restore", 0)
    checkpoint = checkpoints.find(setup.request.resume_step)
    if checkpoint is None:
        if setup.group.broadcast_json(setup.world.is_main and setup.folder.has_saved()):  # no silent start from step 0
            raise RunError(
                f"checkpoints of this run have been saved, and {setup.folder.checkpoints} has none: is its disk "
                "mounted? Nothing was changed",
                reach="world",
            )
        return False
    path, manifest, problems = checkpoint
    for problem in problems:
        console.say(f"passed over a damaged checkpoint: {problem}", style="yellow")
        setup.recorder.event("damaged checkpoint", problem=problem)
    changed = _require_same_run(setup, path, manifest)
    faults.strike("restore", manifest["step"] + 1)
    groups = setup.replica.param_groups()
    settings = [{name: group[name] for name in group.keys() - {"params", "step"}} for group in groups]
    checkpoints.take(path, manifest)
    for group, of_config in zip(groups, settings, strict=True):
        group.update(of_config)  # the config's, which may have been changed since
    progress.restore(manifest["progress"])
    progress.sequences = _restore_shares(setup, progress.sequences)
    reached = _forget_later_steps(setup)
    _take_val_losses(setup)
    before, now = manifest["world_size"], setup.world.world_size
    facts = {
        "job": setup.request.job,
        "from_world_size": before,
        **setup.recorder.machines(),
        "sequences": progress.sequences,
        "num_steps": setup.settings.num_steps,
        **({"changed": changed} if changed else {}),
    }
    setup.recorder.event("resume", step=progress.step, reached=reached, **facts)
    console.say(
        f"resumed at step {progress.step} ({units.count(progress.tokens)} tokens seen); saved by "
        f"{units.plural(before, 'rank')}, now {now}; {setup.settings.plan.global_batch_size} sequences a step "
        "as before\n"
    )
    return True


def _restore_shares(setup: Setup, saved: list[int] | None) -> list[int]:
    """Returns the sequences of the next step by rank: with parallel.shares auto those in force when the checkpoint was
    saved, if the world has the same size, and no rank had none: its speed would stay unknown."""
    plan, step = setup.settings.plan, setup.progress.step
    if setup.config.parallel.shares == "auto" and saved and all(saved) and len(saved) == plan.world_size:
        plan = plan.with_shares(saved)
    setup.loader.change(step, plan)
    return plan.num_sequences()


def _require_same_run(setup: Setup, path: Path, manifest: dict[str, Any]) -> Changes:
    """Returns and prints how the config differs from the checkpoint's. Raises UserError on all ranks if the sequences
    of steps or the model would change, or the end was passed."""
    config, where = setup.folder.config, f"the checkpoint of step {manifest['step']}"
    if not manifest["data"]:
        raise UserError(
            f"{path} was imported; fine-tune it: paceline train --init-from {shlex.quote(setup.folder.shown)}",
            reach="world",
        )
    changed = changes(manifest["config"], setup.config)
    by_hand = {name: values for name, values in changed.items() if makes_another_run(name)}
    if broken := {name: values for name, values in by_hand.items() if changes_curve(name)}:
        raise UserError(
            f"{config} is not that of {where}: {_shown(broken)}; the steps to come would belong to another run. Put "
            "back what was there, or start a new run with `paceline train`",
            reach="world",
        )
    horizon = [f"{name} {changed[name][1]}" for name in HORIZONS if name in changed and changed[name][1]]
    if horizon and setup.settings.share_done(Progress.of(manifest["progress"])) > 1.0:
        raise UserError(
            f"the end of the run ({', '.join(horizon)}) comes before {where}: nothing would be trained. Give a later "
            "end, or an earlier checkpoint by --step",
            reach="world",
        )
    if by_hand:
        setup.console.say(
            f"{config} was changed since {where}: {_shown(by_hand)}. The run continues with what it says now",
            style="yellow",
        )
    if ends := {name: values for name, values in changed.items() if name in HORIZONS}:
        setup.console.say(
            f"the end of the run was changed since {where}: {_shown(ends)}. The learning rate now follows the schedule "
            "to the new end, so it may jump here",
            style="yellow",
        )
    if manifest["data"] != setup.data.blend.fingerprint:
        raise UserError(
            f"{path} was trained on other data, or other weights of it, than {setup.data.blend.name}: the next steps "
            "would read other sequences. Give the same by --data.path or --data.mix, or start a new run",
            reach="world",
        )
    return changed


def _shown(changed: Changes) -> str:
    return ", ".join(f"{name} {before!r} -> {now!r}" for name, (before, now) in changed.items())


def _forget_later_steps(setup: Setup) -> int:
    """Records the settings, which may be others than those of the attempt before, sets later checkpoints aside and
    drops later records. Returns the last step reached. Collective."""
    folder, world, step = setup.folder, setup.world, setup.progress.step

    def write_setup() -> None:
        folder.write_setup(to_toml(setup.config), setup.data.blend.first.tokenizer_json)

    def forget() -> tuple[list[str], int]:
        with writing_to(folder.path, RunError):
            write_setup()
            # Checkpoints first: a crash in between leaves extra records, which the next resume drops.
            keep = setup.request.resume_step is not None  # not of a crash: restarts would pile them up
            later = retention.set_aside(folder.checkpoints, step) if list_steps(folder.checkpoints) else []
            return later, folder.forget_after(step, keep)

    later, reached = from_rank_0(setup.group, forget)
    if world.local_rank == 0 and world.rank not in setup.checkpoints.writers:  # a host with a folder of its own
        with writing_to(folder.path, RunError):
            write_setup()  # not before: one that is refused leaves no run there. The next resume compares it
            folder.record_job(setup.request.job)  # this host may have rank 0 in a later attempt
    if later:
        setup.console.say(f"set aside as superseded: {', '.join(later)}")
    return reached


def _take_val_losses(setup: Setup) -> None:
    """Takes validation losses from the records: a checkpoint is saved before its evaluation. Collective."""
    progress, checkpoints, losses = setup.progress, setup.folder.checkpoints, dict[int, float]()
    best: float | None = None  # of the checkpoints that are there: the one that had a lower loss may be gone
    if setup.world.is_main:
        with contextlib.suppress(OSError):
            losses = retention.recorded_losses(checkpoints)
            if setup.config.checkpoint.keep_best:
                best = retention.mark(checkpoints, losses)  # in a copy, after a crash, or if none was kept so far
    progress.val_loss, progress.best_val_loss = setup.group.broadcast_json([losses.get(progress.step), best])
