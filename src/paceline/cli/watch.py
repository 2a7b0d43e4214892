"""paceline watch"""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from paceline.base.errors import EXIT_DONE, UserError
from paceline.cli.flags import parse
from paceline.cli.report import num_parameters
from paceline.tools.view.follow import Views
from paceline.tools.view.server import PageServer
from paceline.tools.view.terminal import show

_HOST, _PORT = "127.0.0.1", 8700


@dataclass(frozen=True, kw_only=True)
class WatchArguments:
    """Watch a run while it trains: loss, speed, time left, where each rank's time goes, events, checkpoints. With a
    folder of runs, all of them (the newest 32). Only reads the run folder, which may not be there yet."""

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]] = ""
    """The run folder, or a folder of runs."""
    once: bool = False
    """Print what is known now, and end."""
    page: bool = False
    """Serve a live page for a browser, until Ctrl-C, and print its address. Only who has the token in it can read."""
    port: int = _PORT
    """With --page: the port to listen on; 0: any free one, as when the default is taken."""
    host: str = _HOST
    """With --page: the address to listen on. The default is reached from this machine only; for a run on another host
    use `ssh -L`. Elsewhere the page is sent over plain HTTP."""


def main(arguments: list[str]) -> int:
    parsed = parse(WatchArguments, WatchArguments(), arguments, "watch")
    if not parsed.run:
        raise UserError("name the run folder to watch, or a folder of runs: paceline watch RUN")
    if not parsed.page and (parsed.port, parsed.host) != (_PORT, _HOST):
        raise UserError("--port and --host belong to the page; add --page")
    if parsed.page and parsed.once:
        raise UserError("--once prints to the terminal; give it without --page")
    if not 0 <= parsed.port <= 65535:
        raise UserError(f"--port is {parsed.port}; it lies between 0 and 65535")
    path = Path(parsed.run)
    try:
        os.scandir(path).close()
    except OSError as error:
        if parsed.once or not isinstance(error, FileNotFoundError):  # else it may come
            raise UserError(f"cannot read {path}: {error.strerror}; name a run folder, or a folder of runs") from None
    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        if parsed.page:
            _serve(Views(path, num_parameters), parsed.host, parsed.port)
        else:
            show(Views(path, num_parameters), once=parsed.once)
    return EXIT_DONE


def _page_server(runs: Views, host: str, port: int) -> PageServer:
    """Listens on this port; on a free one instead of the default port if another process has that."""
    try:
        return PageServer(runs, host, port)
    except UserError:
        if port != _PORT:
            raise
        return PageServer(runs, host, 0)


def _serve(runs: Views, host: str, port: int) -> None:
    server = _page_server(runs, host, port)
    port = server.server_address[1]
    print(f"{server.url}\n  shows {runs.path}; Ctrl-C ends it")
    if host == _HOST:
        tunnel = f"ssh -L {port}:{host}:{port} {socket.gethostname()}"
        print(f"  from another machine: keep `{tunnel}` running there, and open the same address", flush=True)
    else:
        print(f"  plain HTTP on {host}: who can read this network can read the page", flush=True)
    server.serve()
