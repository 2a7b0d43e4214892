"""What a step changes on this rank: its part of the parameters (complete ones, or slices with zero and fsdp) by the
optimizers, the running statistics of batch norms, and the loss scale."""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.optim.optimizer import ParamSlice
from paceline.replica.gradients import trained_parameters
from paceline.world.calls import mistake
from paceline.world.group import Group

# Those of torch.optim that update each element by its own gradient and state, so that a rank may update any slice; ours
# say `is_elementwise`. For other optimizers one rank updates a complete parameter.
_ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"}
# By optimizer: its hooks that refuse the script's own `optimizer.step()`, and `load_state_dict`.
_HOOKS: "weakref.WeakKeyDictionary[Any, list[Any]]" = weakref.WeakKeyDictionary()


class Updates:
    def __init__(self, model: nn.Module, optimizers: Sequence[Any]):
        self._model, self.optimizers = model, optimizers
        self._names = {parameter: name for name, parameter in trained_parameters(model).items()}
        self._groups_before = [[list(group["params"]) for group in each.param_groups] for each in optimizers]
        self.slices: list[ParamSlice] = []
        self._is_updating = False

    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def updated_whole(self) -> dict[str, float]:
        """Returns the parameters that one rank must update completely, each with its cost in any unit."""
        costs: dict[str, float] = {}
        for optimizer in self.optimizers:
            if not getattr(optimizer, "is_elementwise", type(optimizer).__name__ in _ELEMENTWISE):
                cost = getattr(optimizer, "update_cost", torch.numel)
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                costs |= {self._names[p]: float(cost(p)) for p in parameters if p in self._names}
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
                "an optimizer was given parameters after the replica was made, so their gradients "
                "would not be summed over ranks: make optimizer and Replica again after changing the model"
            )

    def was_changed(self) -> bool:
        """After `release`: whether the script has added parameters or groups since the replica was made."""
        now = [[len(group["params"]) for group in each.param_groups] for each in self.optimizers]
        return now != [[len(parameters) for parameters in groups] for groups in self._groups_before]

    def not_kept(self) -> str:
        """Returns the first optimizer state on this rank that a checkpoint cannot hold; empty if there is none."""
        held = {part.parameter for part in self.slices}
        for optimizer in self.optimizers:
            for owner in optimizer.state:
                if not isinstance(owner, torch.Tensor) or owner not in held:
                    return f"{type(optimizer).__name__} has state of {owner!r:.40}, which is none of its parameters"
        for part, optimizer, _ in self.owned():
            for key, value in optimizer.state.get(part.parameter, {}).items():
                if stored_as(key, value, part) is None:
                    return f"{type(optimizer).__name__}'s state {key} of {part.name} is a {type(value).__name__}"
        return ""

    @property
    def can_skip(self) -> bool:
        """Whether all optimizers take `is_finite`; those of torch.optim do not."""
        return all(hasattr(optimizer, "undo_count") for optimizer in self.optimizers)

    def skipped(self) -> None:
        """Undoes the step count of an update that was skipped: `is_finite` was False."""
        for optimizer in self.optimizers:
            optimizer.undo_count()

    def make(self, unused: Sequence[str], is_finite: torch.Tensor | None = None) -> None:
        """Updates this rank's slices. unused: names of parameters that stay unchanged. is_finite: if `can_skip`, see
        AdamW."""
        idle = frozenset(unused)
        for part, view in zip(self.slices, self._gradients, strict=True):
            if view is not None:  # the script's optimizer.zero_grad() dropped it
                part.parameter.grad = view
            if part.name in idle:
                part.parameter.grad = None
        self._is_updating = True
        try:
            for optimizer in self.optimizers:  # also without a slice on this rank: schedules look for the call
                optimizer.step() if is_finite is None else optimizer.step(is_finite)
        finally:
            self._is_updating = False
            torch.clear_autocast_cache()  # it keeps copies of the weights until the outermost autocast ends

    def release(self, is_sharded: bool) -> bool:
        """Gives the optimizers the model's parameters back, with their state. Returns False if state was dropped:
        is_sharded: ranks have different ones, also where this rank's slices are whole parameters."""
        has_lost = False
        for optimizer, groups in zip(self.optimizers, self._groups_before, strict=True):
            for handle in _HOOKS.pop(optimizer, ()):
                handle.remove()
            if is_sharded and optimizer.state:
                optimizer.state.clear()
                has_lost = True
            state = {part.name: optimizer.state.pop(part.parameter, None) for part in self.slices}
            sliced = {part.parameter for part in self.slices}
            for group, parameters in zip(
                optimizer.param_groups, groups, strict=False
            ):  # the script may have added some
                group["params"] = parameters + [
                    p for p in group["params"] if p not in sliced and p not in set(parameters)
                ]
            for name, parameter in self._model.named_parameters():
                if kept := state.get(name):
                    optimizer.state[parameter] = {key: _whole(value, key, parameter) for key, value in kept.items()}
        return not has_lost

    def _refuse_own_step(self, optimizer: Any) -> None:
        def check(*_: object) -> None:
            if not self._is_updating:
                raise mistake("step.finish() makes the optimizer's step, too: remove optimizer.step()")

        def check_load(*_: object) -> None:
            has_all = len(self.slices) == len(self._names)
            if not (has_all and all(part.stop - part.start == math.prod(part.shape) for part in self.slices)):
                raise mistake(
                    "optimizer.load_state_dict came after the Replica was made, when each rank has only its share of "
                    "the state: load before that, or save by paceline.Checkpoints, which any strategy restores"
                )

        for earlier in _HOOKS.pop(optimizer, ()):  # of a replica in an earlier world
            earlier.remove()
        if hasattr(optimizer, "register_step_pre_hook"):
            _HOOKS[optimizer] = [optimizer.register_step_pre_hook(check)]
        if hasattr(optimizer, "register_load_state_dict_pre_hook"):
            _HOOKS[optimizer].append(optimizer.register_load_state_dict_pre_hook(check_load))


