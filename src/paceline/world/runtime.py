"""Opening and closing a world: from the environment to a rank with a device, threads and a group, and back."""

import contextlib
import ctypes
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.base.errors import RunError, UserError
from paceline.base.parent import die_with_parent
from paceline.world.calls import Calls
from paceline.world.config import ParallelConfig
from paceline.world.device import choose_device, choose_threads
from paceline.world.env import Environment, Torchrun, check_interface, check_master, check_nodes, check_size
from paceline.world.group import DistributedGroup, Group, LocalGroup
from paceline.world.join import Joined, Peer, alone, join_world

_TEARDOWN_PATIENCE_S = 0.5  # after a peer that hangs: 1.3 s from the error to the end of the process, exit included
_MOST_CLOCK_OFFSET_S = 5.0  # torchrun's c10d rendezvous takes a host for dead after 15 s of silence, by its own clock


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process computes and with whom."""

    rank: int
    """This process's number, from 0."""
    world_size: int
    """Processes in the world."""
    local_rank: int
    """This process's number on its host."""
    local_world_size: int
    """Processes of the world on this host."""
    device: torch.device
    """Where this rank computes."""
    backend: str
    """`gloo`, `nccl`, or `none` for one process without a launcher."""
    threads: int
    """CPU threads of this rank."""
    threads_reason: str
    """Why so many."""
    group: Group
    """The one door to the other ranks."""
    peers: tuple[Peer, ...]
    """The processes, by rank."""
    generation: str
    """Random, of this life of the world; empty for one process without a launcher."""
    store: Store | None
    """Keys that all ranks of this life see and no others; None for one process without a launcher."""
    warnings: tuple[str, ...]
    """What is wrong with the hosts, and does not stop a run."""
    calls: Calls = field(default_factory=Calls)
    """Of a script: its collective verbs, for the watchdog."""

    @property
    def is_main(self) -> bool:
        """True on the rank that speaks and writes: rank 0."""
        return self.rank == 0

    @property
    def backend_text(self) -> str:
        """The backend for people."""
        return "no process group" if self.backend == "none" else f"backend {self.backend}"

    def say(self, *values: object) -> None:
        """Prints on rank 0, at once; on the others nothing."""
        if self.is_main:
            print(*values, flush=True)

    def total(self, value: float) -> float:
        """Returns the sum of the ranks' values, the same float64 on all. Collective, as the next two: not between a
        replica's last backward and its step, where a rank without a micro-batch would mix it with gradients."""
        self.calls.note("World.total")
        return math.fsum(row[0] for row in self.group.share([float(value)]))

    def mean(self, value: float, weight: float = 1.0) -> float:
        """Returns the mean of the ranks' values, each counted by its weight: how many samples or tokens it is a mean
        of itself. A rank of weight 0 takes part and counts for nothing; nan where all weigh nothing. Collective."""
        self.calls.note("World.mean")
        rows = self.group.share([float(value) if weight else 0.0, float(weight)])
        total = math.fsum(row[1] for row in rows)
        return math.fsum(row[0] * row[1] for row in rows) / total if total else math.nan

    def gather(self, value: float) -> list[float]:
        """Returns the ranks' values, by rank, on all. Collective."""
        self.calls.note("World.gather")
        return [row[0] for row in self.group.share([float(value)])]


@contextmanager
def open_world(config: ParallelConfig, env: Environment) -> Iterator[World]:
    """Yields this rank's World and takes it down on every way out.

    Raises UserError for what the user must change (no such interface, device, port; a world of another size than
    expected; two processes as one rank; clocks apart), RunError where the ranks do not find each other. On an error
    nothing collective happens: the peers may be gone, and this rank's exit tells them.
    """
    check_size(env.world_size, config.expect_ranks)
    check_nodes(env)
    check_interface(config.interface)
    check_master(env, config.interface)
    device = choose_device(config.device, env.local_rank, env.local_world_size, env.world_size)
    threads, reason = choose_threads(config.threads, env.local_world_size)
    torch.set_num_threads(threads)
    _keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _open_group(config, env, device) as (group, joined, backend):
        yield World(
            rank=env.rank,
            world_size=env.world_size,
            local_rank=env.local_rank,
            local_world_size=env.local_world_size,
            device=device,
            backend=backend,
            threads=threads,
            threads_reason=reason,
            group=group,
            peers=joined.peers if joined else alone(env),
            generation=joined.generation if joined else "",
            store=joined.store if joined else None,
            warnings=(*_compare_clocks(group, joined.peers), *_no_way_back(env)) if joined else (),
        )


