"""Buckets: gradients that are sent together while backward computes the rest. `ddp` and `zero` use them.

A bucket in one step:
  fill    backward finishes a parameter's gradient, which moves to its place in the bucket's flat buffer;
  launch  in the last micro-batch, when all its gradients are there, the bucket's collective starts;
  wait    `reduce` waits for what is still under way: this is the exposed communication;
  empty   drops the gradients; the next step's first micro-batch overwrites the buffer.

Buckets fill roughly in the order of backward (the reverse of forward), and always launch in one fixed order. So every
rank calls the same collectives in the same order, whatever its autograd engine does, even without a micro-batch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Generic, TypeVar
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from paceline.base.errors import UserError
from paceline.sync.strategy import Strategy
from paceline.world.calls import mistake
from paceline.world.group import Group, Transfer

Named = tuple[str, nn.Parameter]

# The hooks on each parameter, to be removed later.
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


class Bucket:
    """A flat buffer that holds the gradients of some parameters and is sent in one collective."""

    owns_memory = False  # the parameters' values are in memory of the strategy, where it reads and changes them

    def __init__(self, members: Sequence[Named], group: Group, offsets: Sequence[int] = ()):
        """offsets: where each parameter begins, and the buffer's length; none: one follows the other. Gradients have
        their parameters' strides (channels_last, transposed): fused optimizers pair elements by their place in memory.
        """
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        first = self.parameters[0]
        self.offsets = list(offsets) or list(accumulate((p.numel() for p in self.parameters), initial=0))
        self.flat = group.zeros(self.offsets[-1], first)
        self.span = 0, self.offsets[-1]  # the elements that this rank updates
        self.views = [
            self.flat.as_strided(p.shape, torch.empty_like(p).stride(), self.flat.storage_offset() + offset)
            for p, offset in zip(self.parameters, self.offsets, strict=False)
        ]
        self.hold_memory()
        self.transfer: Transfer | None = None
        self.num_missing = len(self.parameters)
        self.own_sum: torch.Tensor | None = None  # sum of this rank's own gradients

    def take(self, index: int) -> None:
        """Moves a new gradient to its place in the buffer, where later micro-batches add to it."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def take_all(self) -> None:
        """Moves all gradients to their places; missing ones become zero."""
        for index in range(len(self.parameters)):
            self.take(index)

    def hold_memory(self) -> None:
        """Remembers where the parameters' values are."""
        self.homes = [parameter.data for parameter in self.parameters]
        self._marks = self.marks()

    def marks(self) -> list[object]:
        """Returns what differs by parameter if a script has replaced it."""
        return [parameter.data_ptr() for parameter in self.parameters]

    def take_replaced(self) -> list[int]:
        """Takes the values of parameters that a script has replaced (`p.data = ...`) since, and returns which they are.
        Raises UserError if the values do not fit."""
        marks = self.marks()
        if marks == self._marks:
            return []
        replaced = [index for index, mark in enumerate(marks) if mark != self._marks[index]]
        for index in replaced:
            parameter, home = self.parameters[index], self.homes[index]
            now, before = (f"{each.dtype} {list(each.shape)} on {each.device}" for each in (parameter, home))
            if now != before:
                raise converted(self.names[index], now, before)
            if self.owns_memory or parameter.stride() != home.stride():  # gradient and state have the home's strides
                home.copy_(parameter.detach())
                parameter.data = home
        self.hold_memory()
        return replaced


def converted(name: str, now: object, before: object) -> UserError:
    """Returns the error for a parameter that is of another kind than the strategy has memory for."""
    return mistake(
        f"{name} is {now}, and was {before} when the replica was made: convert or move the model before you make "
        "optimizer and Replica"
    )


B = TypeVar("B", bound=Bucket)


