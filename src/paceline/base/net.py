"""Listening on one address only. torch's own store listens on every interface, without authentication."""

import errno
import socket
from typing import Any

from paceline.base.errors import UserError

_BACKLOG = 1024  # ranks of one job connect at the same moment
LOOPBACK = "127.0.0.1"
_LOOPBACK_S = 2.0  # a connection to this very process takes far less


def resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    """Returns socket.getaddrinfo for TCP. Raises OSError if the name does not resolve, or cannot be one, as `a..b`."""
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "it is no name of a host") from None


def listen(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that listens on this address only; port 0: any free port. Raises UserError if it cannot,
    OSError if the name does not resolve."""
    family, kind, protocol, _, address = resolve(host, port)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port in TIME_WAIT from an earlier run counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        advice = "name an address of this machine" if is_elsewhere else "choose another port, or end what listens there"
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from None
    return listener


def require_loopback() -> None:
    """Raises UserError if loopback takes no connection, as in some containers. torch would retry for minutes."""
    try:
        with listen(LOOPBACK, 0) as listener:
            socket.create_connection(listener.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        raise UserError(
            f"the loopback interface of {socket.gethostname()}, over which the ranks of one host meet, takes no "
            f"connection to {LOOPBACK} ({error.strerror or error}); switch it on: ip link set lo up"
        ) from None
