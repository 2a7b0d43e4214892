"""The interface of all strategies: three verbs around a step.

    for i, micro_batch in enumerate(micro_batches):       # none, on a rank without a micro-batch in this step
        with sync.accumulate(last=i == len(micro_batches) - 1):
            loss(micro_batch).backward()                  # communicates on the last micro-batch only
    gradients = sync.reduce()                             # summed over ranks: all (ddp), or this rank's (zero, fsdp)
    update(gradients)
    sync.publish()                                        # what the other ranks need to know of the update

The loss is divided by the token count of the whole world's step before backward. So gradients are summed, not averaged:
a mean of means is wrong if ranks have different numbers of tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from paceline.base.ownership import Slice
from paceline.optim.optimizer import ParamSlice
from paceline.world.group import Group


class Strategy(ABC):
    """How gradients are summed over ranks, and who updates what. Defaults: a rank holds and updates all weights."""

    shards_weights = False  # each rank holds only a part of the weights
    updates_slices = False  # each rank updates its own slices only
    shards_state = False  # ranks hold different optimizer state: each for its own slices only (zero, fsdp), or its own
    holds_rounded = False  # the model's parameters are rounded; `weights` and `full_weights` are exact
    is_coded = False  # messages leave something out, which `wire_state` has
    lockstep = False  # forward and backward communicate: all ranks must make equally many passes
    # By kind and parameter, what this rank alone has (local); None: nothing.
    held: Mapping[str, Mapping[str, torch.Tensor]] | None = None
    num_copies, copy = 1, 0  # on how many ranks this rank's slices are (hsdp), and which of these copies is its own

    def __init__(self, model: nn.Module, group: Group):
        self._model, self._group = model, group
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}  # frozen later or not
        self.is_one_pass = False  # no rank makes more than one backward pass in this step
        self.loss_factor = 1.0  # of the losses before this step's backward passes: loss scale over divisor

    def slices(self) -> list[ParamSlice]:
        """Returns what this rank updates; before an update each slice's parameter has its gradient in `.grad`."""
        return [ParamSlice(name, p.shape, 0, p.numel(), p) for name, p in self._trained.items()]

    def parts(self) -> Iterator[list[ParamSlice]]:
        """Yields `slices` in parts, in the order of an update. Begins to publish a part when the next is asked for.
        Collective: all ranks take all parts, or none."""
        yield self.slices()

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

    def weigh(self, own: float, total: float) -> float:
        """Takes this rank's weight of the step (samples, or tokens) and all ranks', before the update. Returns what the
        sum of losses is divided by: all ranks'; with local this rank's."""
        return total

    def total(self, amount: torch.Tensor) -> torch.Tensor:
        """Returns a sum over all gradients from that over `reduce`'s, equal on all ranks. Collective if sharded."""
        return self._group.total(amount) / self.num_copies if self.shards_state else amount

    @abstractmethod
    def not_finite(self) -> tuple[str | None, bool | None]:
        """Between `reduce` and `publish`: returns (a parameter of this rank's slices whose summed gradient is not
        finite, or None; whether this rank's own gradients were not finite before the sum, None: unknown)."""

    @property
    def excess_factor(self) -> float:
        """The `loss_factor` of gradients in `wire_state`."""
        return 1.0

    @abstractmethod
    def publish(self) -> None:
        """After the update: clears the gradients, and begins to send the updated slices to other ranks. Collective."""

    def skip(self) -> None:
        """Instead of an update, before `publish`, on all ranks."""
        return

    def refresh(self) -> None:
        """After `weights` were changed: begins to give them to the model's parameters on all ranks. Collective."""
        return

    def end_step(self) -> None:
        """After the ranks have shared the step's numbers: local begins an exchange of weights. Collective then."""
        return

    def merge(self) -> None:
        """At the end of training: makes the ranks' weights equal. They are, except with local. Collective then."""
        return

    def shared_weights(self) -> AbstractContextManager[None]:
        """Returns the context of an evaluation, in which the model has the weights that all ranks share."""
        return nullcontext()

    def wait_for_params(self) -> None:
        """Waits for the weights of the last `publish`, and takes values that a script put in a parameter's place. A
        forward pass waits itself; other readers call this first."""
        return

    def keep_with_model(self, replica: object) -> None:
        """Keeps the replica as long as its model, if that has rounded weights: `release` is collective then, and each
        rank has to find the replica, whatever its garbage collector did."""
        return

    def release(self) -> None:
        """Removes the strategy's hooks from the model's modules; buckets.release removes those of parameters. Gives the
        parameters their exact values: collective if they are rounded."""
        return

    def wire_state(self) -> dict[Slice, torch.Tensor]:
        """Returns what a later message of this rank depends on, besides weights and gradients, as `parameter/wire.KEY`,
        flat, in place."""
        return {}

    def take_wire_state(self, found: Mapping[Slice, torch.Tensor], loss_factor: float) -> None:
        """Restores `wire_state` from complete tensors; several of one key are added up. loss_factor: as it was."""
        return

    def progress(self) -> list[float]:
        """Returns the numbers of this rank that go with `held`."""
        return []

    def begin_at_anchor(self) -> None:
        """Sets what is `held` as at the beginning, from the weights that all ranks share."""
        return

    def resume(self, progress: Sequence[float]) -> None:
        """Continues after `held` was restored, with its `progress`. Collective."""
        return

    def take_codec_ms(self) -> float:
        """Returns the CPU time of coding messages since the last call, of the threads that did it."""
        return 0.0

    def weights(self) -> dict[Slice, torch.Tensor]:
        """Returns the weights to save, exact, flat, in place where they are contiguous: those of `slices`, or all."""
        return {Slice(s.name, s.start, s.stop): s.parameter.detach().reshape(-1) for s in self.slices()}

    def on_all_ranks(self) -> dict[str, torch.Tensor]:
        """Returns the weights that every rank holds, bit for bit equal, by name."""
        self.wait_for_params()
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def copied(self) -> tuple[Mapping[str, torch.Tensor], Sequence[Sequence[int]]]:
        """Returns weights by name, and the groups of ranks that hold identical copies of them (hsdp)."""
        return {}, ()

    def full_weights(self) -> Mapping[str, torch.Tensor]:
        """Returns all weights by name, exact, in their shapes. Collective if they are rounded; if they are sharded,
        reading one is."""
        return self.on_all_ranks()
