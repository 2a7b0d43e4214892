"""How ranks find each other: a handshake over a store that may remember the dead.

torchrun's agent keeps its store from one life of the ranks to the next, and counts lives differently on different
hosts. Ranks that trust what they find there meet the addresses of their own dead: about half of all restarts fail. So
nothing is trusted that is not an answer to something random:

    hello/RANK              every rank: here I am, with a fresh nonce
    answer/NONCE            rank 0: my generation (its own nonce), for this hello and no other
    ack/GENERATION/RANK     the rank lives, and has heard rank 0 of this generation
    roster                  rank 0, when all have acknowledged: the generation and who is in it
    refusal/NONCE           why the process with this nonce cannot take part

A process that is alive sees its hello overwritten where a second one comes as the same rank; one that is dead cannot
mind. Everything after the roster, the process group's own rendezvous included, has the generation before its keys.
All values are JSON. No clock of another host is read.
"""

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.base.errors import PacelineError, RunError, UserError
from paceline.base.net import listen
from paceline.world.env import (
    Environment,
    interfaces_text,
    is_loopback,
    listening_address,
    store_addresses,
    transfer_address,
)

_ROOT = "paceline"
_SETTLED_S = 5.0  # an unanswered rank looks whether it comes to a world that is complete: the dead are gone by then
_LAST_WORD_S = 2.0  # rank 0's verdict arrives before the others give up without one


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A process of this world."""

    rank: int
    host: str  # host name
    pid: int
    local_rank: int
    boot_id: str  # of the running kernel, and of the pid namespace: equal where `pid` means the same
    born_ticks: int  # when it began, in clock ticks since boot: another process may get its pid; 0: not known here

    @property
    def shown(self) -> str:
        """The process for people."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs on this host; False where it would be another host's."""
        try:
            is_there = psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return is_there and self.boot_id == _boot_id() and self.born_ticks == _born_ticks(self.pid)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A complete world, seen from one of its ranks."""

    generation: str  # random, of this life of the world
    peers: tuple[Peer, ...]  # by rank
    store: Store  # for this world alone; open as long as somebody holds it


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a rank says about itself."""

    nonce: str
    peer: Peer
    world_size: int
    job: str
    network: str  # equal where loopback is the same
    address: str  # where Gloo will listen; empty: another backend
    interfaces: str


def join_world(env: Environment, interface: str, backend: str, timeout_s: float) -> Joined:
    """Returns the world that this process and the others are, when all ranks have come.

    Raises UserError on all ranks where two processes come as one rank, or ranks were told different world sizes or
    jobs, or Gloo would listen where other hosts do not reach it; RunError, naming who is missing, after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s

    def join() -> Joined:
        store = _open_store(env, interface, timeout_s)
        board = _Board(PrefixStore(_ROOT, store))
        me = _facts(env, interface, backend)
        generation, peers = _gather(board, me, deadline) if env.rank == 0 else _come(board, me, deadline + _LAST_WORD_S)
        inner = PrefixStore(f"{_ROOT}/{generation}", store)
        return Joined(generation=generation, peers=tuple(peers), store=inner)

    where = f"{env.master_addr}:{env.master_port}"
    try:
        return _within(timeout_s + 2 * _LAST_WORD_S, join)
    except TimeoutError:
        raise RunError(f"the store at {where} has not answered rank {env.rank} for {timeout_s:g} s") from None
    except RuntimeError as error:  # DistStoreError and DistNetworkError derive from it
        raise RunError(
            f"rank {env.rank} lost the store at {where} while it waited for the other ranks: rank 0, or the launcher "
            f"on its host, has ended ({str(error).strip().splitlines()[0]})"
        ) from error


def alone(env: Environment) -> tuple[Peer, ...]:
    """Returns the peers of a world of one that nobody had to find."""
    return (_this_process(env),)


# ---- the store ----


def _open_store(env: Environment, interface: str, timeout_s: float) -> Store:
    """A client of the ranks' store, which rank 0 holds where no agent does, on one address and no other."""
    timeout = timedelta(seconds=timeout_s)
    if env.rank == 0 and not env.agent_holds_store:
        address = listening_address(env, interface)
        held = listen(address, env.master_port).detach()
        return TCPStore(
            address, env.master_port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=held
        )
    address = _reach(env, interface, timeout_s)
    return TCPStore(address, env.master_port, is_master=False, wait_for_workers=False, timeout=timeout)


def _reach(env: Environment, interface: str, timeout_s: float) -> str:
    """The first address at which the store answers. It may take a while to: rank 0 is perhaps still to be started."""
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


