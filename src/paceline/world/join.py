"""Finds the processes of a world: by a handshake over a store, or in an open process group."""

import contextlib
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline import __version__
from paceline.base.clock import within
from paceline.base.errors import PacelineError, RunError, UserError
from paceline.base.net import listen, require_loopback
from paceline.base.units import listed
from paceline.world.config import ParallelConfig
from paceline.world.env import (
    Environment,
    detect,
    interfaces_text,
    is_loopback,
    listening_address,
    store_addresses,
    transfer_address,
)
from paceline.world.handshake import REFUSE_S, TELL_S, Board, Facts, gather_ranks, join_rank_0
from paceline.world.peer import Peer as Peer
from paceline.world.peer import network_id, this_process

_ROOT = "paceline"
_num_joined = 0  # open process groups that this process has joined
_has_met = False  # this process has met the other ranks, by a handshake
_held: dict[int, Store] = {}  # by port: stores that this process hosts; it may leave a world and join again
_LAST_WORD_S = 2.0  # the other ranks wait this much longer: rank 0 knows who is missing


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A complete world, as one rank sees it."""

    generation: str  # random; names this attempt
    peers: tuple[Peer, ...]  # by rank
    store: Store  # of this world only; open while somebody refers to it


def join_world(env: Environment, interface: str, backend: str, device: str, timeout_s: float) -> Joined:
    """Returns the world when all ranks have come.

    Raises UserError on all ranks if two processes come as one rank, if world sizes, jobs, versions or backends differ,
    or if other hosts cannot reach Gloo's address; RunError, naming the missing ranks, after `timeout_s`.
    """
    global _has_met
    deadline = time.monotonic() + timeout_s

    def join() -> Joined:
        store = open_store(env, interface, timeout_s)
        board = Board(PrefixStore(_ROOT, store))
        me = _facts(env, interface, backend, device)
        meet, until = (gather_ranks, deadline) if env.rank == 0 else (join_rank_0, deadline + _LAST_WORD_S)
        generation, peers = meet(board, me, until)
        inner = PrefixStore(f"{_ROOT}/{generation}", store)
        return Joined(generation=generation, peers=tuple(peers), store=inner)

    where = f"{env.master_addr}:{env.master_port}"
    try:
        joined = within(timeout_s + 2 * _LAST_WORD_S + REFUSE_S, join)
        _has_met = True
        return joined
    except TimeoutError:
        raise RunError(f"the store at {where} has not answered rank {env.rank} for {timeout_s:g} s") from None
    except RuntimeError as error:  # DistStoreError and DistNetworkError derive from it
        raise RunError(
            f"rank {env.rank} lost the store at {where} while it waited for the other ranks: rank 0, or the launcher "
            f"on its host, has ended ({str(error).strip().splitlines()[0]})"
        ) from error


def tell_others(error: PacelineError) -> None:
    """Tells the ranks of other hosts why this one will not train: they would wait for it. Returns when they have heard
    it, or after some seconds. Does nothing once the ranks have met, for errors that all of them see, and on one host,
    where the launcher ends all ranks."""
    with contextlib.suppress(PacelineError, RuntimeError, OSError, TimeoutError):
        env = detect()
        if _has_met or not isinstance(error, UserError) or error.reach == "world" or not env.spans_hosts:
            return

        def tell() -> None:
            board = Board(PrefixStore(_ROOT, open_store(env, "", TELL_S)))
            me = replace(_facts(env, "", "", "cpu"), problem=str(error))
            (join_rank_0 if env.rank else gather_ranks)(board, me, time.monotonic() + TELL_S)

        within(TELL_S + REFUSE_S, tell)


def join_open_group(store: Store, rank: int, world_size: int, timeout_s: float) -> tuple[Environment, Joined]:
    """Returns this rank's environment and the world of an open process group; each rank posts a record in its store.
    Raises RunError, naming the missing ranks, after `timeout_s`."""
    global _num_joined
    _num_joined += 1  # all ranks join equally often
    root = PrefixStore(f"{_ROOT}/{_num_joined}", store)
    board, names = Board(root), [f"peer/{other}" for other in range(world_size)]
    env = Environment(rank=rank, world_size=world_size, local_world_size=world_size, master_addr="the open group")
    board.post(names[rank], {"nonce": secrets.token_hex(12), "peer": asdict(this_process(env))})
    try:
        root.wait(names, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [other for other, name in enumerate(names) if board.read(name) is None]
        raise RunError(f"rank {listed(missing, 16)} of {world_size} did not come to paceline.join in time") from error
    found = [board.read(name) for name in names]
    generation = found[0]["nonce"]
    peers = [Peer(**row["peer"]) for row in found]
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


def is_held(port: int) -> bool:
    """Whether this process hosts the ranks' store at this port, from an earlier world."""
    return port in _held


# ---- the store ----


def open_store(env: Environment, interface: str, timeout_s: float) -> Store:
    """Returns a client of the ranks' store. Rank 0 hosts it, on one address only, if no agent does."""
    timeout = timedelta(seconds=timeout_s)
    if env.rank == 0 and not env.agent_holds_store:
        address = listening_address(env, interface)
        if is_loopback(address):
            require_loopback()
        if env.master_port not in _held:
            fd = listen(address, env.master_port).detach()
            _held[env.master_port] = TCPStore(
                address, env.master_port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd
            )
        return _held[env.master_port]
    address = _reach(env, interface, timeout_s)
    return TCPStore(address, env.master_port, is_master=False, wait_for_workers=False, timeout=timeout)


def _reach(env: Environment, interface: str, timeout_s: float) -> str:
    """Returns the first address at which the store answers. Waits: rank 0 may start later."""
    deadline = time.monotonic() + timeout_s
    while True:
        addresses = store_addresses(env, interface)
        for address in addresses:
            try:
                with socket.create_connection((address, env.master_port), timeout=min(2.0, timeout_s)):
                    return address
            except OSError as error:
                problem = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {env.rank} on {socket.gethostname()} found no store at {env.master_addr}:{env.master_port} "
                f"({', '.join(addresses)}) for {timeout_s:g} s: {problem}. Has rank 0 been started? Do MASTER_ADDR "
                "and MASTER_PORT name its host, and does no firewall stand between?"
            )
        time.sleep(0.1)


def _facts(env: Environment, interface: str, backend: str, device: str) -> Facts:
    named = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return Facts(
        nonce=secrets.token_hex(12),
        peer=this_process(env),
        world_size=env.world_size,
        job=env.job,
        network=network_id(),
        address=transfer_address(named),
        interfaces=interfaces_text(),
        backend=backend,
        device=device,
        gpu=str(torch.cuda.get_device_properties().uuid) if device == "cuda" else "",
        versions={"torch": torch.__version__.split("+")[0], "paceline": __version__},
    )
