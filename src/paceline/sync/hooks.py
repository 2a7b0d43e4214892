"""Hooks: the one on each parameter, which autograd calls with its gradient, and those on modules."""

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


class ModuleHook:
    """A hook of a module, which calls `method`. Its copy does nothing: a copied module has none of its objects."""

    def __init__(self, method: Callable[..., None] | None = None):
        self._method = method

    def __call__(self, *arguments: object) -> None:
        if self._method is not None:
            self._method(*arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return ModuleHook, ()


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Removes the hooks of `hooked`, before another replica of the same model begins."""
    for parameter in parameters:
        for handle in _HANDLES.pop(parameter, []):
            handle.remove()