class _Board:
    """JSON under names, for all ranks to read."""

    def __init__(self, store: Store):
        self._store = store

    def post(self, name: str, value: Any) -> None:
        self._store.set(name, json.dumps(value))

    def read(self, name: str) -> Any:
        """None where nothing stands there."""
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def read_facts(self, name: str) -> _Facts | None:
        """Raises UserError where something else stands there: another version's facts, another program's value."""
        try:
            found = self.read(name)
            return None if found is None else _Facts(**{**found, "peer": Peer(**found["peer"])})
        except (TypeError, ValueError, KeyError):
            raise UserError(
                f"the store holds '{name}' of another program or another version of this one; install the same version "
                "on all hosts, and give each job a MASTER_PORT of its own",
                reach="rank",
            ) from None

    def remove(self, name: str) -> None:
        self._store.delete_key(name)


# ---- rank 0 ----


def _gather(board: _Board, me: _Facts, deadline: float) -> tuple[str, list[Peer]]:
    """Answers every hello, until each rank has acknowledged; posts the roster and returns it."""
    generation, began = me.nonce, time.monotonic()
    answered: dict[int, _Facts] = {}  # the latest hello of each rank, perhaps of the dead
    present: dict[int, _Facts] = {0: me}  # proven to live
    board.post("hello/0", asdict(me))
    while len(present) < me.world_size:
        try:
            _heed_refusal(board, me)
            _give_way(board, me, began)
            # One rank more than there should be: it comes where others were told of a larger world.
            for rank in range(1, me.world_size + 1):
                _answer(board, generation, rank, answered, present)
            _require_alike(list(present.values()))
            if time.monotonic() > deadline:
                raise RunError(_who_is_missing(me.world_size, list(present.values())), reach="world")
        except PacelineError as error:
            _refuse(board, error, [facts.nonce for facts in answered.values()])
        if len(present) < me.world_size:
            _pause(began)
    board.post("roster", {"generation": generation, "peers": [asdict(present[rank].peer) for rank in sorted(present)]})
    for rank in sorted(present)[1:]:
        board.remove(f"ack/{generation}/{rank}")
    return generation, [present[rank].peer for rank in sorted(present)]


def _answer(board: _Board, generation: str, rank: int, answered: dict[int, _Facts], present: dict[int, _Facts]) -> None:
    """Takes note of what a rank has posted by now. A newer hello than the acknowledged one: that process is dead."""
    hello = board.read_facts(f"hello/{rank}")
    if hello is None:
        present.pop(rank, None)  # gave up
        return
    if rank not in answered or answered[rank].nonce != hello.nonce:
        board.post(f"answer/{hello.nonce}", generation)
        answered[rank] = hello
    if rank in present and present[rank].nonce == hello.nonce:
        return
    ack = board.read_facts(f"ack/{generation}/{rank}")
    if ack is not None and ack.nonce == hello.nonce:
        present[rank] = ack
    else:
        present.pop(rank, None)


def _require_alike(present: list[_Facts]) -> None:
    """Raises UserError where living ranks cannot be one world."""
    zero = present[0]
    for other in present[1:]:
        if other.world_size != zero.world_size:
            raise UserError(
                f"{other.peer.shown} was started with WORLD_SIZE {other.world_size}, and {zero.peer.shown} with "
                f"{zero.world_size}; give all ranks the same",
                reach="world",
            )
        if other.job and zero.job and other.job != zero.job:
            raise UserError(
                f"{other.peer.shown} belongs to job '{other.job}', and {zero.peer.shown} to '{zero.job}'; "
                "give each job a MASTER_PORT of its own",
                reach="world",
            )
    if len({facts.network for facts in present}) == 1:
        return
    for facts in present:
        if facts.address and is_loopback(facts.address):
            raise UserError(
                f"{facts.peer.shown} would listen on {facts.address}, where other hosts do not reach it; name its "
                f"interface with --parallel.interface: {facts.peer.host} has {facts.interfaces}",
                reach="world",
            )


def _who_is_missing(world_size: int, present: list[_Facts]) -> str:
    came = sorted(facts.peer.rank for facts in present)
    missing = [rank for rank in range(world_size) if rank not in came]
    return (
        f"rank{'s' if len(missing) > 1 else ''} {_numbers(missing)} of {world_size} did not come in time "
        f"(parallel.timeout-s); {', '.join(facts.peer.shown for facts in present[:8])} did. Are they started, with "
        "this WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and does their output say more?"
    )


