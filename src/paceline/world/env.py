"""Environment variables to one record: which rank of which world this process is.

torchrun (and our own `--nproc`, which uses the same agent) sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. None of them: a world of one.
"""

import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from paceline.base.errors import UserError, nearest

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Who this process is in the job, before anything is opened."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    agent_holds_store: bool = False  # torchrun's agent already listens on the master port

    @property
    def is_distributed(self) -> bool:
        """True where a launcher described a world, even one of a single rank."""
        return bool(self.master_addr)


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """Returns this process's place in the world.

    Raises UserError where the variables contradict each other or only some of them are set: a world that is half
    described would train alone and look fine.
    """
    env = os.environ if environ is None else environ
    if not any(name in env for name in ("RANK", "WORLD_SIZE")):
        return Environment()  # MASTER_ADDR alone may be somebody else's
    present = [name for name in _NEEDED if env.get(name)]
    missing = [name for name in _NEEDED if not env.get(name)]  # an empty one is none
    if missing:
        raise UserError(
            f"the environment describes half a world: {', '.join(present) or 'nothing'} set, "
            f"{', '.join(missing)} missing; start ranks with torchrun or --nproc, or unset them for one process"
        )
    rank, world_size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    local_rank = _integer(env, "LOCAL_RANK", rank)
    local_world_size = _integer(env, "LOCAL_WORLD_SIZE", max(1, local_rank + 1))
    if not 0 <= rank < world_size:
        raise UserError(f"RANK is {rank} and WORLD_SIZE is {world_size}; ranks count from 0 to WORLD_SIZE - 1")
    master_port = _integer(env, "MASTER_PORT")
    if not 0 < master_port < 65536:
        raise UserError(f"MASTER_PORT is {master_port}; a port lies between 1 and 65535")
    if not 0 <= local_rank < local_world_size <= world_size:
        raise UserError(
            f"LOCAL_RANK is {local_rank}, LOCAL_WORLD_SIZE {local_world_size}, WORLD_SIZE {world_size}; "
            "they contradict each other"
        )
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=env["MASTER_ADDR"],
        master_port=master_port,
        agent_holds_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{name} is '{text}' in the environment; it must be a whole number") from None


def check_interface(name: str) -> None:
    """Raises UserError, with the interfaces there are, where no interface has this name or it has no address."""
    if not name:
        return
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise UserError(
            f"parallel.interface is '{name}', and this machine ({socket.gethostname()}) has no such interface"
            f"{nearest(name, interfaces)}; it has: {', '.join(sorted(interfaces)) or 'none'}"
        )
    if not any(address.family in (socket.AF_INET, socket.AF_INET6) for address in interfaces[name]):
        raise UserError(f"parallel.interface '{name}' has no IP address; give it one or name another interface")


def check_port(port: int, host: str = "") -> None:
    """Raises UserError, naming who holds it where that can be seen, if nothing can listen on this port."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the store itself listens: a port in TIME_WAIT after an earlier run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port {port} cannot be listened on: {error.strerror}{_holder(port)}; "
                "choose another one, or 0 with --parallel.port for a free one"
            ) from None


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline()[:4])
                return f" (held by pid {connection.pid}: {command})"
    except (psutil.Error, OSError):
        pass
    return ""


def check_master(env: Environment, patience_s: float = 3.0) -> None:
    """Raises UserError where MASTER_ADDR does not resolve, or rank 0 cannot listen on MASTER_PORT.

    The look-up runs in a thread: a resolver without a network may think for much longer than a person waits.
    """
    if not env.is_distributed:
        return
    outcome: list[str | None] = []

    def resolve() -> None:
        try:
            socket.getaddrinfo(env.master_addr, env.master_port)
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error))

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(patience_s)
    problem = outcome[0] if outcome else f"no answer within {patience_s:.0f} s"
    if problem:
        raise UserError(
            f"MASTER_ADDR is '{env.master_addr}', which does not resolve on {socket.gethostname()}: {problem}; "
            "use the address of rank 0's host, as `ip addr` shows it there"
        )
    if env.rank == 0 and not env.agent_holds_store:
        check_port(env.master_port)
