"""The list of a run's hosts: NAME:RANKS,NAME:RANKS. `launch` reaches them by ssh, `doctor` knows them by address."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import UserError
from paceline.base.net import listen, resolve


@dataclass(frozen=True)
class NamedHost:
    name: str  # for ssh, or an address
    num_ranks: str  # a number, or auto


MOST_RANKS = 1024  # of one machine
_NUM_RANKS = r"(?P<ranks>auto|[1-9]\d{0,3})"
_HOST = re.compile(rf"(?P<name>[^\s:,-][^\s:,]*)(?:(?::|\s+slots\s*=\s*){_NUM_RANKS})?")


def read_names(text: str, hostfile: str) -> list[NamedHost]:
    """Reads 'NAME:RANKS,NAME:RANKS', or a file with a host on each line: NAME, NAME:RANKS or NAME slots=RANKS. Without
    a number a host has one rank. Raises UserError."""
    if bool(text) == bool(hostfile):
        raise UserError("which hosts? Give either --hosts a:2,b:2 or --hostfile FILE")
    lines = text.split(",")
    if hostfile:
        try:
            lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read --hostfile {hostfile}: {error}") from None
        lines = [line for line in (line.partition("#")[0].strip() for line in lines) if line]
    host_names = []
    for line in lines:
        host = _HOST.fullmatch(line.strip())
        if line.count(":") > 1:
            raise UserError(f"'{line.strip()}' is an IPv6 address; give the host's name, or its IPv4 address")
        if host is None or (host["ranks"] not in (None, "auto") and int(host["ranks"]) > MOST_RANKS):
            raise UserError(
                f"'{line.strip()}' is no host; write NAME:RANKS, or NAME slots=RANKS in a file. RANKS is at most "
                f"{MOST_RANKS}, or auto; a port is given by --parallel.port"
            )
        host_names.append(NamedHost(host["name"], host["ranks"] or "1"))
    names = [host.name for host in host_names]
    if not names or len(set(names)) < len(names):
        raise UserError(f"the hosts are '{', '.join(names)}'; give each host once, with all its ranks")
    return host_names


def own_place(names: Sequence[str], node: int) -> int:
    """Returns which of these hosts, which reach each other at these names, this one is. node: its place in the list;
    -1: found by its addresses. Raises UserError if it is none, or the others cannot reach it."""
    if len(names) < 2:
        raise UserError(f"--hosts is '{names[0]}'; it lists two or more hosts, each once")
    if node >= len(names):
        raise UserError(f"--node-rank is {node}; the list of hosts has places 0 to {len(names) - 1}")
    numbers = [number for number, name in enumerate(names) if _is_own(name)]
    if node < 0 and len(numbers) != 1:
        which = "several are" if numbers else "none is"
        raise UserError(
            f"--hosts is '{','.join(names)}', and {which} an address of this machine ({socket.gethostname()}); tell it "
            f"its place in the list by --node-rank, from 0 to {len(names) - 1}"
        )
    node = numbers[0] if node < 0 else node
    name = names[node]
    try:
        resolve(name, 0)  # gethostbyname raises UnicodeError for `a..b`
        address = ipaddress.ip_address(socket.gethostbyname(name))
    except OSError as error:
        raise UserError(f"--hosts has {name} for this host, which does not resolve: {error.strerror}") from None
    is_test = all(host.startswith("127.") for host in names)
    if address.is_unspecified or (address.is_loopback and not is_test):
        raise UserError(
            f"--hosts has {name} for this host, which is {address} here: name the address at which the other hosts "
            "reach it, as `ip addr` shows it"
        )
    return node


def _is_own(host: str) -> bool:
    try:
        listen(host, 0).close()
    except (UserError, OSError):
        return False
    return True
