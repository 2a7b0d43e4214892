"""The loop over the steps of a source: its length, where it resumes, how it ends."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.base.errors import UserError
from paceline.replica import generators, mistakes
from paceline.replica.share import Share
from paceline.replica.step import Step
from paceline.world.calls import mistake

if TYPE_CHECKING:
    from paceline.replica.replica import Replica


class BegunFrom(NamedTuple):
    """Data position and random generators before the current step was drawn. A checkpoint that is saved before
    `step.finish()` resumes there and repeats the step."""

    batches: Share
    position: dict[str, Any]
    states: generators.States | None  # None: no Checkpoints save this replica


def steps(replica: "Replica", batches: Share, max_steps: int | None, epochs: int | None) -> Iterator[Step]:
    """Implements Replica.steps."""
    _drop_open_step(replica)
    while not _is_over(replica, batches, max_steps, epochs):
        begun_at, is_from_the_top = replica.num_steps, batches.step == 0
        yield from _one_pass(replica, batches, max_steps)
        if max_steps is None and epochs is None:
            return
        if replica.num_steps == begun_at and is_from_the_top:
            raise mistake("a whole pass over the data gave no step")


def _one_pass(replica: "Replica", batches: Share, max_steps: int | None) -> Iterator[Step]:
    drawn = batches.resumed()
    while True:
        states = generators.states(replica.world.device) if replica.copies else None
        replica.begun_from = BegunFrom(batches, batches.state_dict(), states)
        batch = next(drawn, None)
        if batch is None:
            replica.begun_from = None
            return
        try:
            yield replica.step(batch)
        except GeneratorExit:  # the script left its loop by `break`
            batches.leave()
            raise
        if replica.open_step is not None:
            raise mistake("a step of replica.steps had no step.finish(): call it once in each step")
        if _is_over(replica, batches, max_steps, None):
            return


def _is_over(replica: "Replica", batches: Share, max_steps: int | None, epochs: int | None) -> bool:
    has_steps = max_steps is not None and replica.num_steps >= max_steps
    return replica.stop_reason is not None or has_steps or (epochs is not None and batches.epoch >= epochs)


def _drop_open_step(replica: "Replica") -> None:
    """Clears the gradients if an exception ended an earlier loop, say in a notebook. Then collective."""
    step, replica.open_step, replica.begun_from = replica.open_step, None, None
    if step is None:
        return
    mistakes.warn(f"step {step.number} had no step.finish(): its gradients are dropped", replica.world)
    with contextlib.suppress(UserError):
        replica.gradients.reveal()
    replica.world.calls.reducing = None
    replica.sync.reduce()
    replica.sync.publish()
