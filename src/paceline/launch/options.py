"""The list of a run's hosts: addresses, as `doctor` has them, or names, as `launch` has them."""

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import UserError
from paceline.base.net import listen, resolve

Address = tuple[str, int]  # host, port

DEFAULT_PORT = 29400  # of doctor


def read_hosts(text: str, node: int) -> tuple[tuple[Address, ...], int]:
    """Reads 'ADDRESS[:PORT],ADDRESS[:PORT]'; returns the addresses, and which of them this host is. node: its place in
    the list; -1: found by its addresses. Raises UserError if the list cannot be used."""
    if ipv6 := next((word.strip() for word in text.split(",") if word.count(":") > 1), ""):
        raise UserError(f"--hosts has {ipv6}, and ranks meet at IPv4 addresses: give that of each host, or its name")
    pairs = [word.strip().rpartition(":") if ":" in word else (word.strip(), "", "") for word in text.split(",")]
    if not all(host and (not port or (port.isdecimal() and 0 < int(port) < 1 << 16)) for host, _, port in pairs):
        raise UserError(f"--hosts is '{text}'; write it as 10.0.0.1:{DEFAULT_PORT},10.0.0.2:{DEFAULT_PORT}")
    addresses = tuple((host, int(port or DEFAULT_PORT)) for host, _, port in pairs)
    if len(set(addresses)) < max(2, len(addresses)):
        raise UserError(f"--hosts is '{text}'; it lists two or more hosts, each once")
    own = [number for number, (host, _) in enumerate(addresses) if _is_own(host)]
    if node >= len(addresses) or (node < 0 and len(own) != 1):
        which = "several are" if own else "none is"
        raise UserError(
            f"--hosts is '{text}', and {which} an address of this machine ({socket.gethostname()}); tell it its place "
            f"in the list by --node-rank, from 0 to {len(addresses) - 1}"
        )
    node = own[0] if node < 0 else node
    _require_reachable(addresses, node)
    return addresses, node


def _is_own(host: str) -> bool:
    try:
        listen(host, 0).close()
    except (UserError, OSError):
        return False
    return True


def _require_reachable(addresses: tuple[Address, ...], node: int) -> None:
    name = addresses[node][0]
    try:
        resolve(name, 0)  # gethostbyname raises UnicodeError for `a..b`
        address = ipaddress.ip_address(socket.gethostbyname(name))
    except OSError as error:
        raise UserError(f"--hosts has {name} for this host, which does not resolve: {error.strerror}") from None
    is_test = all(host.startswith("127.") for host, _ in addresses)
    if address.is_unspecified or (address.is_loopback and not is_test):
        raise UserError(
            f"--hosts has {name} for this host, which is {address} here: name the address at which the other hosts "
            "reach it, as `ip addr` shows it"
        )


@dataclass(frozen=True)
class NamedHost:
    name: str  # for ssh
    num_ranks: str  # a number, or auto


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
    found = []
    for line in lines:
        host = _HOST.fullmatch(line.strip())
        if host is None:
            raise UserError(
                f"'{line.strip()}' is no host; write NAME:RANKS, or NAME slots=RANKS in a file. RANKS is at most 9999, "
                "or auto; a port is given by --port"
            )
        found.append(NamedHost(host["name"], host["ranks"] or "1"))
    names = [host.name for host in found]
    if not names or len(set(names)) < len(names):
        raise UserError(f"the hosts are '{', '.join(names)}'; give each host once, with all its ranks")
    return found
