"""Measures the link between two hosts over plain TCP and UDP, at a port like those that ranks open.

TCP  "e": each byte comes back, for the round trip;  "s": takes all, then says how many bytes and in how long
UDP  each datagram is answered by its length, which tells how large a packet passes
"""

import contextlib
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, replace

import psutil

from paceline.base.net import listen
from paceline.world.env import interface_of

_CONNECT_S = 3.0
_IDLE_S = 3.0  # then a connection counts as dead
_SEND_S = 0.6
_CHUNK_BYTES = 256 << 10
_BUFFER_BYTES = 1 << 20  # so that little is on its way when the time is over
_ANSWER_S = 10.0  # for what is on its way
_PINGS = 50
_HEADERS = 28  # of IPv4 and UDP
_USUAL_MTUS = (1500, 1400, 1280, 576)  # Ethernet, tunnels, the least of IPv6 and of IPv4
_MOST_BYTES = 65_535  # of an IPv4 packet; loopback says one more
_PACKET_S = 0.15
_DO_NOT_FRAGMENT = 10, 3  # IP_MTU_DISCOVER, IP_PMTUDISC_PROBE of Linux: one packet, of any size
_COUNT = struct.Struct("<Qd")


@dataclass(frozen=True, kw_only=True)
class Link:
    """The measured link from this host to another."""

    problem: str = ""  # why it could not be measured
    round_trip_us: float = 0.0
    bytes_per_s: float = 0.0
    mtu: int = 0  # bytes of the largest packet that arrives; 0: unknown
    interface: str = ""  # of this host, and the largest packet that it sends
    interface_mtu: int = 0


class Listener:
    """Answers the other hosts' measurements, on one address only."""

    def __init__(self, address: str):
        self._tcp = listen(address, 0)
        self.address, self.port = address, int(self._tcp.getsockname()[1])
        self._udp = socket.socket(self._tcp.family, socket.SOCK_DGRAM)
        self._udp.bind((address, self.port))
        for serve in (self._accept, self._answer_packets):
            threading.Thread(target=serve, daemon=True).start()

    def close(self) -> None:
        self._tcp.close()
        self._udp.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._tcp.accept()
                threading.Thread(target=_serve, args=(connection,), daemon=True).start()

    def _answer_packets(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                packet, sender = self._udp.recvfrom(1 << 16)
                self._udp.sendto(str(len(packet)).encode(), sender)


def _serve(connection: socket.socket) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.recv(1) == b"e":
            while byte := connection.recv(1):
                connection.sendall(byte)
            return
        total, began, buffer = 0, time.perf_counter(), bytearray(_CHUNK_BYTES)
        while count := connection.recv_into(buffer):
            began = began if total else time.perf_counter()
            total += count
        connection.sendall(_COUNT.pack(total, time.perf_counter() - began))


def measure(host: str, port: int, address: str, *, is_quick: bool = False) -> Link:
    """Returns the measured link to that host's Listener. Others may measure this host at the same time: then the link
    is used in both directions at once, as in training. address: this host's address. is_quick: only the round trip."""
    interface = interface_of(address).partition(":")[0]  # eth0:1 is a label of an address of eth0
    mtu = min(psutil.net_if_stats()[interface].mtu, _MOST_BYTES) if interface else 0
    try:
        link = Link(round_trip_us=_round_trip_us(host, port), interface=interface, interface_mtu=mtu)
    except OSError as error:
        return Link(problem=error.strerror or str(error))
    if is_quick:
        return link
    link = replace(link, mtu=largest_packet(host, port, mtu))
    try:
        return replace(link, bytes_per_s=_bytes_per_s(host, port))
    except OSError as error:
        return replace(link, problem=f"it takes no data ({error.strerror or error})")


def _connect(host: str, port: int, what: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(what)
    return connection


def _round_trip_us(host: str, port: int) -> float:
    """The fastest of some: later ones may wait for a processor."""
    took = []
    with _connect(host, port, b"e") as connection:
        for _ in range(_PINGS):
            began = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            took.append(time.perf_counter() - began)
    return min(took) * 1e6


def _bytes_per_s(host: str, port: int) -> float:
    chunk, until = memoryview(bytes(_CHUNK_BYTES)), time.perf_counter() + _SEND_S
    with _connect(host, port, b"s") as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        while time.perf_counter() < until:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_ANSWER_S)
        answer = b""
        while len(answer) < _COUNT.size and (more := connection.recv(_COUNT.size)):
            answer += more
    if len(answer) < _COUNT.size:
        raise TimeoutError("no answer to what was sent")
    total, seconds = _COUNT.unpack(answer)
    return float(total / seconds) if seconds else 0.0


def largest_packet(host: str, port: int, mtu: int) -> int:
    """Returns the largest IPv4 packet, `mtu` or a usual size below, that arrives undivided; 0 where none does, or it
    cannot be known."""
    if sys.platform != "linux":  # the number of _DO_NOT_FRAGMENT has another meaning there
        return 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(_PACKET_S)
        try:
            probe.setsockopt(socket.IPPROTO_IP, *_DO_NOT_FRAGMENT)
            probe.connect((host, port))
        except OSError:  # IPv6
            return 0
        return next((size for size in (mtu, *_USUAL_MTUS) if _HEADERS < size <= mtu and _passes(probe, size)), 0)


def _passes(probe: socket.socket, packet_bytes: int) -> bool:
    size = packet_bytes - _HEADERS
    for _ in range(2):  # a packet may be lost
        with contextlib.suppress(OSError):
            probe.send(bytes(size))
            while answer := probe.recv(64):
                if answer == str(size).encode():
                    return True
    return False
