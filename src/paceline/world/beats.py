"""Beats: about once a second each rank writes into the world's store what it is doing, and reads the others' beats.

    beat/RANK    JSON, a Beat: a counter, section and step, the collective it waits in, its main thread's stack
    verdict      JSON, a Verdict: who blocks the world, as found by the first rank that looked

So the others know the last state of a rank that hangs or is dead.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

ANSWER_S = 0.5  # how long a rank that ends waits for the store and the last output
_LONGEST_GAP_S = 1.0

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

    def speaker(self, num_ranks: int) -> int:
        """Returns the rank that prints it for all: the first that is not to blame, or rank 0 if all are."""
        return min(set(range(num_ranks)) - set(self.culprits), default=0)


class AwakeClock:
    """Counts the seconds that this process was awake. If two looks are further apart than a thread ever waits for its
    core, the process was stopped or the machine slept: at most one second of the gap counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last, self._awake_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Returns the seconds so far. Call it several times a second."""
        with self._lock:
            last, self._last = self._last, time.monotonic()
            self._awake_s += min(self._last - last, _LONGEST_GAP_S)
            return self._awake_s


class BeatThread(threading.Thread):
    """Exchanges beats over its own connection to the store, so that no caller waits for the store."""

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        clock: AwakeClock,
        beat_s: Callable[[], float],
        own_beat: Callable[[int], Beat],
    ):
        super().__init__(name="watchdog-beats", daemon=True)
        self.beats: dict[int, tuple[Beat, float]] = {}  # by other rank: its newest beat, when first read
        self.verdict: Verdict | None = None
        self.listens = False  # whether rounds read the others' beats
        self.heard_s = -1.0  # when the last such round began
        self.is_broken = False
        self.store_name = "the store"
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._clock, self._beat_s, self._own_beat = clock, beat_s, own_beat
        self._answered_s = clock.now()
        self._closes = False
        self._proposed: Verdict | None = None
        self._hurry, self._agreed = threading.Event(), threading.Event()

    def answers_within(self, seconds: float) -> bool:
        """Whether the store answered lately; a round begins once a beat."""
        return not self.is_broken and self._clock.now() - self._answered_s < max(seconds, 2 * self._beat_s())

    def listen(self, most_s: float) -> None:
        """Returns when all beats sent until now are read, or after `most_s`."""
        asked_s, deadline = self._clock.now(), time.monotonic() + most_s
        self.listens = True
        self._hurry.set()
        while self.heard_s < asked_s and not self.is_broken and time.monotonic() < deadline:
            time.sleep(0.005)

    def agree(self, mine: Verdict) -> Verdict:
        """Proposes a verdict. Returns the first proposed one; `mine` if the store does not answer."""
        self._proposed = mine
        self._hurry.set()
        self._agreed.wait(ANSWER_S)
        return self.verdict or mine

    def close(self) -> None:
        """Sends a last beat if the store answers in time, and ends the thread."""
        self._closes = True
        self._hurry.set()
        self.join(ANSWER_S)

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
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._own_beat(number))))
        if self._proposed is not None:
            store.compare_set("verdict", "", json.dumps(asdict(self._proposed)))
        if self.verdict is None and store.check(["verdict"]):
            found = json.loads(store.get("verdict"))
            self.verdict = Verdict(message=found["message"], culprits=tuple(found["culprits"]))
            self._agreed.set()
        if listens:
            self._read_beats(store, began_s)
            self.heard_s = began_s
        self._answered_s = self._clock.now()

    def _read_beats(self, store: Store, now_s: float) -> None:
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        begun = [rank for rank in others if rank in self.beats or store.check([f"beat/{rank}"])]
        for rank, text in zip(begun, store.multi_get([f"beat/{rank}" for rank in begun]), strict=True):
            beat = Beat(**json.loads(text))
            if rank not in self.beats or self.beats[rank][0].number != beat.number:
                self.beats[rank] = beat, now_s


def _address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"the store at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store"
