"""The clock of a device, by which compute and communication are timed."""

import time
from typing import Protocol

import torch


class Stamp(Protocol):
    """A moment on a device's clock, made by DeviceClock.stamp()."""


class DeviceClock:
    """Measures work on a device: the monotonic clock on CPU, events in the current stream on CUDA, which synchronise
    only when they are read."""

    def __init__(self, device: torch.device):
        self.device = device
        self._cuda = device.type == "cuda"

    def stamp(self) -> Stamp:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def has_passed(self, stamp: Stamp) -> bool:
        """Whether the device has reached the stamp. Waits for nothing; any thread may ask."""
        return isinstance(stamp, float) or bool(stamp.query())  # type: ignore[attr-defined]

    def ms(self, start: Stamp, end: Stamp) -> float:
        """Returns the milliseconds from start to end. On CUDA call `finish` first: both must have happened."""
        if isinstance(start, float) and isinstance(end, float):
            return (end - start) * 1e3
        end.synchronize()  # type: ignore[attr-defined]  # a thread may just have recorded it
        return float(start.elapsed_time(end))  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Waits for all work queued in the current stream; collectives may still be under way."""
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()
