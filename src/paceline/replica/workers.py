"""A rank's copy of the script's DataLoader, whose workers know their rank."""

import signal
from typing import Any

from torch.utils.data import DataLoader

from paceline.world.runtime import World

_STOP_SIGNALS = ("SIGINT", "SIGHUP", "SIGUSR1")


def rank_loader(loader: DataLoader[Any], world: World | None = None, **reads: Any) -> DataLoader[Any]:
    """Returns a DataLoader like the given one that reads and collates differently.

    The script's worker_init_fn gets the worker's number among those of all ranks. world: None: all ranks' workers do
    the same, so they are numbered from 0 on each.
    """
    if loader.num_workers:
        first = world.rank * loader.num_workers if world else 0
        reads |= {
            "worker_init_fn": _WorkerInit(loader.worker_init_fn, first),
            "timeout": loader.timeout,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    if loader.pin_memory_device:
        reads["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(loader.dataset, num_workers=loader.num_workers, pin_memory=loader.pin_memory, **reads)


class _WorkerInit:
    """A worker_init_fn; a class, so that it can be pickled for spawned workers."""

    def __init__(self, script_init: Any, first: int) -> None:
        self._script_init, self._first = script_init, first

    def __call__(self, worker: int) -> None:
        """Makes the worker ignore stop signals, which a terminal sends to all processes: its rank needs it to finish
        the step. SIGTERM still ends it, as torch needs."""
        for name in _STOP_SIGNALS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        if self._script_init is not None:
            self._script_init(self._first + worker)
