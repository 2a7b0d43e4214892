"""Overlapped data parallelism: gradients travel in buckets while backward still computes the rest.

The life of a bucket in one step:
  fill    backward finishes a parameter's gradient and it moves into its place in the bucket's flat buffer;
  launch  on the last micro-step, when all its parameters are there, the bucket's all-reduce starts;
  wait    `reduce` waits for what is still under way: this is the exposed communication;
  empty   `publish` lets go of the gradients; the next step's first micro-batch overwrites the buffer.

Buckets are filled in about the order in which backward produces gradients (the reverse of the forward order) and
always launched in their fixed order, so that every rank reaches the same collectives in the same order, whatever
order its autograd engine chose, and also a rank that had no micro-batch at all.
Why own buckets and not torch's DistributedDataParallel: docs/design/0001-own-buckets.md.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.world.group import Group, Transfer


class Bucket:
    """A flat buffer that holds the gradients of some parameters, and travels as one."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        offset = 0
        for parameter in parameters:
            self.views.append(self.flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.transfer: Transfer | None = None
        self.num_missing = len(parameters)

    def take(self, index: int) -> None:
        """Moves a gradient that autograd made elsewhere into its place; later micro-steps then add to it in place.

        Cheaper than starting from a zeroed buffer: one copy instead of clearing and adding (tests hold that the sum
        is the same).
        """
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view


class BucketedSync:
    """The `ddp` strategy. Communication a step: 2 (n-1)/n times the gradients' bytes, on the last micro-step only."""

    def __init__(self, model: nn.Module, group: Group, bucket_bytes: int):
        self._group = group
        self._launching = False
        self._num_launched = 0
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.buckets = [Bucket(chunk) for chunk in _cut(list(reversed(parameters)), bucket_bytes)]
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._make_hook(bucket, index)
                )

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self._launching = last
        yield
        self._launching = False

    def reduce(self) -> list[torch.Tensor]:
        self._launching = True
        for bucket in self.buckets:  # what no gradient arrived for: unused parameters, a rank without a micro-batch
            if bucket.num_missing:
                for index in range(len(bucket.parameters)):
                    bucket.take(index)
                bucket.num_missing = 0
        self._launch_ready()
        self._launching = False
        for bucket in self.buckets:
            assert bucket.transfer is not None
            bucket.transfer.wait()
        return [bucket.flat for bucket in self.buckets]

    def publish(self) -> None:
        for bucket in self.buckets:
            bucket.transfer, bucket.num_missing = None, len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None
        self._num_launched = 0

    def _make_hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            bucket.take(index)
            if self._launching:
                bucket.num_missing -= 1
                if bucket.num_missing == 0:
                    self._launch_ready()

        return on_gradient

    def _launch_ready(self) -> None:
        while self._num_launched < len(self.buckets) and self.buckets[self._num_launched].num_missing == 0:
            bucket = self.buckets[self._num_launched]
            bucket.transfer = self._group.start_all_reduce(bucket.flat)
            self._num_launched += 1


def _cut(parameters: list[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yields runs of parameters of one dtype and at most bucket_bytes, or one larger parameter alone."""
    chunk: list[nn.Parameter] = []
    chunk_bytes = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if chunk and (chunk_bytes + num_bytes > bucket_bytes or parameter.dtype != chunk[0].dtype):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(parameter)
        chunk_bytes += num_bytes
    if chunk:
        yield chunk