class BucketStrategy(Strategy, Generic[B]):
    """Fills buckets during backward, and launches each one's collective once it and all before it are full."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        buckets: list[B],
        launch: Callable[[B], Transfer],
        max_in_flight: int | None = None,
    ) -> None:
        super().__init__(model, group)
        self.buckets = buckets
        self._launch = launch
        self._max_in_flight = max_in_flight or len(buckets)
        self._in_flight: deque[Transfer] = deque()
        self._launching = self._is_begun = False  # the step had a backward pass
        self._num_launched = 0
        self._places: dict[torch.Tensor, tuple[B, int]] = {
            parameter: (bucket, index) for bucket in buckets for index, parameter in enumerate(bucket.parameters)
        }
        for parameter in self._places:
            hooked(parameter, self._on_gradient)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        if not self._is_begun:  # before a backward pass fails on another dtype
            self.wait_for_params()
            self._is_begun = True
        self._launching = last
        yield
        self._launching = False

    def wait_for_params(self) -> None:
        """As in Strategy. Also takes what a script put in a parameter's place: `p.data = ...`, vector_to_parameters,
        model.to(memory_format=...)."""
        for bucket in self.buckets:
            bucket.take_replaced()

    def reduce(self) -> list[torch.Tensor]:
        """As in Strategy. Also launches buckets without gradients: unused parameters, a rank without a micro-batch."""
        self.wait_for_params()
        self._launching = True
        for bucket in self.buckets:
            if bucket.num_missing:
                bucket.take_all()
                bucket.num_missing = 0
        self._launch_ready()
        self._launching = False
        for bucket in self.buckets:
            assert bucket.transfer is not None
            bucket.transfer.wait()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view  # also where a script's hook replaced it after its sum was under way
        return self._own_gradients()

    def changed_gradients(self) -> list[torch.Tensor]:
        for bucket in self.buckets:
            bucket.take_all()
        return self._own_gradients()

    def not_finite(self) -> tuple[str | None, bool | None]:
        mine = any(bucket.own_sum is not None and not bool(bucket.own_sum.isfinite()) for bucket in self.buckets)
        for bucket in self.buckets:
            start, stop = bucket.span
            bad = (~bucket.flat[start:stop].isfinite()).nonzero()
            if len(bad):
                at = start + int(bad[0])
                index = max(i for i, offset in enumerate(bucket.offsets[:-1]) if offset <= at)
                return bucket.names[index], mine
        return None, mine

    def publish(self) -> None:
        for bucket in self.buckets:
            bucket.transfer, bucket.num_missing = None, len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None
        self._num_launched = 0
        self._is_begun = False
        self._in_flight.clear()

    def _own_gradients(self) -> list[torch.Tensor]:
        return [bucket.flat[slice(*bucket.span)] for bucket in self.buckets]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        bucket, index = self._places[parameter]
        bucket.take(index)
        if self._launching:
            bucket.num_missing -= 1
            if bucket.num_missing == 0:
                self._launch_ready()

    def _launch_ready(self) -> None:
        while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].num_missing == 0:
            bucket = self.buckets[self._num_launched]
            bucket.own_sum = bucket.flat.sum()  # cheap while it is cached; read by `not_finite`
            if len(self._in_flight) == self._max_in_flight:
                self._in_flight.popleft().wait()
            bucket.transfer = self._launch(bucket)
            self._in_flight.append(bucket.transfer)
            self._num_launched += 1


def cut(members: Sequence[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Yields groups of consecutive parameters of one dtype, at most bucket_bytes each, or one larger parameter."""
    chunk: list[Named] = []
    chunk_bytes = 0
    for name, parameter in members:
        num_bytes = parameter.numel() * parameter.element_size()
        if chunk and (chunk_bytes + num_bytes > bucket_bytes or parameter.dtype != chunk[0][1].dtype):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append((name, parameter))
        chunk_bytes += num_bytes
    if chunk:
        yield chunk


def backward_order(model: nn.Module) -> list[Named]:
    """Returns the trainable parameters with their names, roughly in the order in which backward finishes them."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad][::-1]
