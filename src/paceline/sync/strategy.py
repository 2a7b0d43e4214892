"""The interface of all strategies: the verbs around a step.

    for i, micro_batch in enumerate(micro_batches):       # none, on a rank without a micro-batch in this step
        with sync.accumulate(last=i == len(micro_batches) - 1):
            loss(micro_batch).backward()                  # communicates on the last micro-batch only
    gradients = sync.reduce()                             # summed over ranks: all (ddp), or this rank's (zero, fsdp)
    update(gradients)
    sync.publish()                                        # what the other ranks need to know of the update
    sync.end_step()

The loss is divided by the token count of the whole world's step before backward. So gradients are summed, not averaged:
a mean of means is wrong if ranks have different numbers of tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.base.ownership import Slice
from paceline.optim.optimizer import ParamSlice
from paceline.sync.hooks import hooked
from paceline.world.group import Group

# Reads whole tensors of a checkpoint by name, flat. Collective.
Fetch = Callable[[Collection[str]], Mapping[str, torch.Tensor]]


class Strategy(ABC):
    """How gradients are summed over ranks, and who updates what. Defaults: a rank holds and updates all weights."""

    shards_weights = False  # each rank holds only a part of the weights; all ranks must make equally many passes
    shards_state = False  # ranks hold different optimizer state: of their own slices (zero, fsdp), or weights (local)
    holds_rounded = False  # the model's parameters are rounded; `weights` and `full_weights` are exact
    diverges = False  # each rank trains weights of its own, and `weights` are what all ranks share (local)

    def __init__(self, model: nn.Module, group: Group):
        self._model, self._group = model, group
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}  # frozen later or not
        self.check: Callable[[torch.Tensor], None] | None = None
        """Called with each parameter that gets a gradient, before the strategy takes it. With fsdp only
        outside of a step's backward passes."""
        self.is_one_pass = False  # no rank makes more than one backward pass in this step
        self.loss_factor = 1.0  # of the losses before this step's backward passes: loss scale over divisor
        self._own_sums: list[torch.Tensor] = []  # of this rank's gradients in this step, before the sum over ranks
        for parameter in () if self.shards_weights else self._trained.values():
            hooked(parameter, self._on_gradient)

    # ---- a step ----

    def slices(self) -> list[ParamSlice]:
        """Returns what this rank updates; before an update each slice's parameter has its gradient in `.grad`."""
        return [ParamSlice(name, p.shape, 0, p.numel(), p) for name, p in self._trained.items()]

    def leaves(self) -> Collection[torch.Tensor]:
        """Returns the tensors whose gradients autograd adds up in a backward pass; after its forward pass."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    @abstractmethod
    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Returns the context for forward and backward of a micro-batch."""

    @abstractmethod
    def reduce(self) -> list[torch.Tensor]:
        """Returns the gradients to update with, summed over ranks, as a few flat tensors; those of `slices` are views
        of them. Collective: once a step on every rank, also without a micro-batch, before any other collective."""

    @abstractmethod
    def full_gradients(self) -> list[torch.Tensor]:
        """After `reduce`: completes `.grad` of each model parameter on every rank and returns these gradients as a few
        flat tensors; with fsdp this rank's shards. Collective if gradients are sharded."""

    @abstractmethod
    def changed_gradients(self) -> list[torch.Tensor]:
        """Returns what `reduce` does, after `.grad` of the model's parameters was changed."""

    def total(self, amount: torch.Tensor) -> torch.Tensor:
        """Returns a sum over all gradients from that over `reduce`'s, equal on all ranks. Collective if sharded."""
        return self._group.total(amount) if self.shards_state else amount

    def not_finite(self) -> tuple[str | None, bool | None]:
        """Between `reduce` and `end_step`: returns (a parameter of this rank's slices whose summed gradient is not
        finite, or None; whether this rank's own gradients were not finite before the sum, None: unknown)."""
        gradients = ((part.name, part.parameter.grad) for part in self.slices())
        bad = (name for name, grad in gradients if grad is not None and not bool(grad.isfinite().all()))
        return next(bad, None), any(not bool(value.isfinite()) for value in self._own_sums) if self._own_sums else None

    def publish(self) -> None:
        """After the update, unless all ranks skip it: begins to send what others need to know of it. Collective."""
        return

    @abstractmethod
    def end_step(self, own_weight: float = 0.0, weight: float = 0.0) -> None:
        """Clears the gradients. own_weight: this rank's samples or tokens in the step; weight: all ranks'; 0: the step
        is dropped. Collective with local, which begins an exchange of weights."""

    def wait_for_params(self) -> None:
        """Waits for the weights of the last `publish`, and takes values that a script put in a parameter's place. A
        forward pass waits itself; other readers call this first."""
        return

    def take_codec_ms(self) -> float:
        """Returns the CPU time of coding messages since the last call, of the threads that did it."""
        return 0.0

    # ---- the weights ----

    def weights(self) -> dict[Slice, torch.Tensor]:
        """Returns the weights to save, exact, flat, in place where they are contiguous: those of `slices`, or all."""
        return {Slice(s.name, s.start, s.stop): s.parameter.detach().reshape(-1) for s in self.slices()}

    def on_all_ranks(self) -> dict[str, torch.Tensor]:
        """Returns the weights that every rank holds, bit for bit equal, by name."""
        self.wait_for_params()
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def copies(self) -> tuple[Mapping[str, torch.Tensor], Sequence[Sequence[int]]]:
        """Returns weights by name, and the groups of ranks that hold identical copies of them (hsdp)."""
        return {}, ()

    def full_weights(self) -> Mapping[str, torch.Tensor]:
        """Returns all weights by name, exact, in their shapes. Collective if they are rounded; if they are sharded,
        reading one is."""
        return self.on_all_ranks()

    def shared_weights(self) -> AbstractContextManager[None]:
        """Returns the context of an evaluation, in which the model has the weights that all ranks share."""
        return nullcontext()

    def merge(self) -> bool:
        """At the end of training: makes the ranks' weights equal, which they are, except with local. Returns whether
        that may have changed them. Collective then."""
        return False

    # ---- a checkpoint, and the end ----

    def private_state(self) -> tuple[dict[Slice, torch.Tensor], dict[str, Any]]:
        """Returns what later steps of this rank depend on besides weights, gradients and optimizer state: tensors as
        `parameter/KEY`, flat, in place where they are contiguous, and numbers as `/KEY`."""
        return {}, {}

    def restore(self, stored: Collection[str], numbers: Mapping[str, Any], fetch: Fetch) -> None:
        """After `weights` were changed: gives them to all ranks, and continues with the private state of a checkpoint;
        stored, numbers: the names of its tensors, and its numbers, of all ranks; perhaps of another strategy or world.
        Collective."""
        return

    def release(self) -> None:
        """Removes the strategy's hooks from the model's modules; hooks.release removes those of parameters. Gives the
        parameters their exact values: collective if they are rounded."""
        return

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Called by autograd with each gradient, after it was added to `.grad`."""
        if self.check is not None:
            self.check(parameter)
