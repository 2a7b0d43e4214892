"""Ends a job that stands still, and says because of whom.

A rank that waits in a collective cannot know for what: for one that is stopped, whose host is gone, that sleeps in its
data. So each rank notes what it begins to do (`enter`, nearly for free), and two threads of its own, which run on while
the main thread waits in Gloo, put that into the world's store, once a beat:

    beat/RANK    JSON, a Note: a counter, section and step, the collective it waits in, its main thread's stack just now
    verdict      JSON, a Verdict: who holds up the world, as the rank found that was first to look for it

So the last word of a rank that cannot speak any more is known to the others. One thread, the line, speaks with the
store, where an answer may never come; the other, the judge, never waits for it. A rank without progress for
`timeout_s` asks who is to blame, and takes the first answer that there is:

    1. who is dead, or ended with an error                      (processes of this host; last words of all)
    2. the store, where it does not answer                      (its host is gone, or the way there)
    3. ranks whose counters stand still                         (stopped, or their host or link is gone)
    4. ranks that stand still and wait for nobody               (data, a disk, an endless loop)
    5. ranks that wait in another collective than most others   (their order is mixed up)
    6. nobody: all wait in the same one                         (the network between them)

A script's ranks also tell the last verbs that they called (`calls.py`). Where one called another verb than the rest,
nothing can come of waiting: that ends the job as soon as it is known, some beats after the first rank stands still.

A rank that comes on, however slowly, is never to blame; while one does, nothing is ended here. No clocks of two hosts
are compared: the age of a word is how long this rank, awake, has read it unchanged. What a process sleeps through,
stopped or together with its laptop, counts for nothing.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import IO, Literal, NoReturn

import psutil
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.base.errors import EXIT_FAILED, PacelineError
from paceline.world.calls import LEAVE, Calls, first_difference
from paceline.world.join import Peer

_FRAMES = 12  # of a stack: from a kernel to the training loop
_SHOWN = 4  # ranks to blame that a message describes; with a host 8 of them may be gone at once
_BEAT_S = 1.0  # or a tenth of the timeout, where that is shorter
_LONGEST_GAP_S = 1.0
_LAST_WORDS_S = 0.5  # for what is said and written before the end
_LEAVE_S = 0.3  # for a rank to blame that is alive to write down its stacks before it is killed

State = Literal["runs", "lost", "failed", "done"]  # lost: it has noticed that others are


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a rank says about itself."""

    number: int  # of the beat
    state: State
    section: str
    step: int
    still_s: float  # since it last entered a section, or began or ended to wait
    waits_for: str | None  # the collective in which it waits
    stack: list[str]  # of its main thread, innermost first
    error: str  # with which it ended
    calls: list[tuple[int, str, str]]  # a script's last verbs

    @property
    def where(self) -> str:
        """What the rank was doing, for people."""
        place = f"{self.section} of step {self.step}" if self.step else self.section
        return f"{place}, waiting in {self.waits_for}" if self.waits_for else place


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the job ends."""

    message: str
    culprits: tuple[int, ...]  # the ranks to blame; none: the store, or the network


@dataclass(frozen=True)
class _Heard:
    """The last word of a rank, and since when this rank knows it, in seconds awake."""

    note: Note
    since_s: float


class Watchdog:
    """Watches the thread that opens it, and through it the world, until it is closed.

    Cost: the store keeps 1.5 kB a rank and a beat; a rank without progress for three beats also reads what the
    others say, so that is ranks² x 1.5 kB a beat while all wait: 6 MB/s at 64.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        rank: int,
        store: Store | None,
        *,
        timeout_s: float,
        waiting_for: Callable[[], str | None],
        on_verdict: Callable[[Verdict], None],
        log: IO[str] | None = None,
        calls: Calls | None = None,
    ):
        """peers: all ranks in their order; store: the world's, None in a world of one, which can stand still as well.
        timeout_s: how long a rank may make no progress (inf: for ever); may be set at any time. waiting_for says
        in which collective the watched thread stands, if in one. calls: of a script, which may take its time: there
        only who waits for others counts as making no progress.

        From then to the end of all ranks it takes two seconds at most. In every rank that lives `log` gets the stacks
        of all threads, and on_verdict, in another thread, has half a second to say and write what there is; ranks to
        blame on this host are killed, for a stopped process hears no other signal; this one ends with status 1.
        """
        self.timeout_s = timeout_s
        self._me, self._peers = rank, peers
        self._waiting_for, self._on_verdict, self._log = waiting_for, on_verdict, log
        self._calls = calls
        self._clock = _AwakeClock()
        self._place = ("start", 0)
        self._seen: tuple[object, str | None, float] = (None, None, 0.0)  # by the judge: place, wait, since when
        self._state: State = "runs"
        self._error = ""
        self._thread = 0  # the watched one
        self._line = _Line(store, rank, len(peers), self._clock, self._note) if store is not None else None
        self._judge = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._over, self._ends = threading.Event(), threading.Lock()

    def __enter__(self) -> "Watchdog":
        self._thread = threading.get_ident()
        if self._line is not None:
            self._line.keep_time(self._beat_s)
            self._line.start()
        self._judge.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._state, self._error = _how_it_ended(error)
        if error is not None and self._line is not None:
            # Who ends by a verdict breaks the collectives of those who have not read it yet.
            self._line.listen(self._line.ask(), _LAST_WORDS_S)
            self._obey()
        self._over.set()
        self._judge.join(_LAST_WORDS_S)
        if self._line is not None:
            self._line.close()

    def enter(self, section: str, step: int) -> None:
        """Called by the watched thread where it comes to a section of a step (0: none). This is progress."""
        self._place = (section, step)  # a new tuple each time, which is how the judge sees that something moved

    def explain(self) -> str | None:
        """Returns who is missing, now that a collective of this rank has failed; None where nobody is known to be. Does
        not return where there is a verdict: this process ends by it.

        A rank that died on this host is known at once, another within 2.5 beats.
        """
        self._state = "lost"
        if self._line is None:
            return None
        deadline = time.monotonic() + 2.4 * self._beat_s
        asked_s = self._line.ask()
        self._line.listen(asked_s, 2.4 * self._beat_s)
        found: Verdict | None = None
        while found is None and time.monotonic() < deadline:
            self._obey()
            found = self._verdict(self._gone() or self._mixed_up())
            time.sleep(self._beat_s / 20)
        if found is None:
            found = self._verdict(self._who(1.9 * self._beat_s, 0.5 * self.timeout_s))
        return found.message if found else None

    @property
    def _beat_s(self) -> float:
        return min(_BEAT_S, self.timeout_s / 10)

    # ---- the judge ----

    def _watch(self) -> None:
        """Ends this process where it must end; returns when the watchdog is closed."""
        while not self._over.wait(self._beat_s / 4):
            now, place, wait = self._clock.now(), self._place, self._waiting_for()
            if place is not self._seen[0] or wait != self._seen[1]:
                self._seen = (place, wait, now)
            still_s = now - self._seen[2]
            if self._line is not None:
                self._line.keep_time(self._beat_s)
                self._line.listens = self._state != "runs" or still_s > 3 * self._beat_s
                self._obey()
            if self._line is not None and self._line.listens and self._calls is not None and wait is not None:
                self._end_if(self._mixed_up())
            is_judged = self._state == "runs" and (self._calls is None or wait is not None)
            if still_s > self.timeout_s and is_judged:
                # Half of it: what others do is known some beats late, and a rank that came on since is not to blame.
                self._end_if(self._who(0.5 * self.timeout_s, 0.5 * self.timeout_s))

    def _end_if(self, blame: "_Blame") -> None:
        found = self._verdict(blame)
        if found is not None:
            self._end(self._line.agree(found) if self._line is not None else found)

    def _obey(self) -> None:
        """Ends this process where a rank has put a verdict."""
        if self._line is not None and self._line.verdict is not None:
            self._end(self._line.verdict)

    def _end(self, verdict: Verdict) -> NoReturn:
        """Says why, kills who is to blame on this host, and ends this process."""
        self._ends.acquire()  # for good: of two threads that come here one says it

        def speak() -> None:
            if self._log is not None:
                faulthandler.dump_traceback(self._log)
            self._on_verdict(verdict)

        speaker = threading.Thread(target=speak, name="watchdog-verdict", daemon=True)
        speaker.start()  # a disk that hangs, or whatever else fails in telling: the job must end
        speaker.join(_LAST_WORDS_S)
        others = [self._peers[rank] for rank in verdict.culprits if rank != self._me]
        _kill([peer for peer in others if self._is_here(peer)])
        os._exit(EXIT_FAILED)

    # ---- who is to blame ----

    def _who(self, silent_s: float, still_s: float) -> "_Blame":
        """The first of the answers that there is; ranks are silent or stand still from so many seconds on."""
        return (
            self._gone()
            or self._mixed_up()
            or self._unanswered(silent_s)
            or self._silent(silent_s)
            or self._stuck(still_s)
            or self._elsewhere(still_s)
        )

    def _verdict(self, blame: "_Blame") -> Verdict | None:
        if not blame:
            return None
        parts = [text for _, text in blame[:_SHOWN]]
        if len(blame) > _SHOWN:
            parts.append("and so it is with ranks " + ", ".join(str(rank) for rank, _ in blame[_SHOWN:]))
        parts.append(f"noticed by {self._peers[self._me].shown}, in {self._note().where}")
        return Verdict(message="\n".join(parts), culprits=tuple(rank for rank, _ in blame if rank is not None))

    def _gone(self) -> "_Blame":
        """Ranks that ended with an error, and processes of this host that are dead."""
        found: _Blame = []
        for peer in self._others():
            note = self._heard(peer.rank)
            if note and note.state == "failed":
                found.append((peer.rank, f"{peer.shown} ended with an error in {note.where}: {note.error}"))
            elif (note is None or note.state == "runs") and self._is_here(peer) and not peer.is_alive:
                found.append((peer.rank, f"{peer.shown} is gone{_last_seen(note)}"))
        return found

    def _mixed_up(self) -> "_Blame":
        """Where ranks of a script called different verbs: what each called. Nobody is killed for it: all end by it."""
        notes = dict(self._notes())
        found = first_difference([notes[rank].calls if rank in notes else [] for rank in range(len(self._peers))])
        if found is None:
            return []
        number, called = found
        told: _Blame = [(None, f"{self._peers[rank].shown} {_called(*call)}") for rank, call in called.items()]
        return [(None, f"ranks called different verbs, and would wait for each other for ever (call {number})"), *told]

    def _unanswered(self, silent_s: float) -> "_Blame":
        """The store, and who is stopped on this host: perhaps the rank that holds it."""
        if self._line is None or self._line.answers_within(silent_s):
            return []
        store = self._line.name_of_store
        found: _Blame = [(None, f"{store} does not answer: its process, its host or the way there is gone")]
        for peer in self._others():
            if self._is_here(peer) and _is_stopped(peer):
                found.append((peer.rank, f"{peer.shown} is stopped by a signal{_last_seen(self._heard(peer.rank))}"))
        return found

    def _silent(self, silent_s: float) -> "_Blame":
        """Ranks of which this one has for so long read nothing new."""
        if self._line is None or self._line.heard_s < 0:
            return []
        found: _Blame = []
        for peer in self._others():
            heard = self._line.heard.get(peer.rank)
            if heard is None:
                found.append((peer.rank, f"{peer.shown} has not begun"))
            elif heard.note.state == "runs" and (age_s := self._line.heard_s - heard.since_s) >= silent_s:
                stopped = " is stopped by a signal, and" if self._is_here(peer) and _is_stopped(peer) else ""
                text = f"{peer.shown}{stopped} has not answered for at least {age_s:.0f} s"
                found.append((peer.rank, text + _last_seen(heard.note)))
        return found

    def _stuck(self, still_s: float) -> "_Blame":
        return [
            (
                rank,
                f"{self._peers[rank].shown} has made no progress for {note.still_s:.0f} s{_last_seen(note, 'it is')}",
            )
            for rank, note in self._notes()
            if note.state == "runs" and note.waits_for is None and note.still_s >= still_s
        ]

    def _elsewhere(self, still_s: float) -> "_Blame":
        """Where all wait, those who wait in another collective than most; nobody's fault where all wait in the same."""
        notes = dict(self._notes())
        if any(note.state != "runs" or note.waits_for is None or note.still_s < still_s for note in notes.values()):
            return []  # somebody comes on, however slowly
        (most, count), *others = Counter(note.where for note in notes.values()).most_common()
        if not others:
            return [(None, f"all ranks stand still in {most}: the network between them fails, or is very slow")]
        has_majority = 2 * count > len(notes)
        told = [(rank, f"{self._peers[rank].shown} is in {note.where}") for rank, note in notes.items()]
        if not has_majority:
            return [(None, "ranks wait in different collectives"), *((None, text) for _, text in told)]
        return [(rank, f"{text}, and most ranks in {most}") for rank, text in told if notes[rank].where != most]

    # ---- what is known ----

    def _note(self, number: int = 0) -> Note:
        """This rank's word, now."""
        section, step = self._place
        calls = self._calls.last() if self._calls is not None else []
        if calls:
            section = " at ".join(calls[-1][1:])
        frames = list(_frames(sys._current_frames().get(self._thread)))
        # Collectives that torch begins by itself, as fully_shard does, tell nobody.
        is_in_torch = any("/torch/distributed/" in frame.f_code.co_filename for frame in frames[:3])
        return Note(
            number=number,
            state=self._state,
            section=section,
            step=step,
            still_s=round(self._clock.now() - self._seen[2], 3),
            waits_for=self._waiting_for() or ("a collective of torch's" if is_in_torch else None),
            stack=_shown(frames),
            error=self._error,
            calls=calls,
        )

    def _notes(self) -> Iterator[tuple[int, Note]]:
        for rank in range(len(self._peers)):
            note = self._note() if rank == self._me else self._heard(rank)
            if note is not None:
                yield rank, note

    def _heard(self, rank: int) -> Note | None:
        heard = self._line.heard.get(rank) if self._line is not None else None
        return heard.note if heard else None

    def _others(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.rank != self._me]

    def _is_here(self, peer: Peer) -> bool:
        """Whether it is known which process of this host it is: a number alone may be another's by now."""
        return peer.boot_id == self._peers[self._me].boot_id and peer.born_ticks > 0


