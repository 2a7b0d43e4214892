"""The one hook on each parameter, which autograd calls with its gradient."""

from collections.abc import Callable, Iterable, MutableMapping
from weakref import WeakMethod

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

_HANDLES: MutableMapping[torch.Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()


def hooked(parameter: torch.Tensor, method: Callable[[torch.Tensor], None]) -> None:
    """Calls the method after each gradient of the parameter, until `release`, or until its object is gone."""
    # torch keeps such hooks where Python's garbage collector does not look: one that leads back to the parameter would
    # keep the model, and the optimizer's state, for ever.
    weak = WeakMethod(method)

    def hook(parameter: torch.Tensor) -> None:
        if (alive := weak()) is not None:
            alive(parameter)

    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    _HANDLES.setdefault(parameter, []).append(handle)


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Removes the hooks of `hooked`, before another replica of the same model begins."""
    for parameter in parameters:
        for handle in _HANDLES.pop(parameter, []):
            handle.remove()
