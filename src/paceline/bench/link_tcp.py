"""What one TCP connection carries between two hosts, with nothing of ours in between: the link itself.

Gloo's own messages pass through copies and threads; a plain connection says what is left without them, as iperf3 does,
and with its block size. Only ranks that were told the token can connect. Nothing is kept open.
"""

import mmap
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.base.errors import RunError
from paceline.base.net import listen

_BLOCK_BYTES = 128 << 10  # iperf3's
_TOKEN_BYTES = 16
_PATIENCE_S = 20.0  # for the other end to come, and for the next byte
_SETTLED_S = 0.3  # a token bucket is empty and TCP's window open by then
_WINDOW_S = 0.1


@dataclass(frozen=True)
class Door:
    """Where a rank listens, for those who know the token. Empty address: it does not."""

    address: str
    port: int
    token: str


@contextmanager
def open_door(address: str) -> Iterator[tuple[socket.socket, Door]]:
    """Yields a listening socket on this address alone, any free port, and what others need to come in."""
    with listen(address, 0) as listener:
        listener.settimeout(_PATIENCE_S)
        yield listener, Door(address, listener.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))


def let_in(listener: socket.socket, door: Door) -> socket.socket:
    """Returns the connection of the next one who knows the token; others are turned away.

    Raises RunError where nobody comes.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            connection, _ = listener.accept()
            connection.settimeout(_PATIENCE_S)
            if _receive(connection, 2 * _TOKEN_BYTES) == door.token.encode():
                return connection
            connection.close()
        except OSError:
            continue
    raise RunError(f"no other rank came to {door.address}:{door.port} within {_PATIENCE_S:g} s; is a firewall between?")


def come_in(door: Door, own_address: str) -> socket.socket:
    """Returns a connection to a door, from this address of ours. Raises RunError where it is shut."""
    try:
        place = (own_address, 0)
        connection = socket.create_connection((door.address, door.port), _PATIENCE_S, source_address=place)
    except OSError as error:
        raise RunError(f"no connection from {own_address} to {door.address}:{door.port}: {error}") from None
    connection.sendall(door.token.encode())
    return connection


def pour(connection: socket.socket, seconds: float) -> None:
    """Sends for so long, then says that this was all; the other end `drain`s."""
    block = mmap.mmap(-1, _BLOCK_BYTES)  # whole pages, as iperf3's
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        raise RunError(f"the connection to another rank broke while it was measured: {error}") from None


def drain(connection: socket.socket) -> float:
    """Returns the bytes a second that arrived, once the link had settled, until the other end had sent all."""
    block = mmap.mmap(-1, _BLOCK_BYTES)
    num_bytes, began = 0, time.perf_counter()
    marks: list[tuple[float, int]] = []
    try:
        while count := connection.recv_into(block):
            num_bytes += count
            now = time.perf_counter()
            if not marks or now - marks[-1][0] >= _WINDOW_S:
                marks.append((now, num_bytes))
    except OSError as error:
        raise RunError(f"the connection to another rank broke while it was measured: {error}") from None
    marks.append((time.perf_counter(), num_bytes))
    first = next((mark for mark in marks[:-1] if mark[0] - began >= _SETTLED_S), marks[0])
    last = marks[-1]
    if last[0] <= first[0] or last[1] <= first[1]:
        raise RunError("too little arrived from another rank to tell a bandwidth")
    return (last[1] - first[1]) / (last[0] - first[0])


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (part := connection.recv(num_bytes - len(data))):
        data += part
    return data
