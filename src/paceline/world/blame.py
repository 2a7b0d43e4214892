"""Finds who blocks a world, from what one rank knows. Pure: nothing here waits or asks the store.

Rank 0 judges for all, because it reads all beats. The others read those of rank 0 and of dead ranks of their host, and
judge only where rank 0 or the store is silent. The first answer that applies is used:

    1. ranks that are dead, or ended with an error              (by ranks of their host; by their last beats)
    2. scripts that called different verbs                      (none is killed: all end)
    3. the store, if it does not answer                         (its host or the link is gone)
    4. ranks whose beats have stopped                           (stopped, or their host or link is gone)
    5. ranks that stand still and wait for nobody               (data, a disk, an endless loop)
    6. ranks that wait in another collective than most others   (their order differs)
    7. nobody: all wait in the same one                         (the network between them)

A rank that still makes progress, however slowly, is never blamed. While there is one, 6 and 7 do not apply.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from paceline.base.units import listed
from paceline.world.beats import Beat
from paceline.world.calls import LEAVE, first_difference
from paceline.world.peer import Peer

Blame = list[tuple[int | None, str]]  # rank (None: no rank is at fault), message


@dataclass(frozen=True)
class Known:
    """What one rank knows of those whose beats it reads, and of itself."""

    peers: Sequence[Peer]
    me: int
    beats: Mapping[int, Beat]  # by rank, this one included; a rank that has not begun has none
    ages_s: Mapping[int, float]  # by other rank that it reads: how long its beat, or the lack of one, has not changed
    missing_store: str | None  # its name, if it does not answer
    beat_s: float

    @property
    def others(self) -> list[Peer]:
        return [self.peers[rank] for rank in sorted(self.ages_s)]

    @property
    def dead(self) -> set[int]:
        """Ranks whose processes are gone, by the beats of ranks of their hosts."""
        return {rank for beat in self.beats.values() for rank in beat.dead}

    def last_beat(self, rank: int) -> str:
        """Returns the end of a sentence about a silent rank, whose last beat may be older than its last step."""
        if rank not in self.beats:
            return ""
        return f"; last heard of up to {self.beat_s:g} s before that, in {self.beats[rank].where_with_stack}"


def is_here(peer: Peer, me: Peer) -> bool:
    """Whether it is another process of this host. A pid alone is not enough: pids are used again."""
    return peer.rank != me.rank and peer.boot_id == me.boot_id and peer.born_ticks > 0


def find_blame(known: Known, silent_s: float, still_s: float) -> Blame:
    """Returns the first answer. Ranks count as silent after silent_s, as standing still after still_s."""
    return (
        dead(known)
        or different_calls(known)
        or unreachable(known, silent_s)
        or _standing(known, still_s)
        or _in_different_collectives(known, still_s)
    )


def unreachable(known: Known, silent_s: float) -> Blame:
    """The store, if it does not answer; else ranks whose beat has not changed for silent_s."""
    return _store_missing(known) or _silent(known, silent_s)


def dead(known: Known) -> Blame:
    """Ranks that ended with an error, and those whose processes are gone, unless they left because of others."""
    blame: Blame = []
    for peer in known.peers:
        beat = known.beats.get(peer.rank)
        # Without a beat: it had not begun, or died with the store.
        may_have_left = beat.state != "runs" if beat else peer.rank not in known.ages_s and known.missing_store is None
        if beat and beat.state == "failed" and peer.rank != known.me:
            blame.append((peer.rank, f"{peer.shown} ended with an error in {beat.where}: {beat.error}"))
        elif peer.rank in known.dead and not may_have_left:
            blame.append((peer.rank, f"{peer.shown} is gone{known.last_beat(peer.rank)}"))
    return blame


def different_calls(known: Known) -> Blame:
    """Returns what each rank called, if ranks of a script called different verbs."""
    by_rank = [known.beats[rank].calls if rank in known.beats else [] for rank in range(len(known.peers))]
    difference = first_difference(by_rank)
    if difference is None:
        return []
    number, called = difference
    blame: Blame = [(None, f"ranks called different verbs, and would wait for each other for ever (call {number})")]
    ranks_of: dict[tuple[str, str], list[str]] = {}
    for rank, call in called.items():
        ranks_of.setdefault(call, []).append(known.peers[rank].shown)
    for (verb, where), ranks in sorted(ranks_of.items(), key=lambda item: len(item[1])):  # those that differ first
        what = f"came to {where}" if verb == LEAVE else f"called {verb} at {where}"
        blame.append((None, f"{listed(ranks)} {what}"))
    return blame


def _store_missing(known: Known) -> Blame:
    """The store, and the stopped processes of this host, one of which may hold the store."""
    if known.missing_store is None:
        return []
    blame: Blame = [(None, f"{known.missing_store} does not answer: its process, its host or the way there is gone")]
    stopped = [peer for peer in known.peers if is_here(peer, known.peers[known.me]) and _is_stopped(peer)]
    return blame + [(p.rank, f"{p.shown} is stopped by a signal{known.last_beat(p.rank)}") for p in stopped]


def _silent(known: Known, silent_s: float) -> Blame:
    """Ranks whose beat has not changed for silent_s."""
    blame: Blame = []
    for peer in known.others:
        age_s = known.ages_s[peer.rank]
        if age_s < silent_s:
            continue
        if peer.rank not in known.beats:
            blame.append((peer.rank, f"{peer.shown} has not begun"))
        elif known.beats[peer.rank].state == "runs":
            is_stopped = is_here(peer, known.peers[known.me]) and _is_stopped(peer)
            stopped = " is stopped by a signal, and" if is_stopped else ""
            text = f"{peer.shown}{stopped} has not answered for at least {age_s:.0f} s"
            blame.append((peer.rank, text + known.last_beat(peer.rank)))
    return blame


def _standing(known: Known, still_s: float) -> Blame:
    return [
        (
            rank,
            f"{known.peers[rank].shown} has made no progress for {beat.still_s:.0f} s; "
            f"it is in {beat.where_with_stack}",
        )
        for rank, beat in sorted(known.beats.items())
        if beat.state == "runs" and beat.waits_for is None and beat.still_s >= still_s
    ]


def _in_different_collectives(known: Known, still_s: float) -> Blame:
    """If all ranks wait: those in another collective than most; nobody if all wait in the same one."""
    beats = dict(sorted(known.beats.items()))
    if any(beat.state != "runs" or beat.waits_for is None or beat.still_s < still_s for beat in beats.values()):
        return []
    places = Counter(beat.where for beat in beats.values())
    (most, count), *rest = places.most_common()
    if not rest:
        return [(None, f"all ranks stand still in {most}: the network between them fails, or is very slow")]
    if 2 * count <= len(beats):
        blame: Blame = [(None, "ranks wait in different collectives")]
        for where in places:
            ranks = [known.peers[rank].shown for rank in beats if beats[rank].where == where]
            blame.append((None, f"{listed(ranks)} in {where}"))
        return blame
    return [
        (rank, f"{known.peers[rank].shown} is in {beat.where}, and most ranks in {most}")
        for rank, beat in beats.items()
        if beat.where != most
    ]


def _is_stopped(peer: Peer) -> bool:
    """Whether a signal has stopped this process of this host."""
    with contextlib.suppress(psutil.Error):
        return peer.is_alive and psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED
    return False
