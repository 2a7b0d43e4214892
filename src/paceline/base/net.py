"""Listening, on one address and no other. torch's own store listens on every interface, and asks nobody who he is."""

import socket

from paceline.base.errors import UserError

_BACKLOG = 1024  # ranks of one job that knock at the same moment


def listen(host: str, port: int) -> socket.socket:
    """Returns a TCP socket that listens on this address alone; port 0: any free one, which its name then says.

    Raises UserError where nothing can listen there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A port in TIME_WAIT after an earlier run is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
        ) from None
    return listener
