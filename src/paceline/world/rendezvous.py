"""Ranks find each other over a store that may hold keys of dead processes.

torchrun's agent keeps its store between attempts, and hosts count attempts differently. Ranks that trust old keys would
connect to dead processes. So a rank trusts only answers to its random nonce:

    hello/RANK      a rank's hello, with a fresh nonce; null: it has given up
    ask/NONCE       rank 0's nonce: it has read this hello
    ack/ZERO/NONCE  the rank lives, and has read that; "heard": it has read a refusal, too
    go/ZERO         the ranks of the world, or why there is none
    last            the nonce of the rank 0 that opened the newest world

A rank that has refused to train before, as for a wrong interface, says so in its hello, and all are refused. A process
whose hello is overwritten lives beside another one of its rank: it says that in its hello. Nothing is removed. All
values are JSON; all later keys, also those of the process group, are prefixed with rank 0's nonce.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.base.clock import within
from paceline.base.errors import PacelineError, RunError, UserError
from paceline.world.alike import Hello, difference, this_rank, two_processes, who_is_missing, why_no_answer
from paceline.world.env import Environment, detect
from paceline.world.peer import Peer
from paceline.world.store import open_store, post, read

_ROOT = "paceline"
# For other processes to come, and to read why they are refused; a dead one never does. A rank that has printed its own
# problem has more time: the others may still prepare data.
_REFUSE_S, _TELL_S = 5.0, 30.0
_SETTLED_S = 5.0  # a rank to which rank 0 has not answered looks for an open world
_LAST_WORD_S = 2.0  # the other ranks wait this much longer: rank 0 knows who is missing
_has_met = False  # this process has met the other ranks


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A complete world, as one rank sees it."""

    generation: str  # random; names this attempt
    peers: tuple[Peer, ...]  # by rank
    store: Store  # of this world only; open while somebody refers to it


def join_world(env: Environment, interface: str, backend: str, device: str, timeout_s: float) -> Joined:
    """Returns the world when all ranks have come.

    Raises UserError on all ranks if two processes come as one rank, if world sizes, jobs, versions or backends differ,
    or if other hosts cannot reach Gloo's address; RunError, naming the missing ranks, after `timeout_s`.
    """
    global _has_met
    deadline = time.monotonic() + timeout_s

    def join() -> Joined:
        store = open_store(env, interface, timeout_s)
        generation, peers = _meet(PrefixStore(_ROOT, store), this_rank(env, interface, backend, device), deadline)
        inner = PrefixStore(f"{_ROOT}/{generation}", store)
        return Joined(generation=generation, peers=tuple(peers), store=inner)

    where = f"{env.master_addr}:{env.master_port}"
    try:
        joined = within(timeout_s + 2 * _LAST_WORD_S + _REFUSE_S, join)
        _has_met = True
        return joined
    except TimeoutError:
        raise RunError(f"the store at {where} has not answered rank {env.rank} for {timeout_s:g} s") from None
    except RuntimeError as error:  # DistStoreError and DistNetworkError derive from it
        raise RunError(
            f"rank {env.rank} lost the store at {where} while it waited for the other ranks: rank 0, or the launcher "
            f"on its host, has ended ({str(error).strip().splitlines()[0]})"
        ) from error


def tell_others(error: PacelineError) -> None:
    """Tells the ranks of other hosts why this one will not train: they would wait for it. Returns when they have heard
    it, or after some seconds. Does nothing once the ranks have met, for errors that all of them see, and on one host,
    where the launcher ends all ranks."""
    with contextlib.suppress(PacelineError, RuntimeError, OSError, TimeoutError):
        env = detect()
        has_met = _has_met or dist.is_initialized()  # in a group that the script opened they have met, too
        if has_met or not isinstance(error, UserError) or error.reach == "world" or not env.spans_hosts:
            return

        def tell() -> None:
            store = PrefixStore(_ROOT, open_store(env, "", _TELL_S))
            _meet(store, this_rank(env, "", "", "cpu", problem=str(error)), time.monotonic() + _TELL_S, _TELL_S)

        within(_TELL_S + _REFUSE_S, tell)


def _meet(store: Store, me: Hello, deadline: float, refuse_s: float | None = None) -> tuple[str, list[Peer]]:
    """Returns the attempt's name and its processes, by rank. refuse_s: how long rank 0 tells others of a refusal."""
    post(store, f"hello/{me.peer.rank}", asdict(me))
    if me.peer.rank == 0:
        return _gather_ranks(store, me, deadline, _REFUSE_S if refuse_s is None else refuse_s)
    return _follow_rank_0(store, me, deadline + _LAST_WORD_S)


def _gather_ranks(store: Store, me: Hello, deadline: float, refuse_s: float) -> tuple[str, list[Peer]]:
    """Rank 0: asks every hello until each rank has acknowledged, or there is a reason to refuse all of them."""
    asked: dict[str, Hello] = {}  # by nonce
    for is_time_to_look_back in _looks():
        try:
            if problem := _second_process(store, me, is_time_to_look_back):
                post(store, "hello/0", asdict(replace(me, problem=problem)))  # for the other one
                raise UserError(problem, reach="world")
            present = [me, *_living(store, me, asked)]
            if problem := difference(present):
                raise UserError(problem, reach="world")
            if len(present) < me.world_size and time.monotonic() > deadline:
                raise RunError(who_is_missing(me.world_size, present), reach="world")
        except PacelineError as error:
            _refuse(store, me, asked, error, refuse_s)
            raise
        if len(present) == me.world_size:
            break
    peers = [hello.peer for hello in present]
    go = {"peers": [asdict(peer) for peer in peers], "nonces": [hello.nonce for hello in present]}
    post(store, f"go/{me.nonce}", go)
    post(store, "last", me.nonce)
    return me.nonce, peers


