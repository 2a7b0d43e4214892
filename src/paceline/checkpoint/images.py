"""Files of a checkpoint in host memory: each rank's tensors are copied here before training changes them."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from paceline.base.ownership import Slice
from paceline.checkpoint.shards import Bytes, Layout


def ready_event(tensors: Iterable[torch.Tensor]) -> torch.cuda.Event | None:
    """Returns an event for when the GPU has computed these tensors; None if none is on a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class HostImages:
    """One buffer for each kind of file, reused by every save; pinned if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(
        self, kind: str, layout: Layout, tensors: Mapping[Slice, torch.Tensor], ready: torch.cuda.Event | None
    ) -> Bytes:
        """Returns the bytes of a file with these tensors, valid until the next copy of this kind."""
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) != layout.num_bytes:
            self._buffers.pop(kind, None)  # free it before the new one is allocated
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=ready is not None)
            self._buffers[kind] = buffer
        begin = len(layout.header)
        buffer[:begin] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        with self._own_stream(ready):
            for entry in layout.entries:
                target, source = buffer[begin : begin + entry.num_bytes], tensors[entry.item].detach()
                if source.device.type == "cpu":  # by numpy: one thread, and it releases the GIL
                    np.copyto(target.numpy(), source.contiguous().view(-1).view(torch.uint8).numpy())
                else:
                    target.view(entry.dtype).copy_(source.reshape(-1), non_blocking=ready is not None)
                begin += entry.num_bytes
        return buffer.numpy()

    @contextlib.contextmanager
    def _own_stream(self, ready: torch.cuda.Event | None) -> Iterator[None]:
        """Copies inside start once the tensors are computed, wait for no later work, and are complete at the end."""
        if ready is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(ready.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield
            self._stream.synchronize()
