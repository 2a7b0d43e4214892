"""Saving a run and taking it up again. The decision is every rank's, the disk is rank 0's."""

import dataclasses
import time

import torch

from paceline import __version__
from paceline.base import units
from paceline.base.errors import UserError
from paceline.checkpoint import load, save
from paceline.checkpoint.manifest import OPTIMIZER, WEIGHTS
from paceline.sync.replicas import require_equal
from paceline.train.meet import write_setup
from paceline.train.state import Progress, Run


def save_run(run: Run) -> bool:
    """Returns whether a checkpoint of this step is on disk. Collective.

    Replicas that differ stop the run before anything is saved; a failing disk is said, and training can go on.
    """
    step = run.progress.step
    if run.config.parallel.check_every:
        require_equal(run.replica.model, run.group, step)
    started = time.perf_counter()
    problem: str | None = None
    if run.world.is_main:
        scaler = run.replica.scaler
        facts = {
            "progress": dataclasses.asdict(run.progress),
            "data": run.feed.blend.fingerprint,
            "scaler": {"scale": scaler.scale, "num_finite": scaler.num_finite},
            "world_size": run.world.world_size,
            "versions": {"paceline": __version__, "torch": torch.__version__},
            "config": dataclasses.asdict(run.config),
        }
        weights = dict(run.replica.model.state_dict())
        optimizer = run.replica.optimizer.state_tensors()
        try:
            save.save(run.folder.checkpoints, step, weights, optimizer, facts, run.config.checkpoint.keep)
        except OSError as error:
            problem = str(error)
    problem = run.group.broadcast_json(problem)
    run.group.take_transfers()
    if problem:
        run.console.say(f"the checkpoint of step {step} could not be saved: {problem}", style="red")
        run.event("checkpoint failed", step=step, error=problem)
    else:
        run.event("checkpoint", step=step, seconds=round(time.perf_counter() - started, 3))
    return not problem


def restore_run(run: Run) -> None:
    """Rank 0 verifies and reads the checkpoint, all receive it; records of later steps are forgotten. Collective."""
    path, manifest, problems = load.agree(run.group, run.folder.checkpoints, run.request.resume_step)
    for problem in problems:
        run.console.say(f"passed over a damaged checkpoint: {problem}", style="yellow")
        run.event("damaged checkpoint", problem=problem)
    if manifest.get("data") != run.feed.blend.fingerprint:
        raise UserError(
            f"{path} was trained on other data than {run.feed.blend.name}: the order of its sequences would not go on. "
            f"Give the same data by --data.path, or start a new run",
            reach="world",
        )
    weights = load.receive(run.group, path, WEIGHTS, run.world.device)
    moments = load.receive(run.group, path, OPTIMIZER, run.world.device)
    try:
        run.replica.model.load_state_dict(weights, strict=True)
        run.replica.optimizer.load_state_tensors(moments)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path} does not fit this config: {error}", reach="world") from error
    run.progress = Progress(**manifest["progress"])
    run.replica.scaler.scale = manifest["scaler"]["scale"]
    run.replica.scaler.num_finite = manifest["scaler"]["num_finite"]
    if run.world.is_main:
        write_setup(run.folder, run.config, run.feed.blend)
        # Checkpoints first: dying in between leaves rows too many, which the next resume forgets, and never too few.
        later = save.set_aside(run.folder.checkpoints, run.progress.step)
        run.folder.forget_after(run.progress.step)
        if later:
            run.console.say(f"set aside as superseded: {', '.join(later)}")
    before, now = manifest["world_size"], run.world.world_size
    run.event("resume", step=run.progress.step, from_world_size=before, world_size=now)
    run.console.say(
        f"resumed at step {run.progress.step} ({units.count(run.progress.tokens)} tokens seen); saved by "
        f"{before} rank{'s'[: before != 1]}, now {now}; {run.settings.plan.global_batch_size} sequences a step "
        "as before\n"
    )
