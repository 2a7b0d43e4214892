"""Stopping early: a signal or a time limit on any rank sets its stop flag; ranks all-gather the flags each step."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import psutil

from paceline.base.errors import Stopped
from paceline.base.process import STOP_SIGNALS, handled, has_launcher, stopped_early
from paceline.world.calls import mistake

_TIME_LIMIT = -1.0  # the vote of a rank that is past its time limit


class StopRequest:
    """While open, SIGINT, SIGTERM, SIGUSR1 and SIGHUP set the stop flag instead of ending the process; so does a
    process age of `after_s` seconds (0: no limit): that of the launcher, if there is one, which starts ranks again.

    Until `is_training` is set, a signal ends the process at once by Stopped: there is nothing to save yet. A SIGHUP
    that is ignored (nohup) stays ignored. A second SIGINT raises KeyboardInterrupt. During a collective Python delays
    the handler.
    """

    def __init__(self, after_s: float = 0.0, is_training: bool = True) -> None:
        self.is_training = is_training
        self._signal: str | None = None
        process = psutil.Process()
        if has_launcher() or "TORCHELASTIC_RUN_ID" in os.environ:
            process = process.parent() or process
        age_s = time.time() - process.create_time()
        self._deadline_s = time.monotonic() + after_s - age_s if after_s else float("inf")
        self._handled = handled(STOP_SIGNALS, self._on_signal)

    @property
    def vote(self) -> float:
        """This rank's stop flag: a signal's number, -1 for the time limit, 0 if not set."""
        if self._signal is not None:
            return float(signal.Signals[self._signal])
        return _TIME_LIMIT if time.monotonic() >= self._deadline_s else 0.0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            raise mistake(
                "signals reach the main thread alone, and this is another: train in the main thread, or by "
                "replica.steps without stop_on_signals=True"
            )
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handled.__exit__(kind, error, tb)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        before, self._signal = self._signal, signal.Signals(number).name
        # A library may swallow this exception: the signal is recorded first, and stops the run after a step.
        if number == signal.SIGINT and (before == "SIGINT" or not self.is_training):
            raise KeyboardInterrupt
        if not self.is_training:
            raise Stopped(stopped_early(self._signal), reach="world")


@contextmanager
def signals_wait() -> Iterator[None]:
    """Inside, stop signals wait, here and in processes that begin: workers of a DataLoader, until `outlive_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_signals() -> None:
    """Makes a worker of a DataLoader outlive stop signals, which a scheduler or a terminal sends to all processes: its
    rank needs it to finish the step. Only a SIGTERM of its rank ends it, which torch sends."""
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    waited_for: set[signal.Signals] = set()
    if hasattr(signal, "sigwaitinfo"):  # it is told who sent a signal, unlike a handler; macOS does not have it
        waited_for = {signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
        rank = multiprocessing.parent_process()  # not getppid: a fork server's workers are its children
        threading.Thread(target=_end_with, args=(rank.pid if rank else os.getppid(),), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - waited_for)


def _end_with(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


def why_to_stop(votes: list[float]) -> str | None:
    """Returns the reason of all ranks' votes: "SIGTERM on rank 0, 1"; None if no flag is set."""
    by_reason: dict[str, list[str]] = {}
    for rank, vote in enumerate(votes):
        if vote:
            reason = "train.stop-after" if vote == _TIME_LIMIT else signal.Signals(int(vote)).name
            by_reason.setdefault(reason, []).append(str(rank))
    return "; ".join(f"{reason} on rank {', '.join(ranks)}" for reason, ranks in by_reason.items()) or None