def stored_as(key: str, value: Any, part: ParamSlice) -> Literal["moment", "number", "tensor"] | None:
    """How an optimizer state is stored: sharded like its parameter, as a number, or complete; None: not at all."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and key != "step" and value.shape == part.parameter.shape:
        return "moment"
    if isinstance(value, int | float | str | None) or (is_tensor and value.dim() == 0):
        return "number"
    return "tensor" if is_tensor and part.stop - part.start == math.prod(part.shape) else None


def _whole(value: Any, key: str, parameter: torch.Tensor) -> Any:
    """Reshapes the state of a slice that is a complete parameter."""
    is_moment = isinstance(value, torch.Tensor) and value.numel() == parameter.numel() and key != "step"
    return value.view(parameter.shape) if is_moment else value


def _slice(value: Any, key: str, part: ParamSlice) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == part.shape and key != "step":
        return like(part.parameter, value.reshape(-1)[part.start : part.stop].view(part.parameter.shape))
    return value


def like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the value. If it has the parameter's shape, it has the strides, too, that torch gives a state:
    fused optimizers pair elements by their place in memory."""
    return torch.empty_like(parameter if parameter.shape == value.shape else value, dtype=value.dtype).copy_(value)


# ---- statistics of normalisation ----


class RunningStatistics:
    """After a step each statistic of a batch or instance norm is its old value plus the mean over ranks of its change,
    weighted by each rank's share of the batch; the vectors of spectral norms are rank 0's."""

    def __init__(self, model: nn.Module, group: Group):
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        tensors = [buffer for norm in norms for buffer in norm.buffers()]
        self._means = [tensor for tensor in tensors if tensor.is_floating_point()]
        self._counts = [tensor for tensor in tensors if not tensor.is_floating_point()]
        self._of_rank_0 = [vector for module in model.modules() for vector in _spectral_vectors(module)]
        self._group = group
        self._known = {id(tensor) for tensor in (*tensors, *self._of_rank_0)}
        self.remember()

    def __contains__(self, buffer: torch.Tensor) -> bool:
        return id(buffer) in self._known

    def remember(self) -> None:
        """Call it when the statistics are equal on all ranks."""
        self._before: torch.Tensor | None = None
        if self._means and self._group.size > 1:
            self._before = self._flat()

    def average(self, share: float) -> None:
        """share: of the batch, on this rank. Collective if the model has such statistics. Changes are summed, not
        values, so that a norm in eval() keeps its statistics bit for bit."""
        for vector in self._of_rank_0:  # a rank with more micro-batches has made more iterations
            self._group.broadcast(vector)
        if self._before is None:
            return
        change = (self._flat() - self._before) * share if share else torch.zeros_like(self._before)
        self._group.all_reduce(change)
        means = torch.split(self._before + change, [tensor.numel() for tensor in self._means])
        for tensor, mean in zip(self._means, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
        self.remember()
        for tensor in self._counts:  # batches seen: a rank without a micro-batch has seen fewer
            self._group.all_reduce(tensor, "max")

    def _flat(self) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1).double() for tensor in self._means])


def _spectral_vectors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the buffers of a spectral norm in either form that torch has (arXiv 1802.05957)."""
    if type(module).__name__ == "_SpectralNorm":
        yield from module.buffers(recurse=False)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield from (getattr(module, f"{hook.name}_{kind}") for kind in ("u", "v"))


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
