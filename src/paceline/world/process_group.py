"""torch's process group: opened for the ranks of a world and destroyed with it, or adopted from a script."""

import contextlib
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.base.clock import within
from paceline.base.errors import RunError, UserError
from paceline.base.parent import die_with_parent
from paceline.base.status import launcher_pid
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment, check_interface
from paceline.world.group import DistributedGroup, Group, LocalGroup
from paceline.world.join import Joined, backend_of_open_group, join_world
from paceline.world.staged import StagedGroup

_TEARDOWN_S = 0.5


def store_of_open_group() -> Store:
    assert dist.group.WORLD is not None
    if hasattr(dist.distributed_c10d, "_get_default_store"):  # private to torch
        store: Store = dist.distributed_c10d._get_default_store()
        return store
    return PrefixStore("paceline", dist.group.WORLD.get_group_store())


@contextmanager
def open_group(
    config: ParallelConfig, env: Environment, device: torch.device
) -> Iterator[tuple[Group, Joined | None, str]]:
    """Yields the group, its ranks and the backend; for one process without a launcher nothing is opened."""
    if not env.is_distributed:
        yield LocalGroup(device), None, "none"
        return
    backend = _choose_backend(config.backend, device)
    die_with_parent(launcher_pid())
    if not config.interface:
        check_interface(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], "GLOO_SOCKET_IFNAME")
    joined = join_world(env, config.interface, backend, device.type, config.timeout_s)
    clean, group = False, None
    try:
        group = _open_process_group(config, env, device, backend, joined)
        yield group, joined, backend
        group.finish()
        clean = True
    finally:
        if dist.is_initialized():
            _close_process_group(group, clean)


@contextmanager
def adopt_group(config: ParallelConfig, device: torch.device, joined: Joined) -> Iterator[tuple[Group, Joined, str]]:
    """Yields the process group that the script opened. It stays open, with its own timeout."""
    backend = backend_of_open_group(config, device)
    own = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    assert dist.group.WORLD is not None
    try:
        timeout: timedelta = dist.group.WORLD._get_backend(own).options._timeout
    except AttributeError:  # private to torch
        timeout = timedelta(seconds=config.timeout_s)
    group = _make_group(device, backend, config, joined)
    try:
        yield group, joined, backend
    finally:
        group.close()
        if dist.group.WORLD is not None:
            dist.group.WORLD.set_timeout(timeout)


def _make_group(device: torch.device, backend: str, config: ParallelConfig, joined: Joined) -> DistributedGroup:
    kind = StagedGroup if device.type == "cuda" and backend == "gloo" else DistributedGroup
    group = kind(device, config.timeout_s, [peer.machine for peer in joined.peers])
    group.share_memory(joined.peers, config.shared_memory and device.type == "cpu")
    return group


def _choose_backend(wanted: str, device: torch.device) -> str:
    backend = wanted if wanted != "auto" else "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"parallel.backend nccl needs a GPU, and this rank computes on {device.type}; use gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise UserError("parallel.backend is nccl, and this build of torch has no NCCL; use --parallel.backend gloo")
    return backend


def _open_process_group(
    config: ParallelConfig, env: Environment, device: torch.device, backend: str, joined: Joined
) -> DistributedGroup:
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
        return _make_group(device, backend, config, joined)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"rank {env.rank} of {env.world_size} met the others at {env.master_addr}:{env.master_port}, and could not "
            f"connect to all of them over {config.interface or 'the default interface'}: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error


def _close_process_group(group: DistributedGroup | None, clean: bool) -> None:
    """Destroys the group. After a clean run all ranks meet first: a rank that leaves early breaks the others' last
    transfer. After an error the destructor may wait for a peer that hangs; it gets half a second."""
    if clean:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    if group is not None:
        group.close()
    if clean:
        gc.collect()
        dist.destroy_process_group()
        return
    with contextlib.suppress(Exception):
        within(_TEARDOWN_S, dist.destroy_process_group)
