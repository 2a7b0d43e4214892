"""Buckets: gradients that travel together while backward still computes the rest. What `ddp` and `zero` share.

The life of a bucket in one step:
  fill    backward finishes a parameter's gradient and it moves into its place in the bucket's flat buffer;
  launch  on the last micro-step, when all its parameters are there, the bucket's collective starts;
  wait    `finish` waits for what is still under way: this is the exposed communication;
  empty   lets go of the gradients; the next step's first micro-batch overwrites the buffer.

Buckets are filled in about the order in which backward produces gradients (the reverse of the forward order) and
always launched in their fixed order, so that every rank reaches the same collectives in the same order, whatever
order its autograd engine chose, and also a rank that had no micro-batch at all.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from paceline.world.group import Transfer

Named = tuple[str, nn.Parameter]

# What hangs on each parameter, to be taken off again.
_HANDLES: MutableMapping[torch.Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()


def hooked(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Has the hook called after each gradient of the parameter, until `release`."""
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    _HANDLES.setdefault(parameter, []).append(handle)


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Takes off what `hooked` has hung on them: another replica of the same model begins."""
    for parameter in parameters:
        for handle in _HANDLES.pop(parameter, []):
            handle.remove()


class Bucket:
    """A flat buffer that holds the gradients of some parameters, and travels as one."""

    def __init__(self, members: Sequence[Named]):
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        first = self.parameters[0]
        self.offsets = [0]
        for parameter in self.parameters:
            self.offsets.append(self.offsets[-1] + parameter.numel())
        self.flat = torch.zeros(self.offsets[-1], dtype=first.dtype, device=first.device)
        self.views = [
            self.flat[offset : offset + p.numel()].view_as(p)
            for p, offset in zip(self.parameters, self.offsets, strict=False)
        ]
        self.transfer: Transfer | None = None
        self.num_missing = len(self.parameters)
        self.own_sum: torch.Tensor | None = None  # of this rank's gradients, before they are summed over ranks

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


class Buckets:
    """Fills buckets as backward goes, and launches each one's collective as soon as it and those before it are full."""

    def __init__(
        self, buckets: list[Bucket], launch: Callable[[Bucket], Transfer], most_under_way: int | None = None
    ) -> None:
        self.buckets = buckets
        self._launch = launch
        self._most_under_way = most_under_way or len(buckets)
        self._under_way: deque[Transfer] = deque()
        self._launching = False
        self._num_launched = 0
        for bucket in buckets:
            for index, parameter in enumerate(bucket.parameters):
                hooked(parameter, self._make_hook(bucket, index))

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Entered around forward and backward of a micro-batch; on the last one buckets are launched."""
        self._launching = last
        yield
        self._launching = False

    def finish(self) -> None:
        """Launches what no gradient arrived for (unused parameters, a rank without a micro-batch); waits for all."""
        self._launching = True
        for bucket in self.buckets:
            if bucket.num_missing:
                for index in range(len(bucket.parameters)):
                    bucket.take(index)
                bucket.num_missing = 0
        self._launch_ready()
        self._launching = False
        for bucket in self.buckets:
            assert bucket.transfer is not None
            bucket.transfer.wait()

    def empty(self) -> None:
        """Lets go of the gradients."""
        for bucket in self.buckets:
            bucket.transfer, bucket.num_missing = None, len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None
        self._num_launched = 0
        self._under_way.clear()

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
            # Read while it is in the cache: 0.1 ms for 10 MiB. It tells afterwards whose gradient was not finite.
            bucket.own_sum = bucket.flat.sum()
            if len(self._under_way) == self._most_under_way:
                self._under_way.popleft().wait()
            bucket.transfer = self._launch(bucket)
            self._under_way.append(bucket.transfer)
            self._num_launched += 1


def cut(members: Sequence[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Yields runs of parameters of one dtype and at most bucket_bytes, or one larger parameter alone."""
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
    """Returns the trainable parameters with their names, in about the order in which backward finishes them."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad][::-1]


def first_not_finite(buckets: Sequence[Bucket], spans: Sequence[tuple[int, int]]) -> tuple[str | None, bool | None]:
    """Returns (the first parameter whose summed gradient is not finite, of those in each bucket's span; None where
    none is), and whether this rank's own gradients were not finite before they were summed."""
    mine = any(bucket.own_sum is not None and not bool(bucket.own_sum.isfinite()) for bucket in buckets)
    for bucket, (start, stop) in zip(buckets, spans, strict=True):
        bad = (~bucket.flat[start:stop].isfinite()).nonzero()
        if len(bad):
            at = start + int(bad[0])
            index = max(i for i, offset in enumerate(bucket.offsets[:-1]) if offset <= at)
            return bucket.names[index], mine
    return None, mine