_Blame = list[tuple[int | None, str]]  # rank (None: it is no rank's fault) and what is to be said


class _Line(threading.Thread):
    """A connection of its own to the store, in a thread of its own: nobody who asks here ever waits long."""

    def __init__(self, store: Store, me: int, num_ranks: int, clock: "_AwakeClock", word: Callable[[int], Note]):
        super().__init__(name="watchdog-line", daemon=True)
        self.heard: dict[int, _Heard] = {}  # by rank
        self.verdict: Verdict | None = None
        self.listens = False  # reads what the others say, too
        self.heard_s = -1.0  # when the last round began in which it did
        self.is_broken = False
        self.name_of_store = "the store"
        self._shared, self._me, self._num_ranks = store, me, num_ranks
        self._clock, self._word = clock, word
        self._beat_s = _BEAT_S
        self._answered_s = clock.now()
        self._closes = False
        self._proposed: Verdict | None = None
        self._hurry, self._agreed = threading.Event(), threading.Event()

    def answers_within(self, seconds: float) -> bool:
        """Whether the store has answered lately; a round of questions begins once a beat."""
        return not self.is_broken and self._clock.now() - self._answered_s < max(seconds, 2 * self._beat_s)

    def ask(self) -> float:
        """Has all ranks heard as soon as possible; `heard_s` is then at least the value returned."""
        now = self._clock.now()
        self.listens = True
        self._hurry.set()
        return now

    def listen(self, asked_s: float, most_s: float) -> None:
        """Returns when all that was said at a moment is known, or after `most_s`."""
        deadline = time.monotonic() + most_s
        while self.heard_s < asked_s and not self.is_broken and time.monotonic() < deadline:
            time.sleep(0.005)

    def agree(self, mine: Verdict) -> Verdict:
        """Puts a verdict, if nobody has. Returns the first rank's; this one's where no answer comes."""
        self._proposed = mine
        self._hurry.set()
        self._agreed.wait(_LAST_WORDS_S)
        return self.verdict or mine

    def keep_time(self, beat_s: float) -> None:
        """From here on a beat is so long."""
        if beat_s != self._beat_s:
            self._beat_s = beat_s
            self._hurry.set()

    def close(self) -> None:
        """Says a last word, and ends the thread, if the store answers in time."""
        self._closes = True
        self._hurry.set()
        self.join(_LAST_WORDS_S)

    def run(self) -> None:
        try:
            store = self._shared.clone()  # type: ignore[attr-defined]
            self.name_of_store = _address(store)
            number, closes = 0, False
            while not closes:
                closes = self._closes  # read first: what is said afterwards is the last word
                self._round(store, number)
                number += 1
                self._hurry.wait(0 if closes else self._beat_s)
                self._hurry.clear()
        except (RuntimeError, ValueError, TypeError, KeyError):  # its holder has ended; another program writes in it
            self.is_broken = True

    def _round(self, store: Store, number: int) -> None:
        began_s, listens = self._clock.now(), self.listens
        store.set(f"beat/{self._me}", json.dumps(asdict(self._word(number))))
        if self._proposed is not None:
            store.compare_set("verdict", "", json.dumps(asdict(self._proposed)))
        if self.verdict is None and store.check(["verdict"]):
            found = json.loads(store.get("verdict"))
            self.verdict = Verdict(message=found["message"], culprits=tuple(found["culprits"]))
            self._agreed.set()
        if listens:
            self._hear(store, began_s)
            self.heard_s = began_s
        self._answered_s = self._clock.now()

    def _hear(self, store: Store, now: float) -> None:
        """Reads the last words of all others."""
        keys = {rank: f"beat/{rank}" for rank in range(self._num_ranks) if rank != self._me}
        there = [rank for rank, key in keys.items() if rank in self.heard or store.check([key])]
        for rank, text in zip(there, store.multi_get([keys[rank] for rank in there]), strict=True):
            note = Note(**json.loads(text))
            known = self.heard.get(rank)
            if known is None or known.note.number != note.number:
                self.heard[rank] = _Heard(note, now)