def _numbers(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown


def _refuse(board: _Board, error: PacelineError, nonces: list[str]) -> NoReturn:
    """Tells those who wait that there will be no world, and why."""
    for nonce in nonces:
        board.post(f"refusal/{nonce}", {"message": str(error), "is_user": isinstance(error, UserError)})
    raise error


# ---- every other rank ----


def _come(board: _Board, me: _Facts, deadline: float) -> tuple[str, list[Peer]]:
    """Says hello, acknowledges the answer, and returns the roster that rank 0 posts."""
    rank, began = me.peer.rank, time.monotonic()
    generation: str | None = None
    board.post(f"hello/{rank}", asdict(me))
    while True:
        _heed_refusal(board, me)
        _give_way(board, me, began)
        answer = board.read(f"answer/{me.nonce}")
        if answer != generation:  # the first, or that of a rank 0 which had to come anew
            generation = answer
            board.post(f"ack/{generation}/{rank}", asdict(me))
        roster = board.read("roster")
        if generation is not None and roster is not None and roster["generation"] == generation:
            board.remove(f"answer/{me.nonce}")
            return generation, [Peer(**peer) for peer in roster["peers"]]
        if time.monotonic() > deadline:
            board.remove(f"hello/{rank}")  # so that rank 0 does not count on this process
            raise RunError(_why_no_roster(me, generation))
        _pause(began)


def _why_no_roster(me: _Facts, generation: str | None) -> str:
    if generation is None:
        return (
            f"{me.peer.shown} reached the store, and rank 0 of {me.world_size} did not come in time "
            "(parallel.timeout-s); was it started, with the same MASTER_ADDR and MASTER_PORT?"
        )
    return f"{me.peer.shown} met rank 0, which still waits for other ranks (parallel.timeout-s); its output says which"


# ---- both ----


def _pause(began: float) -> None:
    """Between two looks at the board: short among ranks that start together, long while all wait for one."""
    time.sleep(min(0.1, 0.005 + 0.02 * (time.monotonic() - began)))


def _heed_refusal(board: _Board, me: _Facts) -> None:
    """Raises what another rank found wrong with this one, or with the world."""
    refusal = board.read(f"refusal/{me.nonce}")
    if refusal is not None:
        raise (UserError if refusal["is_user"] else RunError)(refusal["message"], reach="world")


def _give_way(board: _Board, me: _Facts, began: float) -> None:
    """Raises UserError where another living process is this rank: one that came later, or, once this one has waited
    in vain for a while, one that is in a complete world already."""
    rank = me.peer.rank
    latest = board.read_facts(f"hello/{rank}")
    other = latest.peer if latest is not None and latest.nonce != me.nonce else None
    if other is None and time.monotonic() - began > _SETTLED_S:
        roster = board.read("roster") or {"peers": []}
        peers = [Peer(**peer) for peer in roster["peers"]]
        other = next((peer for peer in peers if peer.rank == rank and peer.is_alive and peer.pid != me.peer.pid), None)
    if other is None:
        return
    error = UserError(
        f"two processes have come as rank {rank}: pid {me.peer.pid} on {me.peer.host}, pid {other.pid} on "
        f"{other.host}; start each rank once, and give each job a MASTER_PORT of its own",
        reach="rank",
    )
    zero = board.read_facts("hello/0")
    waiting = [facts.nonce for facts in (latest, zero) if facts is not None and facts.nonce != me.nonce]
    _refuse(board, error, waiting)


def _facts(env: Environment, interface: str, backend: str) -> _Facts:
    named = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return _Facts(
        nonce=secrets.token_hex(12),
        peer=_this_process(env),
        world_size=env.world_size,
        job=env.job,
        network=f"{_boot_id()} {_namespace('net')}",
        address=transfer_address(named) if backend == "gloo" else "",
        interfaces=interfaces_text(),
    )


def _this_process(env: Environment) -> Peer:
    return Peer(
        rank=env.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        local_rank=env.local_rank,
        boot_id=_boot_id(),
        born_ticks=_born_ticks(os.getpid()),
    )


def _boot_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot} {_namespace('pid')}"


def _namespace(kind: str) -> str:
    """Which namespace this process is in: containers of one machine share its boot, and neither pids nor loopback."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return socket.gethostname()


def _born_ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # starttime, proc(5)
    return 0


def _within(seconds: float, function: Callable[[], Joined]) -> Joined:
    """Returns what the function returns; raises TimeoutError where it takes longer. It runs in a thread: torch's store
    waits for ever on a link that is down, and Ctrl-C reaches a main thread that waits in Python."""
    outcome: queue.SimpleQueue[Joined | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(function())
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, name="join", daemon=True).start()
    try:
        result = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(result, BaseException):
        raise result
    return result