def clock_offsets(group: Group) -> list[float]:
    """Returns by how many seconds each rank's wall clock is ahead of rank 0's, by rank; right to the time that a small
    exchange takes. Collective."""
    group.barrier()
    ahead = [row[0] for row in group.share([time.time()])]
    return [seconds - ahead[0] for seconds in ahead]


def _compare_clocks(group: Group, peers: tuple[Peer, ...]) -> tuple[str, ...]:
    """Returns a warning for each host whose clock is far from rank 0's. Raises UserError on all ranks where torchrun's
    rendezvous compares those clocks: it would soon take living hosts for dead. Collective."""
    offsets = clock_offsets(group)
    trusted = any(row[0] for row in group.share_integers([int(Torchrun.of_this_process().is_dynamic)]))
    far = {peers[rank].host: offset for rank, offset in enumerate(offsets) if abs(offset) > _MOST_CLOCK_OFFSET_S}
    texts = tuple(
        f"the clock of {host} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of {peers[0].host}"
        for host, offset in far.items()
    )
    if texts and trusted:
        raise UserError(
            f"{'; '.join(texts)}. torchrun's rendezvous compares them, and takes hosts for dead that are not; set the "
            "clocks (NTP), or use its static rendezvous (--node-rank, --master-addr)",
            reach="world",
        )
    return texts


def _no_way_back(env: Environment) -> tuple[str, ...]:
    """Warns where a host that is lost could not come again: torch 2.13's agents tell each other where the ranks' store
    is in the first round of their rendezvous only, and both die after 60 s when a new agent joins a later one."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not env.agent_holds_store or restarts == "0" or not Torchrun.of_this_process().is_dynamic:
        return ()
    return (
        "a host that is lost and comes back could not join again: start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all hosts",
    )


@contextmanager
def _open_group(
    config: ParallelConfig, env: Environment, device: torch.device
) -> Iterator[tuple[Group, Joined | None, str]]:
    """The group of all ranks, who they are, and the backend; for one process without a launcher nothing is opened."""
    if not env.is_distributed:
        yield LocalGroup(device), None, "none"
        return
    backend = _choose_backend(config.backend, device)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.environ.get("PACELINE_LAUNCHER")
        die_with_parent(int(launcher) if launcher else None)
    joined = join_world(env, config.interface, backend, config.timeout_s)
    clean = False
    try:
        _open_process_group(config, env, device, backend, joined)
        yield DistributedGroup(device), joined, backend
        clean = True
    finally:
        if dist.is_initialized():
            _close_process_group(clean)


def _choose_backend(wanted: str, device: torch.device) -> str:
    backend = wanted if wanted != "auto" else "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"parallel.backend nccl needs a GPU, and this rank computes on {device.type}; use gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise UserError("parallel.backend is nccl, and this build of torch has no NCCL; use --parallel.backend gloo")
    return backend


def _open_process_group(
    config: ParallelConfig, env: Environment, device: torch.device, backend: str, joined: Joined
) -> None:
    if config.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = config.interface
        os.environ["NCCL_SOCKET_IFNAME"] = config.interface
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", joined.store),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timedelta(seconds=config.timeout_s),
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {env.rank} of {env.world_size} met the others at {env.master_addr}:{env.master_port}, and could not "
            f"connect to all of them over {config.interface or 'the default interface'}: "
            f"{str(error).strip().splitlines()[0]}"
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
