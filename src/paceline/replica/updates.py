"""The optimizers of a replica, which update this rank's part: complete parameters, or slices of them (zero, fsdp)."""

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.optim.adamw import AdamW
from paceline.optim.muon import Muon
from paceline.optim.optimizer import ParamSlice
from paceline.replica.gradients import trained_parameters
from paceline.world.calls import mistake

# These update each element by its own gradient and state, so a rank may update any slice. For other optimizers one rank
# updates a complete parameter.
_ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
# By optimizer: its hook that refuses the script's own `optimizer.step()`.
_HOOKS: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


class Updates:
    def __init__(self, model: nn.Module, optimizers: Sequence[Any]):
        self._model, self.optimizers = model, optimizers
        self._names = {parameter: name for name, parameter in trained_parameters(model).items()}
        self._given = [[list(group["params"]) for group in each.param_groups] for each in optimizers]
        self.slices: list[ParamSlice] = []
        self._is_updating = False

    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def updated_whole(self) -> dict[str, float]:
        """Returns the parameters that one rank must update completely, each with its cost in any unit."""
        costs: dict[str, float] = {}
        for optimizer in self.optimizers:
            if type(optimizer).__name__ not in _ELEMENTWISE:
                cost = getattr(optimizer, "update_cost", torch.numel)
                given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                costs |= {self._names[p]: float(cost(p)) for p in given if p in self._names}
        return {name: costs[name] for name in self._names.values() if name in costs}

    def adopt(self, slices: list[ParamSlice]) -> None:
        """Makes the optimizers update these slices instead of parameters. Existing state, as Adagrad's, is sliced."""
        self.slices = slices
        self._gradients = [part.parameter.grad for part in slices]  # zero's: permanent views
        order = {part.name: index for index, part in enumerate(slices)}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                held = []
                for parameter in group["params"]:
                    state = optimizer.state.pop(parameter, None)
                    index = order.get(self._names.get(parameter, ""))
                    if index is None:
                        continue
                    held.append(index)
                    if state:
                        part = slices[index]
                        optimizer.state[part.parameter] = {key: _slice(v, key, part) for key, v in state.items()}
                group["params"] = [slices[index].parameter for index in sorted(held)]
            self._refuse_own_step(optimizer)
        self._num_held = [len(group["params"]) for group in self.param_groups()]

    def owned(self) -> Iterator[tuple[ParamSlice, Any, dict[str, Any]]]:
        """Yields each slice of this rank with its optimizer and parameter group."""
        owners = {
            parameter: (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for part in self.slices:
            if part.parameter in owners:
                yield part, *owners[part.parameter]

    def check_groups(self) -> None:
        """Raises UserError if an optimizer was given another parameter since, whose gradient would not be summed."""
        if [len(group["params"]) for group in self.param_groups()] != self._num_held:
            raise mistake(
                "an optimizer was given parameters after the replica was made, so no rank's gradient of "
                "them would reach another: make optimizer and Replica anew after the model was changed"
            )

    @property
    def can_skip(self) -> bool:
        """Whether all optimizers take `is_finite`, and update in parts; those of torch.optim do not."""
        return all(type(optimizer) in (AdamW, Muon) for optimizer in self.optimizers)

    def skipped(self) -> None:
        """Takes back the number of an update in which `is_finite` was False."""
        for optimizer in self.optimizers:
            optimizer.begin(-1)

    def make(
        self, unused: Sequence[str], parts: Iterable[Sequence[ParamSlice]], is_finite: torch.Tensor | None = None
    ) -> None:
        """Updates this rank's slices. unused: names of parameters that stay unchanged. parts: the slices, in the order
        of the update; not used if an optimizer updates all slices at once. is_finite: if `can_skip`, see AdamW."""
        idle = frozenset(unused)
        for part, view in zip(self.slices, self._gradients, strict=True):
            if view is not None:  # the script's optimizer.zero_grad() dropped it
                part.parameter.grad = view
            if part.name in idle:
                part.parameter.grad = None
        self._is_updating = True
        try:
            if self.can_skip:
                for optimizer in self.optimizers:
                    optimizer.begin()
                for some in parts:
                    tensors = {each.parameter for each in some}
                    for optimizer in self.optimizers:
                        optimizer.update(tensors, is_finite)
                return
            for optimizer in self.optimizers:
                if any(group["params"] for group in optimizer.param_groups):
                    optimizer.step()
        finally:
            self._is_updating = False

    def release(self) -> bool:
        """Gives the optimizers the model's parameters back, with their state. Returns False if state was dropped,
        because this rank has only a part of it."""
        is_sharded = any(part.parameter.numel() < math.prod(part.shape) for part in self.slices)
        has_lost = False
        for optimizer, given in zip(self.optimizers, self._given, strict=True):
            if (handle := _HOOKS.pop(optimizer, None)) is not None:
                handle.remove()
            if is_sharded and optimizer.state:
                optimizer.state.clear()
                has_lost = True
            state = {part.name: optimizer.state.pop(part.parameter, None) for part in self.slices}
            for group, parameters in zip(optimizer.param_groups, given, strict=True):
                group["params"] = parameters
            for name, parameter in self._model.named_parameters():
                if own := state.get(name):
                    optimizer.state[parameter] = {key: _whole(value, key, parameter) for key, value in own.items()}
        return not has_lost

    def _refuse_own_step(self, optimizer: Any) -> None:
        def check(*_: object) -> None:
            if not self._is_updating:
                raise mistake("step.finish() makes the optimizer's step, too: remove optimizer.step()")

        if (earlier := _HOOKS.pop(optimizer, None)) is not None:  # of a replica in an earlier world
            earlier.remove()
        if hasattr(optimizer, "register_step_pre_hook"):
            _HOOKS[optimizer] = optimizer.register_step_pre_hook(check)


def _whole(value: Any, key: str, parameter: torch.Tensor) -> Any:
    """Reshapes the state of a slice that is a complete parameter."""
    is_moment = isinstance(value, torch.Tensor) and value.numel() == parameter.numel() and key != "step"
    return value.view(parameter.shape) if is_moment else value


def _slice(value: Any, key: str, part: ParamSlice) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == part.shape and key != "step":
        return value.reshape(-1)[part.start : part.stop].reshape(part.parameter.shape).clone()
    return value


# ---- loss scaling for float16, whose gradients underflow below 6e-8 (Micikevicius et al., arXiv 1710.03740) ----
#
# torch.amp.GradScaler looks for infinities in one rank's gradients. Here the all-reduced sums are checked, so all ranks
# skip a step, and change the scale, together.

_START = 2.0**16
_GROW_AFTER = 2000  # finite steps in a row


@dataclass
class LossScaler:
    """A power of two that multiplies the loss; fixed at 1 if the dtype needs none."""

    scale: float = 1.0
    num_finite: int = 0
    is_dynamic: bool = False

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> "LossScaler":
        return cls(scale=_START, is_dynamic=True) if dtype == torch.float16 else cls()

    def observe(self, skipped: bool) -> None:
        """Halves the scale after a gradient that is not finite, doubles it after 2000 finite ones in a row."""
        if not self.is_dynamic:
            return
        if skipped:
            self.scale, self.num_finite = max(1.0, self.scale / 2), 0
            return
        self.num_finite += 1
        if self.num_finite == _GROW_AFTER:
            self.scale, self.num_finite = self.scale * 2, 0
