"""Ends a job that hangs, and names the rank to blame.

A rank that waits in a collective cannot know why: a peer may be stopped, hang in its data, or have lost its host. So
each rank records what it begins (`enter`), and two threads watch it; they run while the main thread waits in Gloo. One
exchanges beats through the store (beats.py), which may never answer; the other never waits for the store. If a rank
makes no progress for `timeout_s`, rank 0 finds out who is to blame (blame.py), and posts it for all. Where rank 0 or
the store is silent for so long, that is the answer, and each rank finds it by itself.

A script's ranks also send their last verbs (calls.py). If these differ, waiting is useless: the job ends some beats
after the first rank stands still.

Clocks of different hosts are not compared: a beat's age is how long this rank, awake, has read it unchanged.
"""

import contextlib
import faulthandler
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, NoReturn

from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.base.clock import AwakeClock
from paceline.base.errors import EXIT_FAILED, PacelineError
from paceline.world import blame
from paceline.world.beats import ANSWER_S, Beat, BeatThread, State
from paceline.world.beats import Verdict as Verdict
from paceline.world.calls import Calls, frame_of
from paceline.world.peer import Peer

if TYPE_CHECKING:
    from paceline.world.runtime import World

_FRAMES = 12  # of a stack: from a kernel to the training loop
_SHOWN = 4  # ranks that a message describes; a lost host may take 8
_BEAT_S = 1.0  # or a tenth of the timeout, if that is shorter
_RANKS_A_BEAT = 256  # a larger world beats more slowly, so that its store carries less than 1 MB/s
# In beats:
_STILL_BEATS = 3.0  # without progress: then others listen
_PATIENCE_BEATS = 2.4  # until rank 0 judges who is silent
_SILENT_BEATS = 1.9  # so that a beat has been missed
_MISSING_BEATS = (
    4.5  # until a rank that has lost others gives up rank 0's answer, which may begin to listen a beat late
)
_SPEAK_S = 3.0  # for a verdict to be in the log and the events: a busy disk took longer than 0.5
_LEAVE_S = 2.0  # for a living rank to write its stacks before it is killed; 0.3 was too short on a busy machine


