"""What a rank tells of itself before the world opens, and why ranks cannot form one world. Pure, but for own facts."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline import __version__
from paceline.base.process import namespace
from paceline.base.units import listed
from paceline.world.device import SHARE_GPU, may_share_gpu
from paceline.world.env import Environment, interfaces_text, is_loopback, transfer_address
from paceline.world.peer import Peer, this_process

_SLOW = "If a host still prepares its data, give a longer --parallel.timeout-s"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a rank tells of itself."""

    nonce: str
    peer: Peer
    world_size: int
    job: str
    network: str  # equal if loopback is the same
    address: str  # at which Gloo will listen, which carries small messages beside NCCL, too
    interfaces: str
    backend: str
    device: str
    may_share_gpu: bool
    versions: dict[str, str]  # of libraries that must be the same
    problem: str = ""  # why this rank will not train


def this_rank(env: Environment, interface: str, backend: str, device: str, problem: str = "") -> Hello:
    """Returns this rank's hello, with a fresh nonce."""
    named = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return Hello(
        nonce=secrets.token_hex(12),
        peer=this_process(env, str(torch.cuda.get_device_properties().uuid) if device == "cuda" else ""),
        world_size=env.world_size,
        job=env.job,
        network=namespace("net"),
        address=transfer_address(named),
        interfaces=interfaces_text(),
        backend=backend,
        device=device,
        may_share_gpu=may_share_gpu(),
        versions={"torch": torch.__version__.split("+")[0], "paceline": __version__},
        problem=problem,
    )


def difference(present: Sequence[Hello]) -> str:
    """Returns why these living ranks, rank 0 first, cannot form one world; empty if they can."""
    zero = present[0]
    for other in present:
        if other.problem:
            return f"{other.peer.shown} cannot train: {other.problem}"
        if other.world_size != zero.world_size:
            return (
                f"{other.peer.shown} was started with WORLD_SIZE {other.world_size}, and {zero.peer.shown} with "
                f"{zero.world_size}; give all ranks the same"
            )
        if other.job and zero.job and other.job != zero.job:
            return (
                f"{other.peer.shown} belongs to job '{other.job}', and {zero.peer.shown} to '{zero.job}'; "
                "give each job a MASTER_PORT of its own"
            )
        for name, version in zero.versions.items():
            if other.versions[name] != version:
                return (
                    f"{other.peer.shown} has {name} {other.versions[name]}, and {zero.peer.shown} {name} {version}: "
                    "their results would differ. Install the same version on all hosts"
                )
        if other.may_share_gpu != zero.may_share_gpu:
            one, without = (other, zero) if other.may_share_gpu else (zero, other)
            return (
                f"{one.peer.shown} has {SHARE_GPU}=1, and {without.peer.shown} has not: set it for all ranks, if they "
                "are to share a GPU in a test, or for none"
            )
        if other.backend != zero.backend:
            return (
                f"{other.peer.shown} computes on {other.device} and would communicate by {other.backend}, and "
                f"{zero.peer.shown} on {zero.device} by {zero.backend}: a host without a visible GPU takes gloo. Make "
                "the GPU visible there, or give all ranks --parallel.device cpu, or --parallel.backend gloo, with "
                "which CPUs and GPUs train together"
            )
    return _unreachable_or_shared(present)


def _unreachable_or_shared(present: Sequence[Hello]) -> str:
    """Returns which rank others cannot reach, or which two have one GPU; empty if none."""
    spans_networks = len({hello.network for hello in present}) > 1
    owners: dict[str, Peer] = {}
    for hello in present:
        if spans_networks and is_loopback(hello.address):
            return (
                f"{hello.peer.shown} would listen on {hello.address}, where other hosts do not reach it; name its "
                f"interface with --parallel.interface: {hello.peer.host} has {hello.interfaces}"
            )
        gpu = hello.peer.gpu
        if gpu in owners and not hello.may_share_gpu:
            return (
                f"{owners[gpu].shown} and {hello.peer.shown} would compute on the same GPU, {gpu}: show each "
                "task its own (srun --gpus-per-task 1), or all of them all GPUs and give each its LOCAL_RANK; "
                f"for a test, {SHARE_GPU}=1 on all ranks lets them share it"
            )
        if gpu:
            owners[gpu] = hello.peer
    return ""


def two_processes(one: Peer, other: Peer) -> str:
    """Returns the message for two living processes of one rank."""
    return (
        f"two processes have come as rank {one.rank}: pid {one.pid} on {one.host}, pid {other.pid} on {other.host}; "
        "start each rank once, and give each job a MASTER_PORT of its own"
    )


def who_is_missing(world_size: int, present: Sequence[Hello]) -> str:
    """Returns the message of rank 0 when not all ranks have come in time."""
    came = {hello.peer.rank for hello in present}
    missing = [rank for rank in range(world_size) if rank not in came]
    return (
        f"rank{'s' if len(missing) > 1 else ''} {listed(missing, 16)} of {world_size} did not come in time "
        f"(parallel.timeout-s); {', '.join(hello.peer.shown for hello in present[:8])} did. Check that they were "
        f"started with this WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and read their output. {_SLOW}"
    )


def why_no_answer(me: Hello, has_met_rank_0: bool) -> str:
    """Returns the message of another rank whose rank 0 has not opened the world in time."""
    if has_met_rank_0:
        return (
            f"{me.peer.shown} met rank 0, which still waits for other ranks (parallel.timeout-s); its output says which"
        )
    return (
        f"{me.peer.shown} reached the store, and rank 0 of {me.world_size} did not come in time "
        f"(parallel.timeout-s); was it started, with the same MASTER_ADDR and MASTER_PORT? {_SLOW}"
    )
