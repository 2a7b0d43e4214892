"""Saving a run and taking it up again. What is saved is decided by all ranks; each writes what it owns, meanwhile.

A save costs a step what it takes to begin it: the tensors are copied behind the next forward and backward, which change
none of them, and written behind the steps after. Never two at once: one that comes due meanwhile is made when all ranks
know, from a step's exchange, that none is under way. Waited for is the disk where a later step will not do: for the
best weights so far, and at the end; and, for a moment, where saves come so often that writing one takes a good part of
the interval to the next.
"""

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Iterator
from typing import Any

import torch

from paceline import __version__
from paceline.base import ownership, units
from paceline.base.errors import RunError, UserError
from paceline.base.ownership import Slice
from paceline.checkpoint import load, save
from paceline.checkpoint.save import Outcome
from paceline.config import to_toml
from paceline.train import changes
from paceline.train.changes import Changes
from paceline.train.check import check_replicas
from paceline.train.guard import SPEAKS_FIRST_S
from paceline.train.state import Progress, Run

_DISK_PATIENCE_S = 600.0  # as long as writers wait for each other: 10 GB at 17 MB/s
# Saves less than this much training apart are waited for, each so long at most. So a crash repeats one interval, not
# that and half of another (8 of 100 runs of 15 ms steps saved every 5); longer intervals hide the writing.
_OFTEN_S, _WAIT_S = 4.0, 1.0


def save_if_due(run: Run, is_due: bool) -> None:
    """Begins a save of this step if one is due, or was while another was under way. All ranks come to the same."""
    if run.config.checkpoint.keep_best and run.progress.is_best and run.somebody_saves:
        with _patience_with_the_disk(run):
            _finish_save(run)
            run.group.barrier()
        run.group.take_traffic()
        run.somebody_saves = False
    tell_outcome(run)
    if is_due and run.somebody_saves and not run.owes_a_save:  # said once, until it is made
        run.console.say(
            f"step {run.progress.step}: the last checkpoint is still being written, the next one waits for it. "
            "The disk is slower than --checkpoint.every asks for",
            style="yellow",
        )
        run.event("checkpoint postponed", step=run.progress.step)
    run.owes_a_save = run.owes_a_save or is_due
    if run.owes_a_save and not run.somebody_saves:
        often = run.progress.elapsed_s - run.saved_at_s < _OFTEN_S
        run.saved_at_s = run.progress.elapsed_s
        begin_save(run, run.progress)
        if often and run.world.is_main:  # on its word hangs the checkpoint; the others meet it in the next step
            run.saver.finish(within_s=_WAIT_S)


def begin_save(run: Run, progress: Progress) -> None:
    """Begins a save of the weights and the state as they are, as of `progress`. Every rank calls it.

    Replicas that differ stop the run before anything is saved.
    """
    due_steps = _due_steps(run, progress)
    run.owes_a_save = False
    if run.config.parallel.check_every:
        check_replicas(run, before_save=True)
    run.at("save")
    sync, optimizer = run.replica.sync, run.replica.optimizer
    sync.settle()
    weights, state = sync.weights(), optimizer.state()
    if not sync.shards_weights:
        weights = _my_part(run, weights)
    if not sync.shards_state:
        state = _my_part(run, state)
    scaler = run.replica.scaler
    facts = {
        "progress": dataclasses.asdict(progress),
        "val_loss": progress.val_loss,
        "due_steps": due_steps,
        "num_updates": optimizer.num_updates,
        "data": run.feed.blend.fingerprint,
        "scaler": {"scale": scaler.scale, "num_finite": scaler.num_finite},
        "world_size": run.world.world_size,
        "strategy": run.config.parallel.strategy,
        "versions": {"paceline": __version__, "torch": torch.__version__},
        "config": dataclasses.asdict(run.config),
    }
    run.saver.begin(progress.step, weights, state, run.shapes, facts)


