"""Environment variables to one record: which rank of which world this process is.

torchrun (and our own `--nproc`, which uses the same agent) sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. None of them: a world of one. What else a launcher lets us see is read here, too: how many
nodes torchrun was asked for, and at which address the ranks' store is to listen.
"""

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

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
    job: str = ""  # alike on all ranks that were started together; empty: the launcher gave it no name
    attempt: int = 0  # lives this rank had before, as far as its host knows: a node that went and came back counts anew

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
        job=env.get("PACELINE_JOB") or env.get("TORCHELASTIC_RUN_ID", "").removeprefix("none"),
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


# ---- how many there should be ----


def check_size(num_ranks: int, expect_ranks: int) -> None:
    """Raises UserError where a size is expected (not 0) and the world has another."""
    if expect_ranks not in (0, num_ranks):
        raise UserError(
            f"parallel.expect-ranks is {expect_ranks}, and this world has {num_ranks} "
            f"rank{'s' if num_ranks > 1 else ''}; start them all, or change the number"
        )


def check_nodes(env: Environment) -> None:
    """Raises UserError where torchrun was asked for more nodes than this world has: they would train apart, each alone,
    and end well. Clocks 20 s apart are enough for that: each agent takes the other for dead."""
    come = os.environ.get("GROUP_WORLD_SIZE", "")
    if not env.is_distributed or not come.isdigit():
        return
    asked = Torchrun.of_this_process().nodes
    if asked.isdigit() and int(come) < int(asked):  # "1:2" asks for any of these
        raise UserError(
            f"torchrun was asked for {asked} nodes (--nnodes), and this world has {come}: {socket.gethostname()} would "
            "train without the others. Clocks that are seconds apart are one cause (compare `date` on all hosts), "
            "another is a host that gave up; for a world that may shrink give a range, as in --nnodes 1:2"
        )


@dataclass(frozen=True)
class Torchrun:
    """What torchrun was asked for, as far as this process can see it."""

    nodes: str = ""  # as given: "2", "1:4"; empty: not seen
    rendezvous: str = ""  # "static", "c10d", ...; empty: not seen

    @property
    def is_dynamic(self) -> bool:
        """Whether hosts may come and go, and compare their wall clocks to know who is alive."""
        return self.rendezvous not in ("", "static") and self.nodes not in ("", "1", "1:1")

    @classmethod
    def of_this_process(cls) -> "Torchrun":
        """Returns the options of the torchrun that started this rank; empty ones where nothing like it is seen."""
        with contextlib.suppress(psutil.Error, OSError):
            for parent in psutil.Process().parents()[:3]:  # a wrapper such as numactl may stand between
                if (options := _torchrun_options(parent.cmdline())) is not None:
                    return cls.read(options, os.environ)
        return cls()

    @classmethod
    def read(cls, options: list[str], environ: Mapping[str, str]) -> "Torchrun":
        """Reads its command line, up to the script, and the PET_ variables that stand for its options."""

        def value(name: str, default: str) -> str:
            for place, option in enumerate(options):
                given, has_value, text = option.replace("_", "-").partition("=")
                if given == f"--{name}":
                    return text if has_value else (options[place + 1] if place + 1 < len(options) else "")
            return environ.get(f"PET_{name.replace('-', '_').upper()}", default)

        if "--standalone" in options or environ.get("PET_STANDALONE") == "1":
            return cls("1", "c10d")
        return cls(value("nnodes", "1:1"), value("rdzv-backend", "static"))


def _torchrun_options(command: list[str]) -> list[str] | None:
    """What stands between torchrun and the script in a command line; None where it runs something else."""
    for place, word in enumerate(command[:4]):
        if PurePath(word).name == "torchrun" or word in ("torch.distributed.run", "torch.distributed.launch"):
            options = command[place + 1 :]
            script = next((i for i, o in enumerate(options) if o == "paceline" or o.endswith(".py")), len(options))
            return options[:script]
    return None


