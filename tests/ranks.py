"""Runs a function on N real ranks: processes, Gloo on loopback, the environment that torchrun would set.

    def whole_world(world, x): ...                      # module-level; gets the World that open_world opened
    results = run_ranks(whole_world, 3, x)              # by rank
    results = run_calls({"sum": Call(whole_world, x), ...}, 3)  # each in a world of its own, all in one set of ranks

Ranks are forked from a server process that has imported torch once: 30 ms a rank, where importing takes 2 s of a core.
The store is held here, as torchrun's agent holds it, so its port is the OS's choice and nobody can take it meanwhile.
"""

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.world.config import ParallelConfig
from paceline.world.env import Environment, detect

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = [
    "pytest",
    "hypothesis",
    "paceline.train.loop",
    "paceline.tools.bench.verify",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch._dynamo",
]
FORKS.set_forkserver_preload(IMPORTED)


@dataclass(frozen=True)
class Server:
    """A process that forks ranks and commands, as Python's own `forkserver` starts it."""

    pid: int
    address: str
    is_wanted: int  # a file descriptor: the server ends when nobody has it open
    key: bytes  # of who may use it; empty before Python 3.14


def fork_server() -> Server:
    """Returns a server that is a fork of this process, in the place of one that imports torch by itself."""
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        reader, is_wanted = os.pipe()
        key = os.urandom(getattr(forkserver, "_AUTHKEY_LEN", 0))
        pid = os.fork()
        if pid == 0:
            os.close(is_wanted)
            _be_the_server(os.dup(listener.fileno()), reader, key)
        os.close(reader)
    return Server(pid, address, is_wanted, key)


def use_server(server: Server) -> None:
    """From now on this process forks from that server."""
    known = forkserver._forkserver
    known._forkserver_pid, known._forkserver_address = server.pid, server.address
    known._forkserver_alive_fd = server.is_wanted
    known._forkserver_authkey = server.key
    known.ensure_running = resource_tracker.ensure_running  # it runs, and is no child of this process


def _be_the_server(listener: int, reader: int, key: bytes) -> None:
    """Ends with the process. What pytest has changed is taken back; a process that it forks may fork from it, too."""
    logging.getLogger().handlers.clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    sys.modules["__main__"] = ModuleType("__main__")
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    forkserver._forkserver._forkserver_authkey = key
    gc.freeze()
    try:
        forkserver.main(listener, reader, [], **_key_argument(key))
    finally:
        os._exit(0)


def _key_argument(key: bytes) -> dict[str, Any]:
    """Returns the argument by which a server of Python 3.14 learns its key: a pipe that holds it."""
    if not key:
        return {}
    reader, writer = os.pipe()
    os.write(writer, key)
    os.close(writer)
    return {"authkey_r": reader}


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    status: int  # exit status; negative: the signal
    has_result: bool
    result: Any
    said: str  # stdout and stderr, tracebacks included


