"""Several objects in one atomic checkpoint, which any number of ranks and any strategy restores.

    checkpoints = paceline.Checkpoints("runs/net", net=replica, ema=ema, schedule=schedule, keep=3)
    checkpoints.restore()                       # the newest good one, or none
    ...
        checkpoints.save_every(500)             # in the loop, after step.finish()

Every rank writes its part while training continues; a checkpoint is complete or absent, every byte is verified before
use, and nothing in it can run code (safetensors and JSON). contents.py decides what is saved of each object; folder.py
saves all objects together.
"""

import contextlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import RunError, UserError
from paceline.checkpoint import load, retention
from paceline.checkpoint import manifest as mf
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.save import Outcome
from paceline.checkpoint.steps import folder_name, list_steps
from paceline.record.folder import RunFolder
from paceline.record.output import print_error
from paceline.replica import contents
from paceline.replica.folder import CheckpointFolder
from paceline.replica.joining import at_leaving
from paceline.replica.model import drop_abandoned_step
from paceline.replica.replica import Replica
from paceline.sync.replicas import compared, digests, take_rounding_of_rank_0
from paceline.world.calls import mistake, place
from paceline.world.facts import unequal_kinds
from paceline.world.group import Group, from_rank_0

_ROUND_S = 0.5  # how often ranks that wait for a save meet
_OPEN: dict[Path, "Checkpoints"] = {}  # by folder: a notebook cell that runs again makes them again


