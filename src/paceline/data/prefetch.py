"""Makes the next step's micro-batches during a step: one thread, one step ahead."""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from paceline.data.loader import Loader, MicroBatch


class Prefetcher:
    """A loader whose `micro_batches(step)` are usually ready; correct in any order of steps.

    The caller waits for its first step (a run may resume anywhere); each step starts the next one's preparation. The
    thread reads, converts and pins; the caller's thread copies to the device on its own stream. An error in a step is
    raised when that step is requested. `close`, or the end of a `with`, ends the thread.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=_use, initargs=(loader.device,))
        self._pending: dict[int, Future[list[MicroBatch]]] = {}

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.loader.seq_len

    @property
    def device(self) -> torch.device:
        return self.loader.device

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a step; see `Loader.micro_batches`. For one thread at a time."""
        wanted = self._take(step)
        for skipped in self._pending.values():
            skipped.cancel()
        self._pending = {step + 1: self._thread.submit(self.loader.host_batches, step + 1)}
        return [batch.to(self.loader.device) for batch in wanted.result()]

    def close(self) -> None:
        """Ends the thread after its current step."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self, step: int) -> "Future[list[MicroBatch]]":
        return self._pending.pop(step, None) or self._thread.submit(self.loader.host_batches, step)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _use(device: torch.device) -> None:
    """Pinning in a thread without a current device would open a context, and take memory, on the first GPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
