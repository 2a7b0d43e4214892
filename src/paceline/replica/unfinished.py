"""A placeholder for `.grad` until the gradient is summed."""

from typing import Any

import torch

from paceline.base.errors import UserError
from paceline.world.calls import place


class Unfinished(torch.Tensor):
    """Has the shape of a gradient and refuses to be read or changed: between step.backward and step.finish a gradient
    is a sum of some micro-batches of one rank."""

    @classmethod
    def like(cls, parameter: torch.Tensor) -> "Unfinished":
        """Returns a placeholder for this parameter's `.grad`."""
        made: Unfinished = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for any use from Python."""
        if torch._guards.TracingContext.try_get() is not None:  # torch.compile looks at shapes
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise UserError(unfinished())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Called by a backward pass outside the replica."""
        raise UserError(unfinished())


def unfinished() -> str:
    """Returns the error message, with the script's line."""
    return (
        f"{place()}: a gradient was read or changed between step.backward and step.finish, before the sum over ranks: "
        "take zero_grad() and clip_grad_norm_() away, step.finish(max_norm=...) clips and clears gradients. To read or "
        "change them yourself call step.reduce() first"
    )
