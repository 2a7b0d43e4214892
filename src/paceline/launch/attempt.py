"""One attempt: the ranks of this host, started and watched here.

torch's elastic agent would wait 30 s for ranks that hang after a failure (2 s here), and turn signals into a failure;
here the ranks get them and decide together. Each attempt has a new store, on one address only, so that no rank reads
the addresses of an earlier attempt.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.base.process import read_statuses, say
from paceline.launch.signals import StopSignals, has_handler
from paceline.launch.warm import WarmRank, WarmServer

_LOOK_EVERY_S = 0.05
_KILLED_S = 10.0  # for a killed process to end
_FAILURE_GRACE_S = 2.0  # for the other ranks: those that wait for the dead one notice within 0.1 s and print why


Process = subprocess.Popen[bytes] | WarmRank

# What an attempt's ranks are to do: "save" and end; "fail": end soon, ranks of another host have failed; "end" at once.
Order = Literal["", "save", "fail", "end"]


@dataclass(frozen=True)
class Place:
    """This host's ranks in one attempt: first_rank, first_rank + 1 ... of the world's."""

    first_rank: int
    num_ranks: int
    world_size: int
    address: str  # of the ranks' store
    port: int
    listener: socket.socket | None  # for the store, on the host that has rank 0
    attempt: int  # from 0; the same on all hosts
    knows_all: bool = True  # somebody hears how all ranks end, and one of the launchers holds their store

    @property
    def own_ranks(self) -> range:
        """The ranks of this host."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


class Grace:
    """How long ranks may take to save and end after a signal: some seconds, and as long again whenever the run's
    checkpoints have changed meanwhile."""

    def __init__(self, seconds: float, checkpoints: Path):
        self.seconds, self._checkpoints = seconds, checkpoints
        self._until_s: float | None = None
        self._num_bytes = 0

    def is_over(self, since_s: float | None) -> bool:
        """since_s: when the signal came (monotonic); None: there was none, or one that its sender repeats."""
        if since_s is None:
            return False
        if self._until_s is None:
            self._until_s, self._num_bytes = since_s + self.seconds, self._written_bytes()
        if time.monotonic() < self._until_s:
            return False
        before, self._num_bytes = self._num_bytes, self._written_bytes()
        self._until_s += self.seconds
        return self._num_bytes == before

    def _written_bytes(self) -> int:
        try:
            return sum(path.stat().st_size for path in self._checkpoints.glob("*/*"))  # unfinished ones, too
        except OSError:  # one is being given its name, or is removed
            return -1


def run_attempt(
    place: Place,
    command: Sequence[str],
    job: str,
    signals: StopSignals,
    statuses: Path,
    grace: Grace,
    order: Callable[[], Order],
    warm: WarmServer | None = None,
) -> dict[int, int]:
    """Runs the command as this host's ranks until all have ended; none of their processes remains.

    statuses: the folder in which ranks record how they end; a failed rank that has done so is not waited for. grace:
    how long they may save after a signal. order: asked all the time what the ranks are to do. warm: from which ranks
    are forked, as long as it lives. Returns rank -> exit status (negative: the signal that killed it), in the order of
    the ends, without ranks killed here.
    """
    world = {
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.num_ranks),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.knows_all),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as torchrun does
    }
    processes: dict[int, Process] = {}
    store = _open_store(place) if warm else None  # imports torch, while the server does
    try:
        for local, rank in enumerate(place.own_ranks):
            environment = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(local)}
            # Each leads a session, and so a process group, for `_kill`.
            processes[rank] = (warm and warm.fork(environment, signals)) or subprocess.Popen(
                command, env=environment, start_new_session=True
            )
        store = store or _open_store(place)  # imports torch, while ranks do
        return _watch(processes, signals, statuses, grace, order)
    finally:
        _kill([process for process in processes.values() if process.returncode is None])
        del store  # it listens until here


def _open_store(place: Place) -> object:
    """Returns the store of all ranks, if this host holds it. Ranks that have connected to the listener wait for it."""
    if place.listener is None:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    fd = place.listener.detach()
    return TCPStore(place.address, place.port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _watch(
    processes: Mapping[int, Process],
    signals: StopSignals,
    statuses: Path,
    grace: Grace,
    order: Callable[[], Order],
) -> dict[int, int]:
    """Passes signals on to the ranks; returns when all have ended or the rest is to be killed."""
    ends: dict[int, int] = {}
    was_passed_on, failed_s = False, float("inf")
    while len(ends) < len(processes):
        for rank, process in processes.items():
            if rank not in ends and (code := process.poll()) is not None:
                ends[rank] = code
                _kill_group(process)  # now: later its number may be that of another group
        alive = [rank for rank in processes if rank not in ends]
        ordered = order()
        if (signals.first is not None or ordered == "save") and not was_passed_on:
            was_passed_on = True
            for rank in alive:
                # Before training a rank has nothing to save, and Python would answer Ctrl-C with a traceback.
                is_ready = has_handler(processes[rank].pid, signal.SIGTERM)
                is_asked = signals.first is not None and is_ready
                processes[rank].send_signal(signals.passed_on if is_asked else signal.SIGTERM)
        reports, now = read_statuses(statuses, processes, ends), time.monotonic()
        has_failed = any(code and rank not in reports for rank, code in ends.items())
        if ordered == "fail" or has_failed or not all(status.is_good for status in reports.values()):
            failed_s = min(failed_s, now)
        # A rank that has recorded its status has printed everything; the rest of its exit takes 0.7 s.
        is_over = failed_s <= now and (reports.keys() >= set(alive) or now - failed_s > _FAILURE_GRACE_S)
        if is_over or grace.is_over(signals.since_s) or signals.is_urgent or ordered == "end":
            break
        time.sleep(_LOOK_EVERY_S if alive else 0)
    return ends


def _kill(processes: Sequence[Process]) -> None:
    """Kills what is left, also processes that ranks started: each rank leads its own process group."""
    for process in processes:
        _kill_group(process)
    for process in processes:
        try:
            process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            say(f"pid {process.pid}, a rank, does not end after SIGKILL: it waits for a disk or a device")


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
