"""Opening and closing a world: from the environment to a rank with a device, threads and a group, and back."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.base.errors import RunError, UserError
from paceline.world.config import ParallelConfig
from paceline.world.device import choose_device, choose_threads
from paceline.world.env import Environment, check_interface, check_master
from paceline.world.group import DistributedGroup, Group, LocalGroup

_TEARDOWN_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process computes and with whom."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str  # "gloo", "nccl", or "none" for one process without a launcher
    threads: int
    threads_reason: str
    group: Group

    @property
    def is_main(self) -> bool:
        """True on the rank that speaks and writes: rank 0."""
        return self.rank == 0

    @property
    def backend_text(self) -> str:
        """The backend for people."""
        return "no process group" if self.backend == "none" else f"backend {self.backend}"


@contextmanager
def open_world(config: ParallelConfig, env: Environment) -> Iterator[World]:
    """Yields this rank's World and takes it down on every way out.

    Raises UserError for what the user must change (no such interface, device, port), RunError where the ranks do not
    find each other. On an error nothing collective happens: the peers may be gone, and this rank's exit tells them.
    """
    check_interface(config.interface)
    check_master(env)
    device = choose_device(config.device, env.local_rank, env.local_world_size, env.world_size)
    backend = _choose_backend(config.backend, device) if env.is_distributed else "none"
    threads, reason = choose_threads(config.threads, env.local_world_size)
    torch.set_num_threads(threads)
    _keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env.is_distributed:
        _die_with_parent()
        _open_process_group(config, env, device, backend)
    clean = False
    try:
        yield World(
            rank=env.rank,
            world_size=env.world_size,
            local_rank=env.local_rank,
            local_world_size=env.local_world_size,
            device=device,
            backend=backend,
            threads=threads,
            threads_reason=reason,
            group=DistributedGroup(device) if env.is_distributed else LocalGroup(device),
        )
        clean = True
    finally:
        if env.is_distributed:
            _close_process_group(clean)


def _choose_backend(wanted: str, device: torch.device) -> str:
    backend = wanted if wanted != "auto" else "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"parallel.backend nccl needs a GPU, and this rank computes on {device.type}; use gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise UserError("parallel.backend is nccl, and this build of torch has no NCCL; use --parallel.backend gloo")
    return backend


def _open_process_group(config: ParallelConfig, env: Environment, device: torch.device, backend: str) -> None:
    if config.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = config.interface
        os.environ["NCCL_SOCKET_IFNAME"] = config.interface
    try:
        dist.init_process_group(
            backend,
            init_method="env://",
            rank=env.rank,
            world_size=env.world_size,
            timeout=timedelta(seconds=config.timeout_s),
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {env.rank} of {env.world_size} could not join the others at {env.master_addr}:{env.master_port} "
            f"over {config.interface or 'the default interface'}: {str(error).strip().splitlines()[0]}"
        ) from error


def _close_process_group(clean: bool) -> None:
    """Destroys the group. After a clean run all ranks meet first: who leaves early breaks the others' last transfer.

    After an error the destructor may wait for a peer that hangs; it gets a few seconds, then the process goes on to
    its exit without it.
    """
    if clean:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        gc.collect()
        dist.destroy_process_group()
        return
    thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
    thread.start()
    thread.join(_TEARDOWN_PATIENCE_S)


def _keep_freed_memory() -> None:
    """Asks glibc not to hand large buffers back to the kernel at each free: every step would fault them in again.

    Measured on 6 layers x 384, bfloat16, 2 threads: 285 ms a step become 235 (docs/LOG.md). Peak memory stays.
    """
    if sys.platform != "linux":
        return
    m_mmap_threshold, m_trim_threshold = -3, -1  # malloc.h
    with contextlib.suppress(AttributeError, OSError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, (1 << 31) - 1)


def _die_with_parent() -> None:
    """Asks Linux to kill this rank when its launcher dies: kill -9 of a launcher leaves ranks training otherwise."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.environ.get("PACELINE_LAUNCHER", str(os.getppid())) != str(os.getppid()):  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)
