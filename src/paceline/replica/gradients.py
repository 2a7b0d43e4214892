"""The gradients of a replica, from a backward pass to the update, summed over ranks by a strategy (sync/).

Between a backward pass and `reduce`, `.grad` holds only a part of the sum. A placeholder replaces it there, and
reading or changing it is an error.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.base.errors import UserError
from paceline.base.units import listed
from paceline.replica import mistakes
from paceline.sync.strategy import Strategy
from paceline.world.calls import mistake


class Gradients:
    def __init__(self, model: nn.Module, sync: Strategy):
        self._model, self.sync = model, sync
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self.trained = trained_parameters(model)
        for parameter in self.trained.values():
            parameter.grad = None  # an earlier backward pass would be added to the first step
        sync.check = self._check
        self._hidden: list[torch.Tensor | None] | None = None  # while stand-ins replace the gradients
        self._stand_ins: list[torch.Tensor] = []
        self._arrived: set[torch.Tensor] = set()  # parameters that got a gradient in this backward pass
        self._in_backward = False

    def backward(
        self,
        loss: torch.Tensor,
        *,
        is_last: bool,
        may_pass_others: bool,
        has_weight: bool = True,
        fault: str | None = None,
    ) -> None:
        """Makes one backward pass. is_last: this rank's last in this step, so each full bucket starts its all-reduce.
        may_pass_others: other models may be in the loss's graph, and get no gradients. has_weight: False: its gradients
        are dropped; those of a mean over no items are not numbers. fault: injected; "nan" is added to a gradient."""
        self.reveal()
        trained = self.trained.values()
        inputs = list(trained) if may_pass_others and mistakes.passes_others(loss, trained) else None
        self._arrived.clear()
        self._in_backward = True
        droppers: list[RemovableHandle] = []  # they make a gradient zeros before it is added
        try:
            with self.sync.accumulate(last=is_last):
                if fault == "nan":
                    parameter = next(self._model.parameters())  # fsdp has gathered it; `trained` has shards
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad.view(-1)[0] = torch.nan
                leaves = () if has_weight else self.sync.leaves()
                droppers = [leaf.register_hook(torch.zeros_like) for leaf in leaves]  # type: ignore[no-untyped-call]
                loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                raise mistake(
                    "an earlier backward pass has freed a part of this loss's graph: add up the losses of one forward "
                    "pass, and detach() what an earlier step computed"
                ) from error
            if "modified by an inplace operation" not in str(error):
                raise
            raise mistake(
                "weights, or a tensor of the forward pass, were changed in place between forward and "
                "backward, perhaps by another replica's step.finish() or a buffer that a second forward updates: make "
                f"the forward pass after that, or add the losses up for one backward ({error})"
            ) from error
        finally:
            self._in_backward = False
            for dropper in droppers:
                dropper.remove()
        self._hide()

    def reduce(self) -> tuple[list[torch.Tensor], list[float]]:
        """Returns the flat gradients that this rank updates with, summed over ranks, and which of the `trained`
        parameters this rank used, 8 in a number. Collective."""
        used = np.array([parameter.grad is not None for parameter in self.trained.values()], dtype=bool)
        return self.sync.reduce(), np.packbits(used).astype(float).tolist()

    def unused(self, used: Sequence[Sequence[float]]) -> list[str]:
        """Returns the parameters that no rank used, from what `reduce` returned on each."""
        anywhere = np.bitwise_or.reduce(np.array(used, dtype=np.uint8), axis=0)
        is_used = np.unpackbits(anywhere, count=len(self.trained))
        return [name for name, flag in zip(self.trained, is_used, strict=True) if not flag]

    def expose(self, divisor: float) -> None:
        """After `reduce`: makes every `.grad` the complete gradient, divided by `divisor`. Collective."""
        flats = self.sync.full_gradients()
        if divisor != 1.0:
            torch._foreach_mul_(flats, 1.0 / divisor)

    def reveal(self) -> None:
        """Replaces the stand-ins by the gradients. Raises UserError for a replaced stand-in, for a parameter that was
        unfrozen since the replica was made, and with fsdp for one that was frozen since."""
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            is_same = True
            for parameter, stand_in, gradient in zip(self.trained.values(), self._stand_ins, hidden, strict=True):
                is_same = is_same and parameter.grad is stand_in
                parameter.grad = gradient
            if not is_same:
                raise _read_too_early()
        if unfrozen := [name for name, parameter in self._frozen.items() if parameter.requires_grad]:
            raise mistake(
                f"{listed(unfrozen)} was frozen when the replica was made, so its gradient "
                "would not be summed over ranks: call requires_grad_(True) before, or make optimizer and Replica again"
            )
        if self.sync.shards_weights and any(not parameter.requires_grad for parameter in self.trained.values()):
            frozen = [name for name, parameter in self.trained.items() if not parameter.requires_grad]
            raise mistake(
                f"{listed(frozen)} was frozen after the replica was made, and with strategy fsdp all parameters are "
                "trained: take strategy zero to freeze some"
            )

    def _hide(self) -> None:
        self._hidden = [parameter.grad for parameter in self.trained.values()]
        if not self._stand_ins:
            self._stand_ins = [_Unfinished.like(parameter) for parameter in self.trained.values()]
        for parameter, stand_in in zip(self.trained.values(), self._stand_ins, strict=True):
            parameter.grad = stand_in

    def _check(self, parameter: torch.Tensor) -> None:
        """Called with each parameter that gets a gradient. Raises UserError for gradients that ranks cannot sum."""
        if not self._in_backward:
            raise mistake(
                "a gradient came without step.backward: replace loss.backward() by step.backward(loss), "
                "and call requires_grad_(False) on a model that a loss only passes through"
            )
        if parameter in self._arrived:
            name = next(name for name, known in self.trained.items() if known is parameter)
            raise mistake(
                f"the gradient of {name} arrived twice in one backward pass, the second time after its "
                "all-reduce had started: pass use_reentrant=False to torch.utils.checkpoint"
            )
        self._arrived.add(parameter)
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise mistake("a gradient is sparse, and ranks sum dense ones: set sparse=False on the embedding")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class _Unfinished(torch.Tensor):
    """Has the shape of a gradient and refuses to be read or changed: between step.backward and step.finish a gradient
    is a sum of some micro-batches of one rank."""

    @classmethod
    def like(cls, parameter: torch.Tensor) -> "_Unfinished":
        """Returns a placeholder for this parameter's `.grad`."""
        made: _Unfinished = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for any use from Python."""
        if torch._guards.TracingContext.try_get() is not None:  # torch.compile looks at shapes
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise _read_too_early()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Called by a backward pass outside the replica."""
        raise _read_too_early()


def _read_too_early() -> UserError:
    return mistake(
        "a gradient was read or changed between step.backward and step.finish, before the sum over ranks. Remove "
        "zero_grad() and clip_grad_norm_(): step.finish(max_norm=...) does both. To read or change gradients call "
        "step.reduce() first"
    )
