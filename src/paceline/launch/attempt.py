"""One attempt: the ranks of this host, started and watched here.

torch's elastic agent would wait 30 s for ranks that hang after a failure (2 s here), and turn signals into a failure;
here the ranks get them and decide together. Each attempt has a new store, on one address only, so that no rank reads
the addresses of an earlier attempt.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.base.status import read_statuses
from paceline.launch.place import Order, Place
from paceline.launch.signals import StopSignals, has_handler

_LOOK_EVERY_S = 0.05
_FAILURE_GRACE_S = 2.0  # for the other ranks: those that wait for the dead one notice within 0.1 s and print why
_SAVE_GRACE_S = 60.0  # after a signal: to finish the step and save


def run_attempt(
    place: Place,
    command: Sequence[str],
    job: str,
    signals: StopSignals,
    statuses: Path,
    order: Callable[[], Order],
) -> dict[int, int]:
    """Runs the command as this host's ranks until all have ended; none of their processes remains.

    statuses: the folder in which ranks record how they end; a failed rank that has done so is not waited for. order:
    asked all the time what the ranks are to do. Returns rank -> exit status (negative: the signal that killed it), in
    the order of the ends, without ranks killed here.
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
    ranks = range(place.first_rank, place.first_rank + place.num_ranks)
    processes: dict[int, subprocess.Popen[bytes]] = {}
    store = None
    try:
        for local, rank in enumerate(ranks):
            own = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(local)}
            processes[rank] = subprocess.Popen(command, env=own, start_new_session=True)  # a group, for `_kill`
        store = _open_store(place)
        return _watch(processes, signals, statuses, order)
    finally:
        _kill(processes)
        del store  # it listens until here


def _open_store(place: Place) -> object:
    """Returns the store of all ranks, if this host holds it. Ranks that have connected to the listener wait for it."""
    if place.listener is None:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch: a second, in which ranks import it

    fd = place.listener.detach()
    return TCPStore(place.address, place.port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _watch(
    processes: Mapping[int, subprocess.Popen[bytes]], signals: StopSignals, statuses: Path, order: Callable[[], Order]
) -> dict[int, int]:
    """Passes signals on to the ranks; returns when all have ended or the rest is to be killed."""
    ends: dict[int, int] = {}
    was_passed_on, failed_s = False, float("inf")
    while len(ends) < len(processes):
        for rank, process in processes.items():
            if rank not in ends and (code := process.poll()) is not None:
                ends[rank] = code
        alive = [rank for rank in processes if rank not in ends]
        ordered = order()
        if (signals.first is not None or ordered == "save") and not was_passed_on:
            was_passed_on = True
            for rank in alive:
                # Before training a rank has nothing to save, and Python would answer Ctrl-C with a traceback.
                is_ready = has_handler(processes[rank].pid, signal.SIGTERM)
                is_asked = signals.first is not None and is_ready
                processes[rank].send_signal(signals.passed_on if is_asked else signal.SIGTERM)
        found, now = read_statuses(statuses), time.monotonic()
        if ordered == "fail" or any(ends.values()) or not all(status.is_good for status in found.values()):
            failed_s = min(failed_s, now)
        is_overdue = signals.since_s is not None and now - signals.since_s > _SAVE_GRACE_S
        # A rank that has recorded its status has printed everything; the rest of its exit takes 0.7 s.
        is_over = failed_s <= now and (found.keys() >= set(alive) or now - failed_s > _FAILURE_GRACE_S)
        if is_over or is_overdue or signals.is_urgent or ordered == "end":
            break
        time.sleep(_LOOK_EVERY_S if alive else 0)
    return ends


def _kill(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Kills what is left, also processes that ranks started: each rank leads its own process group."""
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes.values():
        process.wait()