def _due_steps(run: Run, progress: Progress) -> list[int]:
    """The steps whose checkpoint this one is: its own, and those that came due while the last was being written."""
    every, begun_at = run.config.checkpoint.every, run.saver.begun_at
    if not run.owes_a_save or not every or begun_at is None:
        return [progress.step]
    return [*range((begun_at // every + 1) * every, progress.step, every), progress.step]


@contextlib.contextmanager
def _patience_with_the_disk(run: Run) -> Iterator[None]:
    """Inside, ranks wait longer for each other than a step may take: a disk that is slow is no rank that hangs."""
    usual_s = run.config.parallel.timeout_s if run.timeout_s is None else run.timeout_s + SPEAKS_FIRST_S
    run.group.set_timeout(max(usual_s, _DISK_PATIENCE_S + SPEAKS_FIRST_S))
    yield
    run.group.set_timeout(usual_s)


def _finish_save(run: Run) -> None:
    """Returns when no save is under way on this rank. For so long the watchdog is told that all is well."""
    until = time.monotonic() + _DISK_PATIENCE_S
    while run.saver.is_busy and time.monotonic() < until:
        run.watchdog.enter("save", run.progress.step)
        run.saver.finish(within_s=0.2)
    run.saver.finish()


def save_now(run: Run, progress: Progress) -> str | None:
    """Saves and waits until it is on the disk, or is not: returns what went wrong then. Collective.

    Checkpoints of later steps than that of `progress` are set aside: beside them it would not be the newest, nor kept.
    """
    with _patience_with_the_disk(run):
        _finish_save(run)
        tell_outcome(run)
        if run.world.is_main and progress.step < run.progress.step:
            with contextlib.suppress(OSError):  # a disk that fails here fails the save, which says so
                save.set_aside(run.folder.checkpoints, progress.step)
        begin_save(run, progress)
        _finish_save(run)
        outcome = tell_outcome(run)
        problem: str | None = run.group.broadcast_json(outcome.problem if outcome else "its writer did not finish")
    run.group.take_traffic()
    return problem


def tell_outcome(run: Run) -> Outcome | None:
    """Says and notes how a save ended, once. Training goes on in any case."""
    outcome = run.saver.take_outcome()
    if outcome is None or not run.world.is_main:
        return outcome
    if outcome.problem:
        run.console.say(f"the checkpoint of step {outcome.step} could not be saved: {outcome.problem}", style="red")
        run.event("checkpoint failed", step=outcome.step, error=outcome.problem)
    else:
        run.event("checkpoint", step=outcome.step, seconds=round(outcome.seconds, 3), bytes=outcome.num_bytes)
    return outcome


def _my_part(run: Run, tensors: dict[Slice, torch.Tensor]) -> dict[Slice, torch.Tensor]:
    """What this rank writes of tensors that all ranks have: equal parts for the ranks that see the folder."""
    if run.writer is None:
        return {}
    by_name = {item.name: tensor for item, tensor in tensors.items()}
    mine = ownership.cut(tensors, run.num_seers)[run.writer]
    return {item: by_name[item.name][item.start : item.stop] for item in mine}


def restore_run(run: Run) -> bool:
    """Takes up the newest whole checkpoint, or the one that was asked for; records of later steps are forgotten.

    Returns whether there was one: a run that died before it saved anything begins again. Collective.
    """
    run.at("restore")
    everyone_sees = run.num_seers == run.world.world_size
    try:
        path, manifest, problems = load.agree(
            run.group, run.folder.checkpoints, run.request.resume_step, everyone_sees=everyone_sees
        )
    except load.NothingSaved:
        _require_never_saved(run)
        return False
    for problem in problems:
        run.console.say(f"passed over a damaged checkpoint: {problem}", style="yellow")
        run.event("damaged checkpoint", problem=problem)
    if not manifest["data"]:
        raise UserError(
            f"{path} was imported; fine-tune it: paceline train --init-from {shlex.quote(run.folder.shown)}",
            reach="world",
        )
    changed = _require_same_run(run, manifest)
    if manifest["data"] != run.feed.blend.fingerprint:
        raise UserError(
            f"{path} was trained on other data than {run.feed.blend.name}: the order of its sequences would not go on. "
            f"Give the same data by --data.path, or start a new run",
            reach="world",
        )
    sync, optimizer = run.replica.sync, run.replica.optimizer
    held = sync.weights()
    wanted = optimizer.state_slices() if manifest["num_updates"] else []
    try:
        weights = load.receive(run.group, path, manifest, "weights", held, run.shapes, everyone_sees)
        state = load.receive(run.group, path, manifest, "optimizer", wanted, run.shapes, everyone_sees)
        for item, tensor in held.items():
            tensor.copy_(weights[item])
        optimizer.load_state(state, manifest["num_updates"])
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path} does not fit this config: {error}", reach="world") from error
    run.progress = Progress(**manifest["progress"])
    run.replica.scaler.scale = manifest["scaler"]["scale"]
    run.replica.scaler.num_finite = manifest["scaler"]["num_finite"]
    reached = _forget_the_rest(run)
    before, now = manifest["world_size"], run.world.world_size
    worlds = {"from_world_size": before, "world_size": now, "hosts": run.hosts()}
    run.event("resume", step=run.progress.step, reached=reached, **worlds, **({"changed": changed} if changed else {}))
    run.console.say(
        f"resumed at step {run.progress.step} ({units.count(run.progress.tokens)} tokens seen); saved by "
        f"{before} rank{'s'[: before != 1]}, now {now}; {run.settings.plan.global_batch_size} sequences a step "
        "as before\n"
    )
    return True


def _require_same_run(run: Run, manifest: dict[str, Any]) -> Changes:
    """Returns what the config says otherwise than when this checkpoint was made; says what no flag can have changed.

    Raises UserError on all ranks, which have the same config, where steps would be of other sequences or of another
    model, or the end is behind already.
    """
    found, where = changes.changes(manifest["config"], run.config), f"the checkpoint of step {manifest['step']}"
    by_hand = {name: values for name, values in found.items() if changes.makes_another_run(name)}
    if broken := {name: values for name, values in by_hand.items() if changes.breaks_the_law(name)}:
        raise UserError(
            f"{run.folder.config} is not that of {where}: {changes.shown(broken)}; the steps to come would belong to "
            "another run. Put back what was there, or start a new run with `paceline train`",
            reach="world",
        )
    horizon = [f"{name} {now}" for name, (_, now) in found.items() if changes.is_horizon(name) and now]
    if horizon and _is_over(run, Progress(**manifest["progress"])):
        raise UserError(
            f"the end of the run ({', '.join(horizon)}) is behind {where}: nothing would be trained. Give a later one, "
            "or an earlier checkpoint by --step",
            reach="world",
        )
    if by_hand:
        run.console.say(
            f"{run.folder.config} was changed since {where}: {changes.shown(by_hand)}. The run goes on with what it "
            "says now",
            style="yellow",
        )
    return found


def _is_over(run: Run, progress: Progress) -> bool:
    """Whether the run came further than it now is to go."""
    if run.settings.num_steps is not None:
        return progress.step > run.settings.num_steps
    return progress.elapsed_s > run.config.train.time_budget


def _require_never_saved(run: Run) -> None:
    """Raises RunError on all ranks where the run had checkpoints, and they are gone: beginning again would be silent
    loss. Collective."""
    if run.group.broadcast_json(run.world.is_main and run.folder.has_saved()):
        raise RunError(
            f"checkpoints of this run have been saved, and {run.folder.checkpoints} has none: is its disk mounted? "
            "Nothing was changed",
            reach="world",
        )


def _forget_the_rest(run: Run) -> int:
    """What the folder has of later steps belongs to another course of the run. Rank 0 does it, all learn of trouble.

    Returns the step that the run had reached, on rank 0."""
    problem: str | None = None
    reached = 0
    if run.world.is_main:
        try:
            run.folder.write_setup(to_toml(run.config), run.feed.blend.tokenizer_json)
            # Checkpoints first: dying in between leaves rows too many, which the next resume forgets, never too few.
            later = save.set_aside(run.folder.checkpoints, run.progress.step)
            reached = run.folder.forget_after(run.progress.step)
            if later:
                run.console.say(f"set aside as superseded: {', '.join(later)}")
        except OSError as error:
            problem = f"cannot write to the run folder {run.folder.path}: {error.strerror or error}"
    problem = run.group.broadcast_json(problem)
    if problem:
        raise RunError(problem, reach="world")
    return reached
