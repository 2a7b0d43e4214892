"""A GPU, its streams and NCCL as a model, on which whole training steps run as fake tensors.

Kernels, copies, events and collectives are ordered by torch's own CUDA sanitizer, which finds races. Nothing is
computed. The model also knows when the host waits for the GPU, for which line of ours, and whether a collective that
other ranks have not joined (`hold`) is among what it waits for.
"""

import contextlib
import itertools
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
Clock = dict[int, int]  # by stream: the number of its last operation

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_VALUES = {torch.bool: True, torch.int64: 1}  # of a number that is read; others are 4.0


class Gpu:
    """What one rank's GPU was given to do."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.waits: Counter[str] = Counter()  # of the host for the GPU, by place
        self.copies: Counter[str] = Counter()  # between host and GPU, by kind and place
        self.collectives: Counter[str] = Counter()
        self.float64: Counter[str] = Counter()  # kernels with such numbers, by place
        self.held = ""  # the collective that never ends
        self.when_held: Callable[[], None] = lambda: None  # called where the host would wait for ever
        self._held_at: Clock = {}
        self._numbers = itertools.count(1)
        self._sanitizer = EventHandler()
        self._storages: dict[int, tuple[int, Any]] = {}  # kept, so that no address is used again
        self._thread = threading.local()
        self.default, self.nccl = Stream(self, is_default=True), Stream(self)

    @property
    def current(self) -> "Stream":
        found: Stream = getattr(self._thread, "stream", self.default)
        return found

    @contextlib.contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self._thread.stream = self.current, stream
        yield
        self._thread.stream = before

    def number(self) -> int:
        return next(self._numbers)

    def kernel(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: "Stream | None" = None
    ) -> None:
        """Queues a kernel."""
        written, read = ({self._memory(tensor) for tensor in tensors} for tensors in (writes, reads))
        number, aliases = (stream or self.current).number, {memory: ["?"] for memory in read | written}
        name = f"{name} at {_place()}"
        found = self._sanitizer._handle_kernel_launch(number, read - written, written, set(), name, aliases)
        pairs = [(error.current_access.operator, error.previous_access.operator) for error in found]
        self.races += [f"{mine}, not ordered after {other}" for mine, other in pairs]

    def collective(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> "Work":
        """Queues a collective in NCCL's own stream, after what the current stream has to do."""
        self.collectives[name] += 1
        self.nccl.wait_stream(self.current)
        self.kernel(name, reads, writes, self.nccl)
        event = self.nccl.record_event()
        if name == self.held and not self._held_at:
            self._held_at = {self.nccl.number: event.clock[self.nccl.number]}
        return Work(event)

    def hold_from_now(self, stream: "Stream") -> None:
        """Nothing that the stream is given from now on ends."""
        self.held, self._held_at = "all that comes", {stream.number: self._sanitizer.seq_num + 1}

    def host_knows(self, clock: Clock) -> bool:
        """The host has waited for all that the clock tells."""
        known = self._sanitizer.syncs.host_sync_state
        return all(known.get(stream, -1) >= last for stream, last in clock.items())

    def host_waits(self, clock: Clock) -> None:
        """The host waits for all that the clock tells."""
        if self.host_knows(clock):
            return
        self.waits[_place()] += 1
        if not self.has_passed(clock):
            self.when_held()

    def has_passed(self, clock: Clock) -> bool:
        """The GPU has done all but what waits for the held collective."""
        return not any(clock.get(stream, -1) >= first for stream, first in self._held_at.items())

    def _memory(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self.number(), storage
            self._sanitizer._handle_memory_allocation(self._storages[storage._cdata][0])
        return self._storages[storage._cdata][0]


class Stream:
    device, cuda_stream = CUDA, 0
    stream_id, device_index, device_type = 0, CUDA.index, 1  # of torch.Stream: fsdp of 2.15 looks at them

    def __init__(self, gpu: Gpu, is_default: bool = False) -> None:
        self.gpu, self.number = gpu, 0 if is_default else gpu.number()
        if not is_default:
            gpu._sanitizer._handle_stream_creation(self.number)

    def wait_event(self, event: "Event") -> None:
        self.gpu._sanitizer._handle_event_wait(event.number, self.number)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> "Event":
        event = Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        syncs = self.gpu._sanitizer.syncs
        self.gpu.host_waits(dict(syncs.current_sync_states[self.number]))
        self.gpu._sanitizer._handle_stream_synchronization(self.number)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.number = gpu, gpu.number()
        gpu._sanitizer._handle_event_creation(self.number)

    @property
    def clock(self) -> Clock:
        return dict(self.gpu._sanitizer.syncs.recorded_sync_states[self.number])

    def record(self, stream: Stream | None = None) -> None:
        self.gpu._sanitizer._handle_event_record(self.number, (stream or self.gpu.current).number)

    def query(self) -> bool:
        """A GPU is slow, to show races, or fast, to come to the collective that is held."""
        return self.gpu.has_passed(self.clock) if self.gpu.held else self.gpu.host_knows(self.clock)

    def synchronize(self) -> None:
        self.gpu.host_waits(self.clock)
        self.gpu._sanitizer._handle_event_synchronization(self.number)

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Work:
    """As of ProcessGroupNCCL: `wait` makes the current stream wait, not the host."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.gpu.current.wait_event(self._event)


class _Kernels(TorchDispatchMode):
    """Queues each operation on the GPU's fake tensors as a kernel."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self._gpu
        if func is torch.ops.prim.device.default:  # half of all calls: each look at `tensor.device`
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            if _is_on_gpu(args[0]):
                gpu.kernel("read", args, [])
                gpu.current.synchronize()
            return _VALUES.get(args[0].dtype, 4.0)
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload) or func.is_view:
            return out
        reads, writes = [], _tensors(out)
        for index, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name, args[index] if index < len(args) else None)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(_tensors(given))
        on_gpu = [_is_on_gpu(tensor) for tensor in (*reads, *writes)]
        if not any(on_gpu):
            return out
        if func in _COPIES and not all(on_gpu):
            self._count_copy(func, args, kwargs)
        reads, writes = ([tensor for tensor in tensors if _is_on_gpu(tensor)] for tensors in (reads, writes))
        gpu.float64[_place()] += any(tensor.dtype == torch.float64 for tensor in (*reads, *writes))
        gpu.kernel(str(func), reads, writes)
        return out

    def _count_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        source_is_on_gpu = _is_on_gpu(args[0] if func is _COPIES[0] else args[1])
        is_async = kwargs.get("non_blocking", func is _COPIES[1] and len(args) > 2 and args[2])
        direction = "to the host" if source_is_on_gpu else "to the GPU"
        self._gpu.copies[f"{direction}{'' if is_async else ', blocking'}: {_place()}"] += 1
        if source_is_on_gpu and not is_async:
            self._gpu.current.synchronize()


