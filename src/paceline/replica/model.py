"""A model, its optimizers, and what keeps them equal on all ranks: what a step works on (step.py)."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from paceline.base.errors import UserError
from paceline.optim.clip import has_float64
from paceline.replica import mistakes
from paceline.replica.gradients import Gradients, trained_parameters
from paceline.replica.stopping import StopRequest
from paceline.replica.updates import LossScaler, RunningStatistics, Updates
from paceline.sync.hooks import ModuleHook, release
from paceline.sync.make import make_strategy
from paceline.world.calls import mistake, place
from paceline.world.config import ParallelConfig
from paceline.world.device_clock import DeviceClock
from paceline.world.facts import check_strategy
from paceline.world.group import DistributedGroup
from paceline.world.runtime import World

_VERSION = attrgetter("_version")  # of a tensor: how often it was changed in place


class ReplicatedModel:
    """The part of a Replica that a step uses, and the numbers that go from one step to the next."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Any],
        world: World,
        config: ParallelConfig,
        dtype: torch.dtype,
        blocks: Sequence[nn.Module],
        read_as: Mapping[str, torch.dtype] | None,
        rounded_gradients: Collection[str],
    ):
        """See Replica. Collective."""
        self.model, self.optimizers, self.world, self.strategy = model, optimizers, world, config.strategy
        check_strategy(self.strategy, world.facts, config.wire)
        self.clock = DeviceClock(world.device)
        self.exact_dtype = torch.float64 if has_float64(world.device) else torch.float32
        self.dtype = dtype
        self.scaler = LossScaler.for_dtype(dtype)

        earlier = self._release_earlier()
        mistakes.mark_scaled_losses()
        mistakes.check_model(model, optimizers, self.strategy, world)
        if mistakes.is_on_the_host(model, self.strategy, world) and not isinstance(world.group, DistributedGroup):
            model.to(world.device)  # in other worlds fully_shard moves its blocks
        read_as, rounded = _by_full_name(model, read_as or {}, rounded_gradients)
        self.updates = Updates(model, optimizers)
        mistakes.start_alike(model, world)
        self.statistics = RunningStatistics(model, world.group)
        mistakes.warn_of_batch_norm(model, world)
        mistakes.warn_of_prefix(model, world)
        whole, sent_rounded = self.updates.updated_whole(), rounded if _adds_in_float32(world) else ()
        self.sync = make_strategy(config, model, world.group, whole, blocks, read_as, sent_rounded)
        self.gradients = Gradients(model, self.sync)
        world.calls.has_lockstep |= self.sync.shards_weights
        self.updates.adopt(self.sync.slices())

        self.earlier = earlier  # whose steps this one counts on
        # Updates made, including those before a restore.
        self.num_steps: int = 0 if earlier is None else earlier.num_steps
        # Weight of the last step, or of a row of it (see Step); saved.
        self.total_before: float = 1.0 if earlier is None else earlier.total_before
        if earlier is not None and earlier.scaler.is_dynamic and self.scaler.is_dynamic:
            self.scaler = earlier.scaler
        self.batch_fraction = 1.0 / world.world_size  # this rank's part of the last step's batch
        self.update_ms = 0.0  # of the last step
        self.open_step: Any = None  # the Step that is not finished yet
        self.stop: StopRequest | None = None  # sets this rank's stop flag; made by `steps(stop_on_signals=True)`
        self.stop_reason: str | None = None  # None: no rank's stop flag is set
        self.at: Callable[[str], str | None] = lambda phase: None
        """Called as each phase of a step begins; returns the fault that a test injects there."""
        self.copies: list[Callable[[], object]] = []
        """By Checkpoints object that saves this replica: waits until weights and state may change."""
        self.compare_every = 100  # steps between two comparisons of weights with the other ranks'; 0: none
        self.has_compared = self.has_said_empty = False  # in this process
        self.has_dropped = False  # the step before
        self._ended_at = ""  # where another replica took its place
        self.has_rounded_gradients = bool(rounded)
        self._tensors = [*model.parameters(), *model.buffers()]
        self._versions: int | None = None  # of these, at the end of the last step
        self.waits_at_once = True
        """Whether `finish` waits until the weights have arrived. False, with `zero` and `blocks`: each block of the
        next forward pass waits for its own. Then call the whole model only, never a part of it, and call
        `wait_for_params` before you read weights between steps."""
        self.world.calls.replicas.add(self)
        # Its end is collective then, and each rank has to find the replica, whatever its garbage collector did.
        keep, is_kept = ModuleHook(self._stay), self.sync.holds_rounded or self.sync.diverges
        self._kept_by = model.register_forward_pre_hook(keep) if is_kept else None
        self.world.calls.num_replicas += 1
        self.number = self.world.calls.num_replicas
        """Of this replica, the same on all ranks."""

    @property
    def vote(self) -> float:
        """This rank's stop flag."""
        return self.stop.vote if self.stop is not None else 0.0

    def autocast(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns the autocast context of the loop over micro-batches, in the replica's `dtype`."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, self.dtype, enabled=enabled)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the persistent buffers by name."""
        passing = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in passing}

    def mark_left(self) -> None:
        """Called at the end of a step: see `is_as_left`."""
        self._versions = sum(map(_VERSION, self._tensors))

    def is_as_left(self) -> bool:
        """Whether there was a step, and the script changed no weight or buffer since, as far as torch counts."""
        return bool(self._versions == sum(map(_VERSION, self._tensors)))

    @property
    def is_current(self) -> bool:
        """Whether no other replica took this one's place."""
        return not self._ended_at

    def require_current(self) -> None:
        """Raises UserError if another replica took this one's place."""
        if self._ended_at:
            raise mistake(
                f"this replica ended at {self._ended_at}, where another was made of its model, optimizer or some of "
                "its parameters: use that one. To train what two models share, put both into one nn.Module and one "
                "Replica"
            )

    def average_statistics(self) -> None:
        """Averages the running statistics of batch norms over ranks; also before a save, since another replica's step
        may have used this model. Collective if there are any."""
        self.require_current()
        self.statistics.average(self.batch_fraction)

    def wait_copied(self) -> None:
        """Waits until saves under way have copied weights and state, which may change then."""
        for wait_copied in self.copies:
            wait_copied()

    def release(self) -> None:
        """Removes all hooks from model and optimizers; this replica cannot train any more."""
        self._ended_at = place()
        self.sync.wait_for_params()
        self.sync.release()
        if self._kept_by is not None:
            self._kept_by.remove()
        release(self.model.parameters())
        if not self.updates.release(self.sync.shards_state and self.world.world_size > 1):
            mistakes.warn("this optimizer's state was divided by a replica before, and begins anew", self.world)
        self.world.calls.replicas.discard(self)

    def _stay(self, *_: object) -> None:
        """A hook of the model that does nothing: it keeps this replica as long as the model."""

    def _drop_open_step(self, may_repeat: bool = True) -> None:
        """Clears the gradients if an exception or `break` left the step before, say in a notebook. Then collective.
        may_repeat: False: raises UserError if the step before that was left, too: the script forgets `finish`."""
        step, self.open_step = self.open_step, None
        if step is None:
            return
        if self.world.calls.reducing is self:
            self.world.calls.reducing = None
        self.world.calls.record("the step after one without step.finish()")
        if not any(begun for (begun,) in self.world.group.share_integers([int(step.is_begun)])):
            return
        if self.has_dropped and not may_repeat:
            raise mistake("two steps in a row had no step.finish(): call it once in each step", reach="world")
        self.has_dropped = True
        mistakes.warn(f"step {step.number} had no step.finish(): its gradients are dropped", self.world)
        with contextlib.suppress(UserError):
            self.gradients.reveal()
        for parameter in self.gradients.trained.values():
            parameter.grad = None
        self.sync.reduce()
        self.sync.end_step()

    def _release_earlier(self) -> "ReplicatedModel | None":
        """Releases earlier replicas of these parameters or optimizers, as when a notebook cell runs again. Returns one
        of this model and these optimizers that trained fewer or other parameters (unfreezing), if each rank has it.
        Collective."""
        parameters = set(self.model.parameters())
        earlier: dict[int, ReplicatedModel] = {0: self}
        others = sorted(self.world.calls.replicas, key=attrgetter("number"))  # `release` may be collective
        self._merge([other for other in others if not parameters.isdisjoint(other.model.parameters())])
        for other in others:
            shared = [each for each in other.optimizers if any(each is optimizer for optimizer in self.optimizers)]
            if shared or not parameters.isdisjoint(other.model.parameters()):
                other.release()
            is_same = other.model is self.model and len(shared) == len(other.optimizers)
            if is_same and (
                other.updates.was_changed() or trained_parameters(self.model).keys() != other.gradients.trained.keys()
            ):
                earlier[other.number] = other
        release(self.model.parameters())
        newest = self.world.group.share_integers([max(earlier)])  # a rank's garbage collector may have taken it
        return earlier[newest[0][0]] if newest[0][0] and all(row == newest[0] for row in newest) else None

    def _merge(self, earlier: "Sequence[ReplicatedModel]") -> None:
        """Makes weights the average over ranks where each rank has its own, since all will take rank 0's: not weights
        that the script has changed after the last step, on any rank. Collective."""
        unmerged = [other.number for other in earlier if other.sync.diverges and other.is_as_left()]
        rows = self.world.group.share_json(unmerged)
        for other in earlier:
            if all(other.number in row for row in rows):
                other.wait_copied()
                other.sync.merge()


