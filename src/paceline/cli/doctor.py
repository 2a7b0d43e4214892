"""paceline doctor"""

import dataclasses
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base import units
from paceline.base.errors import EXIT_DONE, UserError, require_at_least
from paceline.cli.flags import ModelFlags, base_config, parse
from paceline.cli.start import MOST_RANKS, automatic_ranks
from paceline.config import Config
from paceline.launch.options import NamedHost, own_place, read_names
from paceline.world.env import detect, interface_of

_PORT = 29400


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(ModelFlags):
    """Find in under half a minute what would go wrong on this machine, or on all hosts of a job, and what fixes it.

    Alone it checks this machine. Under torchrun, `paceline lab` or another launcher, or with --hosts, it checks each
    host and the network between them. With a preset, a file or options of a model it also checks whether that run fits.
    Exit status 1 if something fails."""

    out: str = "runs"
    """The run folder that the run would have; its disk is measured."""
    nproc: int = 1
    """Ranks that the run would have on this machine. Under a launcher, or with --hosts, leave it out."""
    hosts: str = ""
    """Check these hosts, ADDRESS:RANKS,ADDRESS:RANKS, and the network between them: start the same command on each.
    RANKS: the number that the run would have there, not auto; 1 if it is left out. They listen on port 29400."""
    node_rank: int = -1
    """With --hosts: this host's place in the list, from 0; -1: found by its addresses."""
    wait_s: float = 15.0
    """Seconds to wait for the other hosts, from the start."""
    json: bool = False
    """One JSON object, with each check by host, instead of a table."""


def main(arguments: list[str]) -> int:
    parsed = parse(DoctorArguments, DoctorArguments(settings=base_config(arguments)), arguments, "doctor")
    require_at_least(parsed, "--", wait_s=1)
    if not 1 <= parsed.nproc <= MOST_RANKS:
        raise UserError(f"--nproc is {parsed.nproc}; it must be a number of ranks from 1 to {MOST_RANKS}")
    config = parsed.settings
    has_config = dataclasses.replace(config, parallel=Config().parallel) != Config()
    if not config.train.horizons:
        config = config.replace("train", steps=1)  # the checks do not depend on the horizon
    config.check()
    env = detect()
    if parsed.node_rank >= 0 and not parsed.hosts:
        raise UserError("--node-rank needs a list of hosts: --hosts")
    if parsed.hosts and env.is_distributed:
        raise UserError("--hosts inside a world that a launcher made already; start the command from a plain shell")
    if env.local_rank:  # local rank 0 examines the host
        return EXIT_DONE
    hosts = read_names(parsed.hosts, "") if parsed.hosts else []
    addresses = [(host.name, _PORT) for host in hosts]
    node = own_place([host.name for host in hosts], parsed.node_rank) if hosts else 0
    _require_numbers(hosts, node, config.parallel.device)
    ranks = [int(host.num_ranks) for host in hosts]
    num_ranks = ranks[node] if hosts else env.local_world_size if env.is_distributed else parsed.nproc
    num_hosts = len(hosts) or -(-env.world_size // env.local_world_size)
    from paceline.tools.doctor import doctor, host  # imports torch: seconds

    address = socket.gethostbyname(addresses[node][0]) if addresses else ""
    if addresses and not config.parallel.interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        config = config.replace("parallel", interface=interface_of(address))  # as the agents of launch do
    place = host.Place(
        host=socket.gethostname(),
        config=config,
        has_config=has_config,
        out=Path(parsed.out),
        num_ranks=num_ranks,
        world_size=env.world_size if env.is_distributed else sum(ranks) or num_ranks,
        num_hosts=num_hosts,
        address=address,
    )
    return doctor.doctor(place, env, (addresses, node) if addresses else None, parsed.wait_s, parsed.json)


def _require_numbers(hosts: Sequence[NamedHost], node: int, device: str) -> None:
    """Raises UserError if a number of ranks is auto: each host knows only its own."""
    unknown = [host.name for host in hosts if host.num_ranks == "auto"]
    if unknown:
        own = automatic_ranks(device)
        raise UserError(
            f"--hosts has {units.listed([f'{name}:auto' for name in unknown])}, and the doctor needs numbers, the same "
            f"on all hosts: auto is {own} on this host ({hosts[node].name}); write {hosts[node].name}:{own}"
        )
