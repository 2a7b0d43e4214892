"""Reads which rank of which world this process is, and where the ranks' store listens, from the variables that
torchrun, `--nproc`, Slurm and Kubernetes set. If none is set, this is a world of one."""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from paceline.base.clock import within
from paceline.base.errors import UserError, nearest
from paceline.base.net import resolve
from paceline.base.units import plural
from paceline.world import schedulers

_RESOLVER_S = 3.0  # without a network a resolver may take far longer
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """This process's place in the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    agent_holds_store: bool = False  # torchrun's agent already listens on the master port
    job: str = ""  # equal on all ranks that were started together; empty: the launcher gave no name
    attempt: int = 0  # earlier starts of this rank that its host knows of; a new host begins at 0

    @property
    def is_distributed(self) -> bool:
        """True if a launcher described a world, even one of a single rank."""
        return bool(self.master_addr)

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks were started elsewhere, too."""
        return self.world_size > self.local_world_size


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """Returns this process's place in the world. Raises UserError if variables are missing or contradict each other,
    or if this is no rank, but the launcher of a pod's ranks."""
    environment = os.environ if environ is None else environ
    env = {**environment, **schedulers.variables(environment)}
    pod = schedulers.read_pod(env)
    if pod is not None and pod.num_ranks != "1":
        raise UserError(
            f"PET_NPROC_PER_NODE is {pod.num_ranks}: `paceline train` and `paceline resume` start this pod's ranks. "
            "Start anything else with torchrun, which reads the same variables, or unset PET_MASTER_ADDR for this pod "
            "alone"
        )
    if not any(name in env for name in ("RANK", "WORLD_SIZE")):
        return Environment()  # MASTER_ADDR alone may belong to another program
    present = [name for name in _NEEDED if env.get(name)]
    missing = [name for name in _NEEDED if not env.get(name)]  # an empty value counts as missing
    if missing:
        raise UserError(
            f"the environment describes only a part of a rank: {', '.join(present) or 'nothing'} set, "
            f"{', '.join(missing)} missing; start ranks with torchrun, srun or --nproc, or unset them for one process"
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
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=env["MASTER_ADDR"],
        master_port=master_port,
        agent_holds_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=env.get("PACELINE_JOB") or ("" if run_id == "none" else run_id),  # torchrun's name for no name
        attempt=_integer(env, "PACELINE_ATTEMPT", _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)),
    )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{name} is '{text}' in the environment; it must be a whole number") from None


def check_size(num_ranks: int, expect_ranks: int) -> None:
    """Raises UserError if the world has another size than expect_ranks (0: any)."""
    if expect_ranks not in (0, num_ranks):
        raise UserError(
            f"parallel.expect-ranks is {expect_ranks}, and this world has {plural(num_ranks, 'rank')}; start them all, "
            "or change the number"
        )


# ---- interfaces, addresses, ports ----


def check_interface(name: str, given_by: str = "parallel.interface") -> None:
    """Raises UserError, listing the interfaces, if none has this name or it has no address."""
    if not name:
        return
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise UserError(
            f"{given_by} is '{name}', and this machine ({socket.gethostname()}) has no such interface"
            f"{nearest(name, interfaces)}; it has: {', '.join(sorted(interfaces)) or 'none'}"
        )
    if not _addresses(name):
        raise UserError(f"{given_by} '{name}' has no IP address; give it one or name another interface")


def _addresses(interface: str) -> list[str]:
    addresses = psutil.net_if_addrs().get(interface, [])
    known = [address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
    return [address.address.partition("%")[0] for address in sorted(known, key=lambda a: a.family != socket.AF_INET)]


def interfaces_text() -> str:
    """Returns this host's interfaces that others may reach, for messages."""
    known_addresses = {name: _addresses(name) for name in sorted(psutil.net_if_addrs())}
    shown = [f"{name} {known[0]}" for name, known in known_addresses.items() if known and not is_loopback(known[0])]
    return ", ".join(shown) or "none but loopback"


def interface_of(address: str) -> str:
    """Returns the name of the interface with this address; empty if there is none."""
    return next((name for name in psutil.net_if_addrs() if address in _addresses(name)), "")


def is_loopback(address: str) -> bool:
    """True for an address that other hosts cannot reach."""
    return ipaddress.ip_address(address).is_loopback


def transfer_address(interface: str) -> str:
    """Returns the address at which Gloo listens: the interface's, else the one of the host's name, else loopback."""
    if addresses := _addresses(interface):  # no interface is named "", and a wrong one has been refused
        return addresses[0]
    with contextlib.suppress(OSError):
        return next(filter(_is_own, _resolve(socket.gethostname(), 0)), "127.0.0.1")
    return "127.0.0.1"


def store_addresses(env: Environment, interface: str) -> list[str]:
    """Returns the addresses at which ranks may find the store, likeliest first; rank 0 listens on its first one.

    /etc/hosts often maps a host's own name to 127.0.1.1, which no other host reaches: then the named interface comes
    first. Raises UserError if MASTER_ADDR does not resolve.
    """
    addresses = _resolve_master(env)
    is_name = env.master_addr not in (*addresses, "localhost")
    if is_name and interface and all(map(is_loopback, addresses)):
        return [*_addresses(interface), *addresses]
    return addresses


def listening_address(env: Environment, interface: str) -> str:
    """Returns the address at which rank 0 hosts the store. Raises UserError if this host does not have it."""
    wanted = store_addresses(env, interface)
    behind = _addresses(interface) or [a for a in [transfer_address("")] if not is_loopback(a)]  # for a NAT or service
    for address in (*wanted, *behind):
        if _is_own(address):
            return address
    raise UserError(
        f"MASTER_ADDR is '{env.master_addr}' ({', '.join(wanted)}), which is not an address of rank 0's host "
        f"{socket.gethostname()}; it has: {interfaces_text()}"
    )


def _is_own(address: str) -> bool:
    try:
        with socket.socket(_family(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _resolve(name: str, port: int) -> list[str]:
    addresses = [str(entry[4][0]) for entry in resolve(name, port)]
    return list(dict.fromkeys(sorted(addresses, key=lambda address: ":" in address)))


def wait_for_master(env: Environment, timeout_s: float = 0.0) -> None:
    """Asks again for a MASTER_ADDR that does not resolve yet: a cluster's name service learns of new hosts late. Raises
    UserError if it does not resolve within timeout_s."""
    deadline, is_told = time.monotonic() + timeout_s, False
    while env.is_distributed:
        try:
            _resolve_master(env)
            return
        except UserError:
            if time.monotonic() >= deadline:
                raise
            if not is_told and env.local_rank == 0:
                print(
                    f"MASTER_ADDR {env.master_addr} does not resolve yet; asking again for {timeout_s:g} s", flush=True
                )
            is_told = True
        time.sleep(1.0)


def _resolve_master(env: Environment) -> list[str]:
    try:
        return within(_RESOLVER_S, lambda: _resolve(env.master_addr, env.master_port))
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR is '{env.master_addr}', which does not resolve on {socket.gethostname()}: "
            f"{error.strerror or error}; use the address of rank 0's host, as `ip addr` shows it there"
        ) from None
