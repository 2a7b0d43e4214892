"""The handshake by which ranks find each other, over a store that may hold keys of dead processes.

torchrun's agent keeps its store between attempts, and hosts count attempts differently. Ranks that trust old keys would
connect to dead processes. So a rank trusts only answers to its random nonce:

    hello/RANK              every rank: its facts, with a fresh nonce
    answer/NONCE            rank 0: its generation (its own nonce), for this hello only
    ack/GENERATION/RANK     the rank lives, and has heard rank 0 of this generation
    roster                  rank 0, when all have acknowledged: the generation and its ranks
    refusal/NONCE           why the process with this nonce cannot take part

A rank that has refused to train before, as for a wrong interface, has its problem in its hello: all are refused then.

A living process sees its hello overwritten if a second one comes as the same rank. All later keys, also those of the
process group, are prefixed with the generation. All values are JSON. No clock of another host is read.
"""

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.base.errors import PacelineError, RunError, UserError
from paceline.base.units import listed
from paceline.world.env import is_loopback
from paceline.world.peer import Peer

# For other processes to come, and to read why they are refused; a dead one never does. A rank that has printed its own
# problem has more time: the others may still prepare data.
REFUSE_S, TELL_S = 5.0, 30.0
_SETTLED_S = 5.0  # then keys of dead processes are gone, and an unanswered rank looks for a complete world


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rank posts about itself."""

    nonce: str
    peer: Peer
    world_size: int
    job: str
    network: str  # equal if loopback is the same
    address: str  # at which Gloo will listen, which carries small messages beside NCCL, too
    interfaces: str
    backend: str
    device: str
    gpu: str  # its UUID; empty: none
    versions: dict[str, str]  # of libraries that must be the same
    problem: str = ""  # why this rank will not train


class Board:
    """JSON values by name, readable by all ranks."""

    def __init__(self, store: Store):
        self._store = store

    def post(self, name: str, value: Any) -> None:
        self._store.set(name, json.dumps(value))

    def has(self, name: str) -> bool:
        return bool(self._store.check([name]))

    def read(self, name: str) -> Any:
        """Returns the value; None if there is none. Waits for it if another rank removes it meanwhile."""
        return json.loads(self._store.get(name)) if self.has(name) else None

    def read_facts(self, name: str) -> Facts | None:
        """Raises UserError for anything else, such as facts of another version or another program's value."""
        try:
            found = self.read(name)
            return None if found is None else Facts(**{**found, "peer": Peer(**found["peer"])})
        except (TypeError, ValueError, KeyError):
            raise UserError(
                f"the store holds '{name}' of another program or another version of this one; install the same version "
                "on all hosts, and give each job a MASTER_PORT of its own",
                reach="rank",
            ) from None

    def remove(self, name: str) -> None:
        self._store.delete_key(name)


# ---- rank 0 ----


def gather_ranks(board: Board, me: Facts, deadline: float) -> tuple[str, list[Peer]]:
    """Answers every hello until each rank has acknowledged; then posts the roster and returns it."""
    generation, began = me.nonce, time.monotonic()
    answered: dict[int, Facts] = {}  # the latest hello of each rank, perhaps of a dead process
    present: dict[int, Facts] = {0: me}  # ranks known to live
    board.post("hello/0", asdict(me))
    while len(present) < me.world_size:
        try:
            _raise_refusal(board, me)
            _refuse_second_process(board, me, began)
            # One rank more: one that was started with a larger WORLD_SIZE.
            for rank in range(1, me.world_size + 1):
                _answer(board, generation, rank, answered, present)
            if difference := _problem(present.values()) or _difference(list(present.values())):
                raise UserError(difference, reach="world")
            if time.monotonic() > deadline:
                raise RunError(_who_is_missing(me.world_size, list(present.values())), reach="world")
        except PacelineError as error:
            _refuse_all(board, error, me.world_size, TELL_S if me.problem else REFUSE_S)
            raise
        if len(present) < me.world_size:
            _pause(began)
    board.post("roster", {"generation": generation, "peers": [asdict(present[rank].peer) for rank in sorted(present)]})
    for rank in sorted(present)[1:]:
        board.remove(f"ack/{generation}/{rank}")
    return generation, [present[rank].peer for rank in sorted(present)]


def _answer(board: Board, generation: str, rank: int, answered: dict[int, Facts], present: dict[int, Facts]) -> None:
    """Reads what a rank has posted. If its hello is newer than the acknowledged one, that process is dead."""
    hello = board.read_facts(f"hello/{rank}")
    if hello is None:
        present.pop(rank, None)  # it gave up
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


def _problem(present: Iterable[Facts]) -> str:
    """What one of these ranks has found before it came; empty if there is nothing."""
    return next((f"{each.peer.shown} cannot train: {each.problem}" for each in present if each.problem), "")