class Watchdog:
    """Watches the thread that opens it, and so the world, until it is closed.

    Cost: 1.5 kB per rank and beat in the store. While a rank is without progress for three beats, rank 0 reads as much:
    0.8 MB/s at 256 ranks and more.
    """

    def __init__(
        self,
        world: "World",
        *,
        timeout_s: float,
        on_verdict: Callable[[Verdict], None],
        log: IO[str] | None = None,
        calls: Calls | None = None,
    ):
        """world: may be a world of one, which can also hang. timeout_s: how long a rank may make no progress (inf: for
        ever); may be changed at any time. calls: of a script, which may take its time: there only waiting for others
        in one and the same call counts as no progress.

        Then all ranks end within some seconds. In every living rank `log` gets the stacks of all threads, and
        on_verdict, in another thread, has three seconds. The ranks to blame on this host are killed, because a stopped
        process handles no other signal; this one exits with status 1.
        """
        self.timeout_s = timeout_s
        self._me, self._peers, self._group = world.rank, world.peers, world.group
        self._judges = self._me == 0
        self._on_verdict, self._log, self._calls = on_verdict, log, calls
        self._clock = AwakeClock()
        self._place = ("start", 0, 0)  # section, step, how many were entered
        self._seen: tuple[object, float] = (None, 0.0)  # what shows progress, and since when it is the same
        self._state: State = "runs"
        self._error = ""
        self._thread = 0  # the watched thread
        store = HashStore() if world.store is None else world.store
        self._beats = BeatThread(store, self._me, self._clock, self._beat_s, self._sent_beat, self._whom)
        self._lost_s: float | None = None  # on rank 0: since when a rank has lost others
        self._watching = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._closed, self._ending = threading.Event(), threading.Lock()

    def __enter__(self) -> "Watchdog":
        self._thread = threading.get_ident()
        self._beats.start()
        self._watching.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._state, self._error = _how_it_ended(error)
        if error is not None:  # a rank that a verdict ended broke the collectives of ranks that had not read it
            self._beats.listen(ANSWER_S)
            self._obey()
        self._closed.set()
        self._watching.join(ANSWER_S)
        self._beats.close()

    def enter(self, section: str, step: int) -> None:
        """Records progress: the watched thread enters a section of a step (0: none)."""
        self._place = (section, step, self._place[2] + 1)  # as one tuple, for the other thread

    def find_missing(self) -> Verdict | None:
        """Returns who is missing after a collective of this rank failed, as rank 0 has found it within some beats, or
        this rank, if rank 0 is missing; None if unknown. If the ranks have a verdict, this process ends by it."""
        self._state = "lost"
        deadline = time.monotonic() + _MISSING_BEATS * self._beat_s()
        self._beats.listen(_PATIENCE_BEATS * self._beat_s())
        while time.monotonic() < deadline:
            self._obey()
            if (missing := self._beats.posts.get("missing")) is not None:
                return missing if missing.message else None
            silent_s = _SILENT_BEATS * self._beat_s()
            known = self._known(silent_s)
            if not self._judges and (known_blame := blame.dead(known) or blame.unreachable(known, silent_s)):
                return self._verdict(known_blame)
            time.sleep(self._beat_s() / 20)
        return None

    def explained(self, error: PacelineError) -> tuple[str, tuple[int, ...]]:
        """Returns the text of an error of lost ranks, with what `find_missing` knows of them, and whom it blames. Ask
        after it which ranks are alive: a killed process closes its connections a moment before it counts as dead."""
        missing = self.find_missing()
        return (f"{error}. {missing.message}", missing.culprits) if missing else (str(error), ())

    def _beat_s(self) -> float:
        return min(_BEAT_S * max(1.0, len(self._peers) / _RANKS_A_BEAT), self.timeout_s / 10)

    def _watch(self) -> None:
        """Ends this process if it must end; returns when the watchdog is closed."""
        while not self._closed.wait(min(self._beat_s(), _BEAT_S) / 4):  # also where beats are rarer: for the clock
            now = self._clock.now()
            progress = (self._place, self._calls and self._calls.number, self._group.waiting_for)
            if progress != self._seen[0]:
                self._seen = (progress, now)
            self._beats.listens = self._state != "runs" or now - self._seen[1] > _STILL_BEATS * self._beat_s()
            self._obey()
            if self._judges:
                self._judge()
            elif self._is_out_of_time(self._state, self._group.waiting_for, self._still_s()):
                limit_s = 0.5 * self.timeout_s
                self._end_if(blame.unreachable(self._known(limit_s), limit_s))

    def _judge(self) -> None:
        """Rank 0 looks for all, while it reads the beats of all."""
        if not self._listens_now():
            return
        limit_s = 0.5 * self.timeout_s
        known = self._known(limit_s)
        running = [beat for beat in known.beats.values() if beat.state == "runs"]
        if any(beat.state == "lost" for beat in known.beats.values()):
            self._answer_lost(known)
        # A dead rank's collectives fail, but not under NCCL, nor while a child of it holds its connections.
        elif any(beat.waits_for and beat.still_s > _STILL_BEATS * self._beat_s() for beat in running):
            self._end_if(blame.dead(known) or blame.different_calls(known))
        if any(self._is_out_of_time(beat.state, beat.waits_for, beat.still_s) for beat in running):
            # Half the limit: news of others is some beats late, and a rank that resumed meanwhile is not to blame.
            self._end_if(blame.find_blame(known, limit_s, limit_s))

    def _answer_lost(self, known: blame.Known) -> None:
        """Posts who is missing, for ranks whose collectives failed: a dead rank at once, a silent one later."""
        if self._lost_s is None:
            self._lost_s = self._clock.now()
        known_blame = blame.dead(known) or blame.different_calls(known)
        if not known_blame and self._clock.now() - self._lost_s > _PATIENCE_BEATS * self._beat_s():
            silent_s = _SILENT_BEATS * self._beat_s()
            known_blame = blame.find_blame(self._known(silent_s), silent_s, 0.5 * self.timeout_s)
        elif not known_blame:
            return
        if "missing" not in self._beats.posts:
            self._beats.agree("missing", self._verdict(known_blame) or Verdict(message="", culprits=()))

    def _still_s(self) -> float:
        return round(self._clock.now() - self._seen[1], 3)

    def _is_out_of_time(self, state: State, waits_for: str | None, still_s: float) -> bool:
        """Whether a rank should have made progress. A script may take its time, except where it waits for others."""
        is_watched = state == "runs" and (self._calls is None or waits_for is not None)
        return is_watched and still_s > self.timeout_s

    def _listens_now(self) -> bool:
        return self._beats.listens or self._clock.now() - self._beats.heard_s < 2 * self._beat_s()

    def _whom(self) -> set[int]:
        """Returns the ranks whose beats this rank reads."""
        return set(range(1, len(self._peers))) if self._judges else {0, *self._dead_here()}

    def _dead_here(self) -> list[int]:
        me = self._peers[self._me]
        return [peer.rank for peer in self._peers if blame.is_here(peer, me) and not peer.is_alive]

    def _known(self, store_s: float) -> blame.Known:
        """Returns what is known now. The store counts as missing after `store_s` without an answer."""
        heard = dict(self._beats.beats)
        # Not those that are dead now, while the store answers: the last beat of who has just ended is still to be read.
        own_beat = self._beat(dead=self._dead_here() if self._beats.is_broken else self._beats.dead)
        return blame.Known(
            peers=self._peers,
            me=self._me,
            beats={**{rank: beat for rank, (beat, _) in heard.items() if beat}, self._me: own_beat},
            ages_s={rank: self._beats.heard_s - since_s for rank, (_, since_s) in heard.items()},
            missing_store=None if self._beats.answers_within(store_s) else self._beats.store_name,
            beat_s=self._beat_s(),
        )

    def _sent_beat(self, number: int, listens: bool) -> Beat:
        return self._beat(number, self._dead_here() if listens else [])

    def _beat(self, number: int = 0, dead: Sequence[int] = ()) -> Beat:
        section, step, _ = self._place
        calls = self._calls.last() if self._calls is not None else []
        if calls:
            section = " at ".join(calls[-1][1:])
        frames = _frames(frame_of(self._thread))
        # No Group runs the collectives that torch begins itself, as in fully_shard.
        is_in_torch = any("/torch/distributed/" in frame.f_code.co_filename for frame in frames[:3])
        return Beat(
            number=number,
            state=self._state,
            section=section,
            step=step,
            still_s=self._still_s(),
            waits_for=self._group.waiting_for or ("a collective of torch's" if is_in_torch else None),
            stack=[
                f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
                for frame in frames
            ],
            error=self._error,
            calls=calls,
            dead=list(dead),
        )

    def _verdict(self, blamed: blame.Blame) -> Verdict | None:
        if not blamed:
            return None
        parts = [text for _, text in blamed[:_SHOWN]]
        if more := [str(rank) for rank, _ in blamed[_SHOWN:] if rank is not None]:
            parts.append(f"and ranks {', '.join(more)}")
        parts.append(f"noticed by {self._peers[self._me].shown}, in {self._beat().where}")
        culprits = tuple(rank for rank, _ in blamed if rank is not None)
        beats = {rank: beat for rank, (beat, _) in dict(self._beats.beats).items()}
        leaving = tuple(rank for rank in culprits if (beat := beats.get(rank)) and beat.state != "runs")
        return Verdict(message="\n".join(parts), culprits=culprits, leaving=leaving)

    def _end_if(self, blamed: blame.Blame) -> None:
        if verdict := self._verdict(blamed):
            self._end(self._beats.agree("verdict", verdict))

    def _obey(self) -> None:
        if (verdict := self._beats.posts.get("verdict")) is not None:
            self._end(verdict)

    def _end(self, verdict: Verdict) -> NoReturn:
        self._ending.acquire()  # never released: only one thread continues

        def speak() -> None:
            if self._log is not None:
                faulthandler.dump_traceback(self._log)
            self._on_verdict(verdict)

        speaker = threading.Thread(target=speak, name="watchdog-verdict", daemon=True)
        try:
            speaker.start()  # the job must also end if a disk hangs, or the report fails
            speaker.join(_SPEAK_S)
        except RuntimeError:  # Python 3.12 starts no thread at its exit
            speak()
        hanging = [self._peers[rank] for rank in verdict.culprits if rank not in verdict.leaving]
        _kill([peer for peer in hanging if blame.is_here(peer, self._peers[self._me])])
        os._exit(EXIT_FAILED)


def _how_it_ended(error: BaseException | None) -> tuple[State, str]:
    if error is None:
        return "done", ""
    if isinstance(error, PacelineError):
        return "lost" if error.is_consequence else "failed", str(error)
    return "failed", f"{type(error).__name__}: {error}".rstrip(": ")


def _frames(frame: FrameType | None) -> list[FrameType]:
    walked = () if frame is None else traceback.walk_stack(frame)
    return [outer for outer, _ in itertools.islice(walked, _FRAMES)]


def _kill(peers: list[Peer]) -> None:
    """Kills those of these processes of this host that do not end by themselves at once."""
    deadline = time.monotonic() + _LEAVE_S
    while any(peer.is_alive for peer in peers) and time.monotonic() < deadline:
        time.sleep(0.02)
    for peer in peers:
        with contextlib.suppress(OSError):
            if peer.is_alive:
                os.kill(peer.pid, signal.SIGKILL)