def _living(store: Store, me: Hello, asked: dict[str, Hello]) -> list[Hello]:
    """Asks every new hello; returns those whose processes have answered, by rank."""
    living = []
    for rank in range(1, me.world_size + 1):  # one rank more: one that was started with a larger WORLD_SIZE
        hello = _read_hello(store, rank)
        if hello is None:
            continue
        if hello.nonce not in asked:
            post(store, f"ask/{hello.nonce}", me.nonce)
        asked[hello.nonce] = hello
        if store.check([f"ack/{me.nonce}/{hello.nonce}"]):
            living.append(hello)
    return living


def _refuse(store: Store, me: Hello, asked: dict[str, Hello], error: PacelineError, most_s: float) -> None:
    """Rank 0 posts why there will be no world. Returns when all processes that live have read it, of all ranks, or
    after `most_s`: the store may end with this process."""
    post(store, f"go/{me.nonce}", {"error": str(error), "is_user": isinstance(error, UserError)})
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        with contextlib.suppress(PacelineError):  # raised for another program's value
            _living(store, me, asked)
        answers = {nonce: read(store, f"ack/{me.nonce}/{nonce}") for nonce in asked}
        heard = {asked[nonce].peer.rank for nonce, answer in answers.items() if answer == "heard"}
        if len(heard) >= me.world_size - 1 and "here" not in answers.values():
            return
        time.sleep(0.02)


def _follow_rank_0(store: Store, me: Hello, deadline: float) -> tuple[str, list[Peer]]:
    """Every other rank: acknowledges rank 0's question, and returns what it answers."""
    zero: str | None = None
    for is_time_to_look_back in _looks():
        if not me.problem and (problem := _second_process(store, me, is_time_to_look_back)):
            # For rank 0 and the other process. Rank 0 refuses all, unless it has opened the world already.
            me, deadline = replace(me, problem=problem), min(deadline, time.monotonic() + _REFUSE_S)
            post(store, f"hello/{me.peer.rank}", asdict(me))
        asked_by = read(store, f"ask/{me.nonce}")
        if asked_by != zero:  # the first question, or that of a restarted rank 0
            zero = asked_by
            post(store, f"ack/{zero}/{me.nonce}", "here")
        go = read(store, f"go/{zero}") if zero is not None else None
        if go is not None and "error" in go:
            post(store, f"ack/{zero}/{me.nonce}", "heard")
            raise (UserError if go["is_user"] else RunError)(go["error"], reach="world")
        if go is not None and me.nonce in go["nonces"]:
            assert zero is not None
            return zero, [Peer(**peer) for peer in go["peers"]]
        if go is not None:  # the world has opened with another process of this rank
            raise UserError(two_processes(me.peer, Peer(**go["peers"][me.peer.rank])), reach="rank")
        if time.monotonic() > deadline:
            if me.problem:
                raise UserError(me.problem, reach="rank")
            post(store, f"hello/{me.peer.rank}", None)  # so that rank 0 does not wait for this process
            raise RunError(why_no_answer(me, has_met_rank_0=zero is not None))
    raise AssertionError("a rank looks until it returns or raises")


def _second_process(store: Store, me: Hello, is_time_to_look_back: bool) -> str:
    """Returns the problem if another living process is this rank: one that came later or, looking back, one of the
    newest world; empty if there is none."""
    latest = _read_hello(store, me.peer.rank)
    if latest is not None and latest.nonce != me.nonce:
        return latest.problem or two_processes(me.peer, latest.peer)
    world = (read(store, f"go/{read(store, 'last')}") or {"peers": []}) if is_time_to_look_back else {"peers": []}
    for peer in (Peer(**row) for row in world["peers"]):
        if peer.rank == me.peer.rank and peer.is_alive and peer.pid != me.peer.pid:
            return two_processes(me.peer, peer)
    return ""


def _looks() -> Iterator[bool]:
    """Yields between pauses, short ones at first, longer while all wait for one rank: whether this is the first look
    after 5 s, when keys of dead processes count no more."""
    began, is_settled = time.monotonic(), False
    while True:
        waited_s = time.monotonic() - began
        yield waited_s > _SETTLED_S and not is_settled
        is_settled = waited_s > _SETTLED_S
        time.sleep(min(0.1, 0.005 + 0.02 * waited_s))


def _read_hello(store: Store, rank: int) -> Hello | None:
    """Raises UserError for anything else, such as a hello of another version or another program's value."""
    try:
        row: Any = read(store, f"hello/{rank}")
        return None if row is None else Hello(**{**row, "peer": Peer(**row["peer"])})
    except (TypeError, ValueError, KeyError):
        raise UserError(
            f"the store holds 'hello/{rank}' of another program or another version of this one; install the same "
            "version on all hosts, and give each job a MASTER_PORT of its own",
            reach="rank",
        ) from None