@contextlib.contextmanager
def rehearsed(gpu: Gpu, rank: int, size: int) -> Iterator[None]:
    """Inside, torch's CUDA and NCCL are this model, and all tensors are fake."""

    def broadcast(tensor: Any, source: int, group: Any = None) -> None:
        gpu.collective("broadcast", [], [tensor]).wait()

    def messages(calls: list[Any]) -> list[Work]:
        by_op = [[call.tensor for call in calls if call.op is op] for op in (dist.isend, dist.irecv)]
        return [gpu.collective("messages", *by_op)]

    def flat(name: str) -> Callable[..., Work | None]:
        """torch's own callers, which give more arguments, wait at once."""

        def begin(output: Any, flat: Any, *of_torch: Any, async_op: bool = False) -> Work | None:
            work = gpu.collective(name, [flat], [output])
            if async_op:
                return work
            work.wait()
            return None

        return begin

    cuda = {
        "Stream": lambda device=None, priority=0: Stream(gpu),
        "Event": lambda enable_timing=False: Event(gpu),
        "current_stream": lambda device=None: gpu.current,
        "stream": gpu.stream,
        "current_device": lambda: CUDA.index,
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    }
    distributed = {
        "get_rank": lambda group=None: rank,
        "get_world_size": lambda group=None: size,
        "get_backend": lambda group=None: "nccl",
        "new_group": lambda backend: SimpleNamespace(set_timeout=lambda _: None),
        "all_reduce": lambda tensor, **how: flat("all-reduce")(tensor, tensor, async_op=how.get("async_op", False)),
        "broadcast": broadcast,
        "batch_isend_irecv": messages,
        "all_gather_into_tensor": flat("all-gather"),
        "reduce_scatter_tensor": flat("reduce-scatter"),
    }
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(), _Kernels(gpu):
        for module, functions in ((torch.cuda, cuda), (dist, distributed)):
            for name, function in functions.items():
                patch.setattr(module, name, function)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        no_stacks = SimpleNamespace(extract=lambda *_, **__: traceback.StackSummary())  # they take half of the time
        short = SimpleNamespace(StackSummary=no_stacks, walk_stack=lambda _: ())
        patch.setattr(torch.cuda._sanitizer, "traceback", short)
        yield


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    """`tensor.is_cuda` of a fake tensor is an operation that is dispatched: two of three were that."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == CUDA.type


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _place() -> str:
    """The line of ours that is being run, as `clip.py:19 clip_`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/src/paceline/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