class RanksFailed(AssertionError):
    """At least one rank did not return; `outcomes` has all of them by rank."""

    def __init__(self, message: str, outcomes: list[Outcome]):
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 280,
    last_words_s: float = 15,
    config: ParallelConfig | None = None,
    opened: bool = True,
) -> list[Any]:
    """Returns what `function(world, *args)` returned on each rank.

    With opened=False the function gets (config, environment) instead and opens its world itself. Raises RanksFailed,
    with every rank's output, where a rank raised, died or was not done by the deadline. No process is left behind.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = config or ParallelConfig(device="cpu", threads=1, timeout_s=30.0)
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as folder:
        request = (Call(function, *args, opened=opened), config)
        Path(folder, "request").write_bytes(pickle.dumps(request))
        processes = [_start(Path(folder), rank, world_size, store.port) for rank in range(world_size)]
        try:
            in_time = _wait(processes, timeout_s, last_words_s)
        finally:
            for process in processes:
                _kill(process)
        outcomes = [_outcome(Path(folder), rank, process) for rank, process in enumerate(processes)]
    del store
    if not all(outcome.has_result and outcome.status == 0 for outcome in outcomes):
        why = "failed" if in_time else f"were not done within {timeout_s:g} s"
        parts = [f"--- rank {rank}: {_summary(outcome)}\n{outcome.said}" for rank, outcome in enumerate(outcomes)]
        raise RanksFailed(f"{function.__qualname__} on {world_size} ranks {why}\n" + "\n".join(parts), outcomes)
    return [outcome.result for outcome in outcomes]


class Call:
    """What a rank calls: `function(world, *args)`, or `function(config, environment, *args)` with opened=False."""

    def __init__(self, function: Callable[..., Any], *args: Any, opened: bool = True):
        self.function, self.args, self.opened = function, args, opened

    def __call__(self, config: ParallelConfig, environment: Environment) -> Any:
        if not self.opened:
            return self.function(config, environment, *self.args)
        from paceline.world.runtime import open_world  # imports torch

        with open_world(config, environment) as world:
            return self.function(world, *self.args)


def run_calls(calls: Mapping[str, Call], world_size: int, config: ParallelConfig | None = None) -> dict[str, list[Any]]:
    """Returns what each call returned on each rank. A set of ranks costs 0.3 s of a core, a further call in it 0.03."""
    by_rank = run_ranks(_call_each, world_size, dict(calls), config=config, opened=False)
    return {name: [results[name] for results in by_rank] for name in calls}


def _call_each(config: ParallelConfig, environment: Environment, calls: dict[str, Call]) -> dict[str, Any]:
    return {name: call(config, environment) for name, call in calls.items()}


def _start(folder: Path, rank: int, world_size: int, port: int) -> ForkServerProcess:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = FORKS.Process(target=_rank, args=(folder, dict(environment), os.getcwd()))
    process.start()
    return process


def _wait(processes: list[ForkServerProcess], timeout_s: float, last_words_s: float) -> bool:
    """Returns whether all ended on their own; a failure shortens the deadline of the others to `last_words_s`."""
    deadline = time.monotonic() + timeout_s
    seen_failure = False
    while any(process.exitcode is None for process in processes):
        if not seen_failure and any(process.exitcode for process in processes):
            seen_failure = True
            deadline = min(deadline, time.monotonic() + last_words_s)
        if time.monotonic() > deadline:
            return seen_failure
        time.sleep(0.01)
    return True


def _kill(process: ForkServerProcess) -> None:
    """Kills the rank and what it started. A rank that is not yet the leader of a session has started nothing."""
    assert process.pid is not None
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    process.join()


def _outcome(folder: Path, rank: int, process: ForkServerProcess) -> Outcome:
    path = folder / f"result-{rank}"
    return Outcome(
        status=process.exitcode or 0,
        has_result=path.exists(),
        result=pickle.loads(path.read_bytes()) if path.exists() else None,
        said=(folder / f"said-{rank}").read_text(errors="replace"),
    )


def _summary(outcome: Outcome) -> str:
    ended = f"killed by {signal.Signals(-outcome.status).name}" if outcome.status < 0 else f"status {outcome.status}"
    return f"{ended}, {'returned' if outcome.has_result else 'returned nothing'}"


def _rank(folder: Path, environment: dict[str, str], directory: str) -> None:
    os.setsid()  # so that what a rank itself starts can be ended with it
    gc.freeze()  # what the server imported; else each collection walks it, and copies its pages: 0.2 s of a core
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # else that of the server: a worker of data imports torch
    said = os.open(folder / f"said-{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(said, standard)
    try:
        _call(folder)
        atexit._run_exitfuncs()  # which a forked process leaves out
    except BaseException:
        # As in the program: an error ends the rank at once, and its exit is how the others learn of it.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _call(folder: Path) -> None:
    call, config = pickle.loads((folder / "request").read_bytes())
    result = call(config, detect())
    path = folder / f"result-{os.environ['RANK']}"
    path.with_suffix(".new").write_bytes(pickle.dumps(result))
    path.with_suffix(".new").rename(path)