class Checkpoints(CheckpointFolder):
    """Checkpoints of named objects in a folder of one run, which must be empty, or be restored before the first
    save."""

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        keep_best: bool = False,
        frozen: bool = True,
        to: str = "",
        **objects: Any,
    ):
        """folder: holds `checkpoints/`; one run at a time. objects, by name: at least one Replica; modules, schedules,
        what `paceline.share` returned, and other objects whose state_dict() has JSON values and tensors;
        torch.Generators; dicts of JSON values, which a restore changes in place. Objects other than Replicas must be
        equal on all ranks; rank 0's values are saved.

        keep: how many of the newest checkpoints stay, at least 2, in case one is damaged. keep_every: also keep steps
        that are multiples of this. keep_best: also keep the one with the lowest val_loss. frozen: False: a save has no
        parameter that was frozen when its Replica was made, only a digest of them: a restore wants the same ones in the
        model, and `load_weights` returns the others. to: an address that also gets each checkpoint, s3://BUCKET/RUN,
        gs://BUCKET/RUN or file:///FOLDER/RUN; a folder without checkpoints gets those that are there. Collective. Make
        it before the loop over steps.

        Raises UserError on all ranks if the folder cannot be written or another process uses it.
        """
        folder = Path(folder).absolute()  # the script may change its directory
        config = CheckpointConfig(keep=keep, keep_every=keep_every, keep_best=keep_best, to=to)
        config.check()
        replicas = {name: thing for name, thing in objects.items() if isinstance(thing, Replica)}
        others = {name: thing for name, thing in objects.items() if name not in replicas}
        if not replicas:
            raise mistake("paceline.Checkpoints needs at least one Replica, by a name: net=replica")
        for name, thing in others.items():
            contents.check_object(name, thing)
        world = next(iter(replicas.values())).world
        drop_abandoned_step(world)
        world.calls.record("Checkpoints")
        self._is_own = False  # this run has restored from it, or saved to it
        if (earlier := _OPEN.get(folder.resolve())) is not None:  # an earlier object of this process
            saved = {each.replica.number for each in earlier._replicas.values()}
            self._is_own = earlier._is_own and all(each.continues in saved for each in replicas.values())
            earlier._end()
        self.run_folder = RunFolder(folder)
        _make_and_lock(self.run_folder, world.group)
        try:
            super().__init__(folder, config, replicas, others, keeps_generators=True, keeps_frozen=frozen, brings=True)
        except BaseException:
            self.run_folder.close()
            raise
        _OPEN[folder.resolve()] = self
        self._problem: str | None = None  # of the last finished save
        self.on_outcome: Callable[[Outcome], object] = lambda outcome: None
        """Called on rank 0 with the end of each save."""
        self.on_news: Callable[..., object] = lambda kind, **facts: None
        """Called on rank 0 with an event of `to`, and its facts."""
        self.before_save: Callable[[], object] = lambda: None
        """Called when a save begins; it may be collective."""
        at_leaving(partial(_end_owner, folder.resolve()))

    def save_every(self, num_steps: int, val_loss: float | None = None) -> bool:
        """Saves if the number of steps made is a multiple of num_steps, or if a rank was asked to stop; returns whether
        it saved. Collective: call it after each step."""
        if num_steps < 1:
            raise mistake(f"save_every was given {num_steps} steps; it is at least 1")
        self._require_own()
        replicas = [each.replica for each in self._replicas.values()]
        is_due = self._main.num_steps % num_steps == 0 or any(replica.stop_reason for replica in replicas)
        if is_due:
            self.save(val_loss)
        return is_due

    def save(self, val_loss: float | None = None) -> None:
        """Copies what a checkpoint holds, and starts to write it, named by the steps made; training continues
        meanwhile, and everything may change in place. Collective.

        val_loss: compared by keep_best. Waits for an earlier save. A failed save is printed and training continues;
        only the failure of the last save fails the script. Called before `step.finish()` of a step of `replica.steps`,
        it saves the state before that step; in a loop of your own call it after the step. Raises UserError if something
        cannot be saved or the folder is another run's, RunError if replicas differ.
        """
        self.world.calls.record("Checkpoints.save")
        self._require_own()
        self.before_save()
        self._finish_save()
        states = self._states_of_others()
        for each in self._replicas.values():
            each.replica.average_statistics()
        if unequal_kinds(self.world.facts):
            buffers = [buffer for each in self._replicas.values() for buffer in each.replica.buffers().values()]
            take_rounding_of_rank_0([*states[1].values(), *buffers], self._group, self.world.device)
        content = f"{self._require_equal(states[1])} {states[0]}"
        facts = {"val_loss": None if val_loss is None else float(val_loss), "content": zlib.crc32(content.encode())}
        is_there = self.world.is_main and self._is_saved(facts)
        # Also a barrier: a writer removes files that look unfinished.
        if not self._group.share_integers([int(is_there)])[0][0]:
            self.begin(self._main.num_steps, facts, states)
            self.saver.wait_copied()  # after this the script may change anything in place

    def restore(self) -> int | None:
        """Restores all objects, the data position and the random generators from the newest complete checkpoint,
        written by any number of ranks with any strategy. Returns its step, or None if nothing was ever saved here.
        Collective.

        Later checkpoints are set aside. Raises UserError if the checkpoint does not fit, RunError if none is complete.
        """
        drop_abandoned_step(self.world)
        self.world.calls.record("Checkpoints.restore")
        self._finish_save()
        newest = self.find()
        if newest is None:
            self._is_own = True
            return None
        path, manifest, problems = newest
        for problem in problems:
            self.world.say(f"passed over a damaged checkpoint: {problem}")
        self.take(path, manifest)
        self._is_own = True
        # Shared, so that on all ranks later ones are set aside when this returns.
        from_rank_0(self._group, lambda: retention.set_aside(self.checkpoints, manifest["step"]))
        self.world.say(f"restored step {manifest['step']} from {path}")
        return int(manifest["step"])

    def finish(self) -> None:
        """Returns on all ranks when the last save is on the disk; raises RunError on all if it failed. Collective."""
        self.world.calls.record("Checkpoints.finish")
        self._finish_save()
        if self._problem:
            raise RunError(f"the last checkpoint could not be saved: {self._problem}", reach="world")

    # ---- inside ----

    def _finish_save(self) -> None:
        """Waits until no rank has a save under way; rank 0 prints its failure once, and all know it. Collective. Ranks
        meet meanwhile: a slow disk is no hang."""
        while any(is_busy for (is_busy,) in self._group.share_integers([int(self.saver.is_busy)])):
            self.saver.finish(within_s=_ROUND_S)
        self._take_outcome()
        self._problem = self._group.broadcast_json(self._problem)

    def _take_outcome(self) -> None:
        """Waits for this rank's part of a save, and prints the failure of the checkpoint once, on rank 0."""
        self.saver.finish()
        outcome = self.saver.take_outcome()
        self.say_news()
        if outcome is not None and self.world.is_main:
            self._problem = outcome.problem
            self.on_outcome(outcome)
            if outcome.problem:
                print_error(f"the checkpoint of step {outcome.step} could not be saved: {outcome.problem}")

    def say_news(self) -> None:
        """Says on rank 0 what was sent to `to`, and what could not be."""
        self.report_news(self.on_news, print_error)

    def _is_saved(self, facts: Mapping[str, Any]) -> bool:
        """Whether there is a checkpoint of this step with the same values: restored, or saved before. Then its
        validation loss is recorded, and it is the latest."""
        step = self._main.num_steps
        with contextlib.suppress(mf.Damaged, OSError):
            if mf.read_manifest(self.checkpoints / folder_name(step)).get("content") == facts["content"]:
                retention.point(self.checkpoints, "latest", folder_name(step))  # a crash may have come before
                if facts["val_loss"] is not None:
                    retention.mark(self.checkpoints, {step: facts["val_loss"]})
                return True
        return False

    def _require_own(self) -> None:
        """Raises UserError on all ranks if the folder has checkpoints that this run did not restore. Collective."""
        if _OPEN.get(self.folder.resolve()) is not self:
            raise mistake(f"{self.folder} was given to another paceline.Checkpoints since: save by that one")
        if self._is_own:
            return
        self.world.calls.record("Checkpoints.save")
        steps = self._group.broadcast_json(list_steps(self.checkpoints) if self.world.is_main else [])
        if steps:
            raise mistake(
                f"{self.checkpoints} holds checkpoints of another run, up to step {steps[-1]}, which this "
                "one has not restored, and saves would mix with them: call checkpoints.restore() before the first "
                "step, or name another folder",
                reach="world",
            )
        self._is_own = True

    def _require_equal(self, extras: Mapping[str, torch.Tensor]) -> str:
        """Returns a digest of the values that all ranks must share; raises RunError if they differ. Collective."""
        tensors = dict(extras)
        for each in self._replicas.values():
            tensors |= each.on_all_ranks()
        here = digests(tensors)
        is_same = len(set(self._group.share_text(" ".join(tensors)))) == 1
        different = list(map(str, compared(here, self._group))) if is_same else ["ranks have different tensors"]
        if different:
            raise RunError(
                f"{place()}: replicas are not equal, so nothing is saved: {different[0]}. A buffer that each rank "
                "changes by its own data, or weights that the script changed on one rank, must be made equal",
                reach="world",
            )
        sharded = [each.weights() for each in self._replicas.values() if each.replica.sync.shards_weights]
        weights_here = {str(item): tensor for weights in sharded for item, tensor in weights.items()}
        by_rank = self._group.share_json(digests(weights_here)) if sharded else []
        return f"{sorted(here.items())} {by_rank}"

    def _end(self) -> None:
        if _OPEN.get(self.folder.resolve()) is not self:
            return
        try:
            self._take_outcome()  # no collective: another rank may have failed
            if self.world.is_main and self._problem:
                raise RunError(f"the last checkpoint could not be saved: {self._problem}")
            while self.storage is not None and self.storage.is_ending_within(_ROUND_S):
                pass
            self.say_news()
            if self.storage is not None:
                self.storage.release()
        finally:
            del _OPEN[self.folder.resolve()]
            for each in self._replicas.values():
                each.replica.copies.remove(self.saver.wait_copied)
            self.run_folder.close()


