"""Beats: about once a second each rank writes into the world's store what it is doing, so that the others know the last
state of a rank that hangs or is dead.

    beat/RANK    JSON, a Beat: a counter, section and step, the collective it waits in, its main thread's stack
    alarm        changes while a rank has lost the others or makes no progress: rank 0 reads all beats meanwhile
    verdict      JSON, a Verdict: who blocks the world. All ranks end by it
    missing      JSON, a Verdict: whom the ranks have lost whose collectives failed; without a message: unknown
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.base.clock import AwakeClock

ANSWER_S = 0.5  # how long a rank that ends waits for the store and the last output

State = Literal["runs", "lost", "failed", "done"]  # lost: it has lost the other ranks


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank is doing."""

    number: int  # counts beats
    state: State
    section: str
    step: int
    still_s: float  # since it last entered a section, or began or ended a wait
    waits_for: str | None  # the collective in which it waits
    stack: list[str]  # of its main thread, innermost first
    error: str  # its message, if it ended with one
    calls: list[tuple[int, str, str]]  # the last collective verbs of a script
    dead: list[int]  # ranks of its host whose processes are gone

    @property
    def where(self) -> str:
        place = f"{self.section} of step {self.step}" if self.step else self.section
        return f"{place}, waiting in {self.waits_for}" if self.waits_for else place

    @property
    def where_with_stack(self) -> str:
        """`where` with the stack below it."""
        return "\n    ".join([self.where, *self.stack])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the job ends, and who is to blame."""

    message: str
    culprits: tuple[int, ...]  # the ranks to blame; none: the store or the network is
    leaving: tuple[int, ...] = ()  # those of them that have failed, and end by themselves after their exit handlers

    def speaker(self, num_ranks: int) -> int:
        """Returns the rank that prints it for all: the first that is not to blame, or rank 0 if all are."""
        return min(set(range(num_ranks)) - set(self.culprits), default=0)


class BeatThread(threading.Thread):
    """Exchanges beats over its own connection to the store, so that no caller waits for the store."""

    def __init__(
        self,
        store: Store,
        rank: int,
        clock: AwakeClock,
        beat_s: Callable[[], float],
        own_beat: Callable[[int, bool], Beat],
        whom: Callable[[], Iterable[int]],
    ):
        """own_beat: makes the beat of a number; told whether others' are read after it. whom: the other ranks whose
        beats are read while this rank listens."""
        super().__init__(name="watchdog-beats", daemon=True)
        self.beats: dict[
            int, tuple[Beat | None, float]
        ] = {}  # by rank: its newest beat (None: none yet), first read at
        self.listens = False  # whether this rank itself has a reason to read the others' beats
        self.heard_s = -1.0  # when the last round began that read them
        self.dead: list[int] = []  # ranks of this host that were dead before they were last read
        self.posts: dict[str, Verdict] = {}  # by key: the verdicts that are known
        self.is_broken = False
        self.store_name = "the store"
        self._store, self._rank = store, rank
        self._clock, self._beat_s, self._own_beat, self._whom = clock, beat_s, own_beat, whom
        self._answered_s = clock.now()
        self._alarm = b""
        self._proposed: dict[str, Verdict] = {}
        self._closes = False
        self._hurry = threading.Event()

    def answers_within(self, seconds: float) -> bool:
        """Whether the store answered lately; a round begins once a beat."""
        return not self.is_broken and self._clock.now() - self._answered_s < max(seconds, 2 * self._beat_s())

    def listen(self, most_s: float) -> None:
        """Returns when all beats sent until now are read, or after `most_s`."""
        asked_s = self._clock.now()
        self.listens = True
        self._wait_for(lambda: self.heard_s >= asked_s, most_s)

    def agree(self, key: str, verdict: Verdict) -> Verdict:
        """Proposes a verdict. Returns the first that a rank has proposed; this one if the store does not answer."""
        self._proposed[key] = verdict
        self._wait_for(lambda: key in self.posts, ANSWER_S)
        return self.posts.setdefault(key, verdict)

    def close(self) -> None:
        """Sends a last beat if the store answers in time, and ends the thread."""
        self._closes = True
        self._hurry.set()
        self.join(ANSWER_S)

    def _wait_for(self, is_done: Callable[[], bool], most_s: float) -> None:
        deadline = time.monotonic() + most_s
        self._hurry.set()
        while not is_done() and not self.is_broken and time.monotonic() < deadline:
            time.sleep(0.005)

    def run(self) -> None:
        try:
            store = self._store.clone()  # type: ignore[attr-defined]
            self.store_name = _address(store)
            number, closes = 0, False
            while not closes:
                closes = self._closes  # read before the round that sends the last beat
                self._round(store, number)
                number += 1
                self._hurry.wait(0 if closes else self._beat_s())
                self._hurry.clear()
        except (RuntimeError, ValueError, TypeError, KeyError):  # the store is gone, or another program writes in it
            self.is_broken = True

    def _round(self, store: Store, number: int) -> None:
        began_s, listens = self._clock.now(), self.listens
        reads = listens or (self._rank == 0 and self._has_new_alarm(store))
        own_beat = self._own_beat(number, reads)
        store.set(f"beat/{self._rank}", json.dumps(asdict(own_beat)))
        if listens and self._rank:
            store.set("alarm", f"{self._rank} {number}")
        for key, verdict in list(self._proposed.items()):
            store.compare_set(key, "", json.dumps(asdict(verdict)))
        for key in ("verdict", "missing"):
            if key not in self.posts and store.check([key]):
                row = json.loads(store.get(key))
                self.posts[key] = Verdict(
                    message=row["message"], culprits=tuple(row["culprits"]), leaving=tuple(row["leaving"])
                )
        if reads:
            self._read_beats(store, began_s)
            self.dead = own_beat.dead
            self.heard_s = began_s
        self._answered_s = self._clock.now()

    def _has_new_alarm(self, store: Store) -> bool:
        before, self._alarm = self._alarm, store.get("alarm") if store.check(["alarm"]) else b""
        return self._alarm != before

    def _read_beats(self, store: Store, now_s: float) -> None:
        ranks = sorted(self._whom())
        begun = [rank for rank in ranks if self.beats.get(rank, (None, 0))[0] or store.check([f"beat/{rank}"])]
        for rank in set(ranks) - set(begun):
            self.beats.setdefault(rank, (None, now_s))
        for rank, text in zip(begun, store.multi_get([f"beat/{rank}" for rank in begun]), strict=True):
            beat = Beat(**json.loads(text))
            known = self.beats.get(rank, (None, 0.0))[0]
            if known is None or known.number != beat.number:
                self.beats[rank] = beat, now_s


def _address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"the store at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store"
