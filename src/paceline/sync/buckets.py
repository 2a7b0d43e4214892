"""Buckets: gradients that are sent together while backward computes the rest. `ddp` is here, and `zero` adds owners.

A bucket in one step:
  fill    backward finishes a parameter's gradient, which moves to its place in the bucket's flat buffer;
  launch  in the last micro-batch, when all its gradients are there, the bucket's collective starts;
  wait    `reduce` waits for what is still under way: this is the exposed communication;
  empty   drops the gradients; the next step's first micro-batch overwrites the buffer.

Buckets fill roughly in the order of backward (the reverse of forward), and always launch in one fixed order. So every
rank calls the same collectives in the same order, whatever its autograd engine does, even without a micro-batch. Why
not torch's DistributedDataParallel: docs/design/0001-own-buckets.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from paceline.base.errors import UserError
from paceline.sync.layout import Layout, backward_order, cut, owned_by_all
from paceline.sync.strategy import Strategy
from paceline.world.calls import mistake
from paceline.world.group import Group, Transfer


class Bucket:
    """A flat buffer that holds the gradients of some parameters and is sent in one collective."""

    owns_memory = False  # the parameters' values are in memory of the strategy, where it reads and changes them

    def __init__(self, layout: Layout, group: Group):
        """Gradients have their parameters' strides (channels_last, transposed): fused optimizers pair elements by their
        place in memory."""
        self.group = group
        self.names = [name for name, _ in layout.members]
        self.parameters = [parameter for _, parameter in layout.members]
        self.offsets = list(layout.offsets)
        self.flat = group.zeros(self.offsets[-1], self.parameters[0])
        self.span = 0, self.offsets[-1]  # the elements that this rank updates
        self.views = [
            self.flat.as_strided(p.shape, torch.empty_like(p).stride(), self.flat.storage_offset() + offset)
            for p, offset in zip(self.parameters, self.offsets, strict=False)
        ]
        self.hold_memory()
        self.transfer: Transfer | None = None
        self.num_missing = len(self.parameters)

    def start_reduce(self) -> Transfer:
        """Begins to sum the gradients over ranks."""
        return self.group.start_all_reduce(self.flat)

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

    def gradients(self) -> torch.Tensor:
        """Returns those that this rank updates with."""
        return self.flat[slice(*self.span)]

    def hold_memory(self) -> None:
        """Remembers where the parameters' values are."""
        self.homes = [parameter.data for parameter in self.parameters]
        self._marks = self.marks()

    def marks(self) -> list[object]:
        """Returns what differs by parameter if a script has replaced it."""
        return list(map(torch.Tensor.data_ptr, self.parameters))

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


class BucketedSync(Strategy):
    """The `ddp` strategy: fills buckets during backward, and launches each one's collective once it and all before it
    are full. Every rank makes the complete update. Sends 2 (n-1)/n times the gradients' bytes a step."""

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int, buckets: Sequence[Bucket] = ()):
        """bucket_bytes: at most so many are sent at once, or one larger parameter. buckets: those of the model; none:
        every rank owns all elements."""
        super().__init__(model, group)
        chunks = () if buckets else cut(backward_order(model), bucket_bytes)
        self.buckets = buckets or [Bucket(owned_by_all(chunk), group) for chunk in chunks]
        self._max_in_flight = len(self.buckets)
        self._launching = self._is_begun = False  # the step had a backward pass
        self._num_launched = 0
        self._places: dict[torch.Tensor, tuple[Bucket, int]] = {
            parameter: (bucket, index) for bucket in self.buckets for index, parameter in enumerate(bucket.parameters)
        }

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
        return [bucket.gradients() for bucket in self.buckets]

    def full_gradients(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def changed_gradients(self) -> list[torch.Tensor]:
        for bucket in self.buckets:
            bucket.take_all()
        return [bucket.gradients() for bucket in self.buckets]

    def end_step(self, own_weight: float = 0.0, weight: float = 0.0) -> None:
        for bucket in self.buckets:
            bucket.transfer, bucket.num_missing = None, len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None
        self._own_sums.clear()
        self._num_launched = 0
        self._is_begun = False

    def _launch(self, bucket: Bucket) -> Transfer:
        return bucket.start_reduce()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self.check is not None:
            self.check(parameter)
        bucket, index = self._places[parameter]
        bucket.take(index)
        if self._launching:
            bucket.num_missing -= 1
            if bucket.num_missing == 0:
                self._launch_ready()

    def _launch_ready(self) -> None:
        while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].num_missing == 0:
            bucket = self.buckets[self._num_launched]
            self._own_sums.append(bucket.flat.sum())  # cheap while it is cached
            if self._num_launched >= self._max_in_flight:
                earlier = self.buckets[self._num_launched - self._max_in_flight].transfer
                assert earlier is not None
                earlier.wait()
            bucket.transfer = self._launch(bucket)
            self._num_launched += 1