class _AwakeClock:
    """Seconds that this process was awake for: a longer gap between two looks than a thread that shares its processor
    ever waits was a sleep, stopped by a signal or with the whole machine, and does not count further."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last, self._awake_s = time.monotonic(), 0.0

    def now(self) -> float:
        """Returns the seconds so far; to be called a few times in each."""
        with self._lock:
            last, self._last = self._last, time.monotonic()
            self._awake_s += min(self._last - last, _LONGEST_GAP_S)
            return self._awake_s


def _called(verb: str, where: str) -> str:
    return f"came to {where}" if verb == LEAVE else f"called {verb} at {where}"


def _how_it_ended(error: BaseException | None) -> tuple[State, str]:
    if error is None:
        return "done", ""
    is_consequence = isinstance(error, PacelineError) and error.is_consequence
    text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}".rstrip(": ")
    return "lost" if is_consequence else "failed", text


def _is_stopped(peer: Peer) -> bool:
    """Whether a signal has stopped this process of this host."""
    with contextlib.suppress(psutil.Error):
        return peer.is_alive and psutil.Process(peer.pid).status() == psutil.STATUS_STOPPED
    return False


def _kill(peers: list[Peer]) -> None:
    """SIGKILL to those of these processes of this host that do not end by themselves at once."""
    deadline = time.monotonic() + _LEAVE_S
    while any(peer.is_alive for peer in peers) and time.monotonic() < deadline:
        time.sleep(0.02)
    for peer in peers:
        with contextlib.suppress(OSError):
            if peer.is_alive:
                os.kill(peer.pid, signal.SIGKILL)


def _last_seen(note: Note | None, words: str = "last heard of") -> str:
    """The end of a sentence about a rank: where it is or was, and its stack."""
    return "" if note is None else "\n    ".join([f"; {words} in {note.where}", *note.stack])


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a stack, innermost first; the outermost of a deep one are left out."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _shown(frames: Iterable[FrameType]) -> list[str]:
    """A stack for people, a frame a line."""
    return [
        f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
        for frame in frames
    ]


def _address(store: Store) -> str:
    """Names the store for people, by its host and port where it has them."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"the store at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store"
