"""The next step's micro-batches made while this one computes: by one thread, one step ahead."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from paceline.data.loader import Loader, MicroBatch
from paceline.data.plan import BatchPlan


class Prefetcher:
    """A loader whose `micro_batches(step)` are there, mostly, when they are asked for; the same in any order of steps.

    The first step asked for is made while the caller waits (the loader does not know where a run goes on); with each
    step the one after it begins. The thread reads, widens and pins; copies to the device are launched by the caller's
    thread, on its stream. What goes wrong for a step is raised when that step is asked for, and never if it is not.
    Close it, or use it in a `with`: the thread is gone then.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=_use, initargs=(loader.device,))
        self._coming: dict[int, Future[list[MicroBatch]]] = {}

    @property
    def plan(self) -> BatchPlan:
        return self.loader.plan

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.loader.seq_len

    @property
    def device(self) -> torch.device:
        return self.loader.device

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step; see `Loader.micro_batches`. By one thread at a time."""
        wanted = self._take(step)
        for passed_over in self._coming.values():
            passed_over.cancel()
        self._coming = {step + 1: self._thread.submit(self.loader.host_batches, step + 1)}
        return [batch.to(self.loader.device) for batch in wanted.result()]

    def close(self) -> None:
        """Returns when the thread has ended; it finishes the step that it is at."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self, step: int) -> "Future[list[MicroBatch]]":
        return self._coming.pop(step, None) or self._thread.submit(self.loader.host_batches, step)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _use(device: torch.device) -> None:
    """Pinning in a thread that never chose a device would open a context, and take memory, on the first GPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
