"""Which network interface a rank's transfers go through, and what the kernel says of it."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.world.env import is_loopback, transfer_address

_ETHERNET_BYTES, _IP_TCP_BYTES = 14, 52  # headers of a frame; of IPv4 (20) and TCP with timestamps (32)
_CHOICES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True)
class Interface:
    """A host's interface. None where it is not known."""

    name: str  # empty: the backend chooses, and does not say
    address: str
    mtu: int | None
    speed_bits_per_s: float | None  # what the hardware has agreed on with the other end

    @property
    def payload_share(self) -> float | None:
        """The share of an Ethernet link's bits that a TCP connection's payload can have: 1448 bytes of 1514.

        None where there is no such link: loopback."""
        if self.mtu is None or self.mtu <= _IP_TCP_BYTES or is_loopback(self.address):
            return None
        return (self.mtu - _IP_TCP_BYTES) / (self.mtu + _ETHERNET_BYTES)


def interface_in_use(backend: str) -> Interface:
    """Returns the interface that this backend's transfers use on this host."""
    named = os.environ.get(_CHOICES.get(backend, ""), "").partition(",")[0].lstrip("=^")
    if backend == "nccl" and not named:  # it may also take InfiniBand, NVLink or shared memory
        return Interface("", "", None, None)
    address = transfer_address(named)
    name = named or _holder(address)
    known = psutil.net_if_stats().get(name)
    return Interface(name, address, known.mtu if known else None, _speed(name))


def _holder(address: str) -> str:
    """The interface that has this address; empty: none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return str(name)
    return ""


def _speed(name: str) -> float | None:
    """Bits/s. A virtual interface (veth says 10,000 Mbit/s whatever carries it) and one without a cable have none."""
    folder = Path("/sys/class/net") / name
    if folder.exists() and not (folder / "device").exists():
        return None
    known = psutil.net_if_stats().get(name)
    return known.speed * 1e6 if known and known.speed > 0 else None
