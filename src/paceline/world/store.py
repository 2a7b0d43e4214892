"""The ranks' store: opened or hosted, and JSON values in it."""

import json
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from paceline.base.errors import RunError
from paceline.base.net import listen, require_loopback
from paceline.world.env import Environment, is_loopback, listening_address, store_addresses

_held: dict[int, Store] = {}  # by port: stores that this process hosts; it may leave a world and join again


def post(store: Store, name: str, value: Any) -> None:
    """Sets a JSON value. Nobody removes one, so whoever has seen it can read it."""
    store.set(name, json.dumps(value))


def read(store: Store, name: str) -> Any:
    """Returns a JSON value; None if there is none. Raises ValueError for anything else."""
    return json.loads(store.get(name)) if store.check([name]) else None


def open_store(env: Environment, interface: str, timeout_s: float) -> Store:
    """Returns a client of the ranks' store. Rank 0 hosts it, on one address only, if no agent does."""
    timeout = timedelta(seconds=timeout_s)
    if env.rank == 0 and not env.agent_holds_store:
        address = listening_address(env, interface)
        if is_loopback(address):
            require_loopback()
        if env.master_port not in _held:
            fd = listen(address, env.master_port).detach()
            _held[env.master_port] = TCPStore(
                address, env.master_port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd
            )
        return _held[env.master_port]
    address = _reach(env, interface, timeout_s)
    return TCPStore(address, env.master_port, is_master=False, wait_for_workers=False, timeout=timeout)


def _reach(env: Environment, interface: str, timeout_s: float) -> str:
    """Returns the first address at which the store answers. Waits: rank 0 may start later."""
    deadline = time.monotonic() + timeout_s
    while True:
        addresses = store_addresses(env, interface)
        for address in addresses:
            try:
                with socket.create_connection((address, env.master_port), timeout=min(2.0, timeout_s)):
                    return address
            except OSError as error:
                problem = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {env.rank} on {socket.gethostname()} found no store at {env.master_addr}:{env.master_port} "
                f"({', '.join(addresses)}) for {timeout_s:g} s: {problem}. Has rank 0 been started? Do MASTER_ADDR "
                "and MASTER_PORT name its host, and does no firewall stand between?"
            )
        time.sleep(0.1)