# ---- interfaces, addresses, ports ----


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
    if not _addresses(name):
        raise UserError(f"parallel.interface '{name}' has no IP address; give it one or name another interface")


def check_port(port: int, host: str = "") -> None:
    """Raises UserError, naming who holds it where that can be seen, if nothing can listen on this port."""
    if port == 0:
        return
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
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


def _addresses(interface: str) -> list[str]:
    """The IP addresses of an interface, those of IPv4 first; none where there is no such interface."""
    found = psutil.net_if_addrs().get(interface, [])
    known = [address for address in found if address.family in (socket.AF_INET, socket.AF_INET6)]
    return [address.address.partition("%")[0] for address in sorted(known, key=lambda a: a.family != socket.AF_INET)]


def interfaces_text() -> str:
    """The interfaces of this host with an address that others may reach, for messages."""
    found = [
        f"{name} {addresses[0]}"
        for name in sorted(psutil.net_if_addrs())
        if (addresses := _addresses(name)) and not is_loopback(addresses[0])
    ]
    return ", ".join(found) or "none but loopback"


def is_loopback(address: str) -> bool:
    """True for an address that no other host reaches."""
    return ipaddress.ip_address(address).is_loopback


def transfer_address(interface: str) -> str:
    """Returns the address of this host at which Gloo listens: that of the interface, else of the host's name.

    Loopback where the name has no address of this host, as Gloo itself does it.
    """
    if interface:
        return _addresses(interface)[0]
    with contextlib.suppress(OSError):
        own = [address for address in _resolve(socket.gethostname(), 0) if _is_own(address)]
        if own:
            return own[0]
    return "127.0.0.1"


def store_addresses(env: Environment, interface: str) -> list[str]:
    """Returns the addresses at which ranks find their store, likeliest first; rank 0 listens on the first of its own.

    A host's own name is often 127.0.1.1 in its own /etc/hosts, where no other host would find it: there the named
    interface counts. Raises UserError where MASTER_ADDR does not resolve.
    """
    found = _resolve_master(env)
    is_name = env.master_addr not in (*found, "localhost")
    if is_name and interface and all(map(is_loopback, found)):
        return [*_addresses(interface), *found]
    return found


def listening_address(env: Environment, interface: str) -> str:
    """Returns the one address at which rank 0 hosts the store. Raises UserError where this host has no such address."""
    wanted = store_addresses(env, interface)
    behind = _addresses(interface) or [a for a in [transfer_address("")] if not is_loopback(a)]  # a NAT's, a service's
    for address in (*wanted, *behind):
        if _is_own(address):
            return address
    raise UserError(
        f"MASTER_ADDR is '{env.master_addr}' ({', '.join(wanted)}), which is no address of rank 0's host "
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
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(sorted(found, key=lambda address: ":" in address)))


def check_master(env: Environment, interface: str = "") -> None:
    """Raises UserError where MASTER_ADDR does not resolve, or rank 0 cannot listen on MASTER_PORT."""
    if not env.is_distributed:
        return
    if env.rank == 0 and not env.agent_holds_store:
        check_port(env.master_port, listening_address(env, interface))
    else:
        _resolve_master(env)


def _resolve_master(env: Environment, patience_s: float = 3.0) -> list[str]:
    """The addresses of MASTER_ADDR. The look-up runs in a thread: a resolver without a network may think for much
    longer than a person waits."""
    outcome: list[list[str] | str] = []

    def resolve() -> None:
        try:
            outcome.append(_resolve(env.master_addr, env.master_port))
        except OSError as error:
            outcome.append(error.strerror or str(error))

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(patience_s)
    found = outcome[0] if outcome else f"no answer within {patience_s:.0f} s"
    if isinstance(found, str):
        raise UserError(
            f"MASTER_ADDR is '{env.master_addr}', which does not resolve on {socket.gethostname()}: {found}; "
            "use the address of rank 0's host, as `ip addr` shows it there"
        )
    return found
