"""torch's process group: opened for the ranks of a world and destroyed with it, or adopted from a script."""

import contextlib
import gc
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.base.clock import within
from paceline.base.errors import RunError, UserError
from paceline.base.process import die_with_parent
from paceline.base.units import listed
from paceline.world.config import ParallelConfig
from paceline.world.device import let_nccl_share_gpu
from paceline.world.env import Environment, check_interface
from paceline.world.errors import lost_peers_named
from paceline.world.group import DistributedGroup, Group, LocalGroup
from paceline.world.peer import Peer, ranks_by_gpu, this_process
from paceline.world.rendezvous import Joined, join_world
from paceline.world.store import post, read

_TEARDOWN_S = 0.5
_num_joined = 0  # open process groups that this process has joined


def store_of_open_group() -> Store:
    assert dist.group.WORLD is not None
    if hasattr(dist.distributed_c10d, "_get_default_store"):  # private to torch
        store: Store = dist.distributed_c10d._get_default_store()
        return store
    return PrefixStore("paceline", dist.group.WORLD.get_group_store())


def join_open_group(store: Store, rank: int, world_size: int, timeout_s: float) -> tuple[Environment, Joined]:
    """Returns this rank's environment and the world of an open process group; each rank posts a record in its store.
    Raises RunError, naming the missing ranks, after `timeout_s`; PeerLost if the store is gone."""
    global _num_joined
    _num_joined += 1  # all ranks join equally often
    root = PrefixStore(f"paceline/{_num_joined}", store)
    names = [f"peer/{other}" for other in range(world_size)]
    env = Environment(rank=rank, world_size=world_size, local_world_size=world_size, master_addr="the open group")
    with lost_peers_named(rank, "paceline.join"):  # the store has gone with its rank
        post(root, names[rank], {"nonce": secrets.token_hex(12), "peer": asdict(this_process(env))})
        try:
            root.wait(names, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            missing = [other for other, name in enumerate(names) if read(root, name) is None]
            who = f"rank {listed(missing, 16)} of {world_size}"
            raise RunError(f"{who} did not come to paceline.join in time") from error
        records = [read(root, name) for name in names]
    generation = records[0]["nonce"]
    peers = [Peer(**row["peer"]) for row in records]
    here = [peer.rank for peer in peers if peer.boot_id == peers[rank].boot_id]
    peers = [replace(p, local_rank=sum(q.boot_id == p.boot_id for q in peers[: p.rank])) for p in peers]
    env = replace(env, local_rank=here.index(rank), local_world_size=len(here))
    return env, Joined(generation=generation, peers=tuple(peers), store=PrefixStore(generation, root))


def backend_of_open_group(config: ParallelConfig, device: torch.device) -> str:
    """Returns the backend that the open process group has for this rank's device: "gloo" or "nccl". Raises UserError if
    it has none, or if the config asks for another backend or an interface."""
    has = dict(pair.split(":") for pair in dist.get_backend_config().split(","))  # cpu:gloo,cuda:nccl
    backend = has.get(device.type, "none")
    asked = [f"backend {config.backend}"] * (config.backend not in ("auto", backend))
    asked += [f"interface {config.interface}"] * bool(config.interface)
    if asked:
        raise UserError(
            f"a process group of backend {backend} is open already, and paceline.join was asked for "
            f"{', '.join(asked)}: give it to init_process_group, and nothing of it to join"
        )
    if backend not in ("gloo", "nccl"):
        shown = ", ".join(f"{name} for {kind}" for kind, name in has.items())
        raise UserError(
            f"a process group with {shown} is open already, and this rank computes on {device.type}: give "
            'init_process_group gloo or nccl for it, as in "cpu:gloo,cuda:nccl", or another device to join'
        )
    return backend


@contextmanager
def open_group(
    config: ParallelConfig, env: Environment, device: torch.device
) -> Iterator[tuple[Group, Joined | None, str]]:
    """Yields the group, its ranks and the backend; for one process without a launcher nothing is opened."""
    if not env.is_distributed:
        yield LocalGroup(device), None, "none"
        return
    backend = _choose_backend(config.backend, device)
    die_with_parent()
    if not config.interface:
        check_interface(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], "GLOO_SOCKET_IFNAME")
    joined = join_world(env, config.interface, backend, device.type, config.timeout_s)
    clean, group = False, None
    try:
        group = _open_process_group(config, env, device, backend, joined)
        yield group, joined, backend
        group.leave()
        clean = True
    finally:
        if dist.is_initialized():
            _close_process_group(group, clean)


@contextmanager
def adopt_group(config: ParallelConfig, device: torch.device, joined: Joined) -> Iterator[tuple[Group, Joined, str]]:
    """Yields the process group that the script opened. It stays open, with its own timeout."""
    backend = backend_of_open_group(config, device)
    device_here = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    assert dist.group.WORLD is not None
    try:
        timeout: timedelta = dist.group.WORLD._get_backend(device_here).options._timeout
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
    is_staged = device.type == "cuda" and backend == "gloo"
    hosts = [peer.machine for peer in joined.peers]
    group = DistributedGroup(device, config.timeout_s, hosts, is_staged=is_staged)
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
    if backend == "nccl" and any(len(ranks) > 1 for ranks in ranks_by_gpu(joined.peers).values()):
        let_nccl_share_gpu(env.rank, on_one_host=len({peer.machine for peer in joined.peers}) == 1)
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
    return _make_group(device, backend, config, joined)


def _close_process_group(group: DistributedGroup | None, clean: bool) -> None:
    """Destroys the group. After an error the destructor may wait for a peer that hangs; it gets half a second."""
    if group is not None:
        group.close()
    if clean:
        gc.collect()
        dist.destroy_process_group()
        return
    with contextlib.suppress(Exception):
        within(_TEARDOWN_S, dist.destroy_process_group)