def _difference(present: list[Facts]) -> str:
    """Why these living ranks cannot form one world; empty if they can."""
    zero = present[0]
    for other in present[1:]:
        if other.world_size != zero.world_size:
            return (
                f"{other.peer.shown} was started with WORLD_SIZE {other.world_size}, and {zero.peer.shown} with "
                f"{zero.world_size}; give all ranks the same"
            )
        if other.job and zero.job and other.job != zero.job:
            return (
                f"{other.peer.shown} belongs to job '{other.job}', and {zero.peer.shown} to '{zero.job}'; "
                "give each job a MASTER_PORT of its own"
            )
        for name, version in zero.versions.items():
            if other.versions[name] != version:
                return (
                    f"{other.peer.shown} has {name} {other.versions[name]}, and {zero.peer.shown} {name} {version}: "
                    "their results would differ. Install the same version on all hosts"
                )
        if other.backend != zero.backend:
            return (
                f"{other.peer.shown} computes on {other.device} and would communicate by {other.backend}, and "
                f"{zero.peer.shown} on {zero.device} by {zero.backend}: a host without a visible GPU takes gloo. Make "
                "the GPU visible there, or give all ranks --parallel.device cpu, or --parallel.backend gloo, with "
                "which CPUs and GPUs train together"
            )
    if len({facts.network for facts in present}) > 1:
        for facts in present:
            if is_loopback(facts.address):
                return (
                    f"{facts.peer.shown} would listen on {facts.address}, where other hosts do not reach it; name its "
                    f"interface with --parallel.interface: {facts.peer.host} has {facts.interfaces}"
                )
    return _shared_gpu(present)


def _shared_gpu(present: list[Facts]) -> str:
    by_gpu = {facts.gpu: facts.peer for facts in reversed(present)}
    for facts in present:
        if facts.gpu and by_gpu[facts.gpu] is not facts.peer:
            return (
                f"{by_gpu[facts.gpu].shown} and {facts.peer.shown} would compute on the same GPU, {facts.gpu}: show "
                "each task its own (srun --gpus-per-task 1), or all of them all GPUs and give each its LOCAL_RANK"
            )
    return ""


def _who_is_missing(world_size: int, present: list[Facts]) -> str:
    came = sorted(facts.peer.rank for facts in present)
    missing = [rank for rank in range(world_size) if rank not in came]
    return (
        f"rank{'s' if len(missing) > 1 else ''} {listed(missing, 16)} of {world_size} did not come in time "
        f"(parallel.timeout-s); {', '.join(facts.peer.shown for facts in present[:8])} did. Check that they were "
        "started with this WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and read their output"
    )


def _refuse(board: Board, error: PacelineError, nonces: list[str]) -> NoReturn:
    """Posts to the waiting processes why there will be no world, and raises it."""
    for nonce in nonces:
        _post_refusal(board, error, nonce)
    raise error


def _post_refusal(board: Board, error: PacelineError, nonce: str) -> None:
    board.post(f"refusal/{nonce}", {"message": str(error), "is_user": isinstance(error, UserError)})


def _refuse_all(board: Board, error: PacelineError, world_size: int, most_s: float) -> None:
    """Posts to every process that waits, or comes within `most_s`, why there will be no world. Returns when all ranks
    have read it, because the store may end with this process."""
    deadline, refused = time.monotonic() + most_s, set[str]()
    while time.monotonic() < deadline:
        for rank in range(1, world_size + 1):
            with contextlib.suppress(PacelineError):  # raised for another program's value
                hello = board.read_facts(f"hello/{rank}")
                if hello is not None and hello.nonce not in refused:
                    refused.add(hello.nonce)
                    _post_refusal(board, error, hello.nonce)
        if len(refused) >= world_size - 1 and not any(board.has(f"refusal/{nonce}") for nonce in refused):
            return
        time.sleep(0.02)


# ---- every other rank ----


def join_rank_0(board: Board, me: Facts, deadline: float) -> tuple[str, list[Peer]]:
    """Posts a hello, acknowledges the answer, and returns rank 0's roster."""
    rank, began = me.peer.rank, time.monotonic()
    generation: str | None = None
    board.post(f"hello/{rank}", asdict(me))
    while True:
        _raise_refusal(board, me)
        _refuse_second_process(board, me, began)
        answer = board.read(f"answer/{me.nonce}")
        if answer != generation:  # the first answer, or that of a restarted rank 0
            generation = answer
            board.post(f"ack/{generation}/{rank}", asdict(me))
        roster = board.read("roster")
        if generation is not None and roster is not None and roster["generation"] == generation:
            board.remove(f"answer/{me.nonce}")
            return generation, [Peer(**peer) for peer in roster["peers"]]
        if time.monotonic() > deadline:
            board.remove(f"hello/{rank}")  # so that rank 0 does not wait for this process
            raise RunError(_why_no_roster(me, generation))
        _pause(began)


def _why_no_roster(me: Facts, generation: str | None) -> str:
    if generation is None:
        return (
            f"{me.peer.shown} reached the store, and rank 0 of {me.world_size} did not come in time "
            "(parallel.timeout-s); was it started, with the same MASTER_ADDR and MASTER_PORT?"
        )
    return f"{me.peer.shown} met rank 0, which still waits for other ranks (parallel.timeout-s); its output says which"


# ---- both ----


def _pause(began: float) -> None:
    """Pauses between two looks: shortly at first, longer while all wait for one rank."""
    time.sleep(min(0.1, 0.005 + 0.02 * (time.monotonic() - began)))


def _raise_refusal(board: Board, me: Facts) -> None:
    """Raises the problem that another rank found with this one, or with the world."""
    refusal = board.read(f"refusal/{me.nonce}")
    if refusal is not None:
        board.remove(f"refusal/{me.nonce}")
        raise (UserError if refusal["is_user"] else RunError)(refusal["message"], reach="world")


def _refuse_second_process(board: Board, me: Facts, began: float) -> None:
    """Raises UserError if another living process is this rank: a newer one or, after 5 s, one in a complete world."""
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