def _end_owner(folder: Path) -> None:
    """Ends the object that owns the folder by then. Named by folder, so that an earlier object is not kept alive."""
    if (checkpoints := _OPEN.get(folder)) is not None:
        checkpoints._end()


def load_weights(folder: str | Path, name: str | None = None) -> dict[str, torch.Tensor]:
    """Returns weights and buffers of the newest complete checkpoint in `folder`, by plain names, unsharded, on the CPU.

    name: of the replica; None: the only one. Needs no world; also reads runs of `paceline train`. Raises UserError if
    there is no checkpoint or no such replica, RunError if no checkpoint is complete.
    """
    weights, problems = load.read_weights(Path(folder) / "checkpoints")
    for problem in problems:
        print_error(f"passed over a damaged checkpoint: {problem}")
    names = sorted({key.partition(":")[0] for key in weights if ":" in key})
    if name is None and len(names) > 1:
        raise UserError(f"{folder} holds the weights of {', '.join(names)}: name one of them")
    if name is not None and name not in names:
        raise UserError(f"{folder} holds no weights of {name}; it has {', '.join(names) or 'one model without a name'}")
    prefix = f"{name if name is not None else names[0]}:" if names else ""
    return {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}


def _make_and_lock(folder: RunFolder, group: Group) -> None:
    """Makes the folder, and locks it on rank 0. Collective."""

    def lock() -> None:
        try:
            folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.lock()
        except OSError as error:
            raise UserError(f"cannot write to {folder.path}: {error.strerror}") from None

    from_rank_0(group, lock)
    with contextlib.suppress(OSError):  # on a host that does not see rank 0's folder
        folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