def _by_full_name(
    model: nn.Module, read_as: Mapping[str, torch.dtype], rounded_gradients: Collection[str]
) -> tuple[dict[str, torch.dtype], list[str]]:
    """Returns both with full names of parameters. Raises UserError for rounded gradients that read_as lacks."""
    dtypes = {name: read_as[key] for key, name in mistakes.full_names(model, read_as, "read_as").items()}
    rounded = list(mistakes.full_names(model, rounded_gradients, "rounded_gradients").values())
    if unread := [name for name in rounded if name not in dtypes]:
        raise mistake(f"rounded_gradients names {unread[0]}, which read_as does not: name it in both")
    return dtypes, rounded


def _adds_in_float32(world: World) -> bool:
    """Whether gradients that are sent rounded are added as float32: NCCL adds in the dtype in which it sends, and
    several ranks of a host add before they send to another host."""
    num_hosts = len({facts.host for facts in world.facts})
    return all(facts.device == "cpu" for facts in world.facts) and num_hosts in (1, world.world_size)


def drop_abandoned_step(world: World) -> None:
    """Drops the step, if any, that an exception ended between its last backward pass and `finish`, before a notebook's
    cell runs again. Then collective."""
    if isinstance(world.calls.reducing, ReplicatedModel):
        world.calls.reducing._drop_open_step()
