"""Joining the world from a script, and leaving it on every way out: its last line, an exception, a signal."""

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar

from paceline.base.errors import EXIT_FAILED, PacelineError, UserError
from paceline.record.console import cry
from paceline.train.guard import SPEAKS_FIRST_S
from paceline.world.calls import LEAVE, place
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.group import PeerLost
from paceline.world.runtime import World, open_world
from paceline.world.watchdog import Verdict, Watchdog


def join(config: ParallelConfig | None = None) -> World:
    """Returns this process's World: that of torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE ...), or one process.
    Called once, before the model is made; the world is left when the script ends.

    `config.strategy` and what belongs to training steps are not read here. While ranks wait for each other a watchdog
    sees to it that they do not wait for ever: for `config.timeout_s` seconds, or, where they called different verbs,
    no longer than it takes to know.

    An exception that nobody catches ends this rank at once, which is how the others learn of it: a UserError or
    RunError as one message, any other with its traceback. Exit status 2 for a UserError, else 1.

    Raises UserError for what must be changed (no such interface, device, port), RunError where ranks do not meet.
    """
    if _Membership.current is not None:
        raise UserError("paceline.join() was called before in this process; pass its World on")
    config = config or ParallelConfig()
    config.check()
    _Membership.current = membership = _Membership()
    sys.excepthook = membership.on_exception
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # it imports the script that began it
        raise UserError(
            f"{place()}: this is a worker process, which reads the script from its top: put what the script does "
            'beneath `if __name__ == "__main__":`'
        )
    membership.world = world = membership.open.enter_context(open_world(config, detect()))
    sys.excepthook = membership.on_exception  # init_process_group has put its own around it, which would hold back
    if world.world_size > 1:  # what is printed until the hook returns, and this one never does
        world.group.set_timeout(config.timeout_s + SPEAKS_FIRST_S)
        membership.watchdog = membership.open.enter_context(_make_watchdog(world, config.timeout_s))
    for warning in world.warnings:
        world.say(f"warning: {warning}")
    atexit.register(membership.leave)
    return world


def at_leaving(call: Callable[[], None]) -> None:
    """Has something done when the script ends well, before the world is left: the last save is waited for."""
    if _Membership.current is not None:
        _Membership.current.before_leaving.append(call)


@dataclass
class _Membership:
    """This process's part in a world. Its life is the process's, as the process group's is."""

    open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    world: World | None = None
    watchdog: Watchdog | None = None
    before_leaving: list[Callable[[], None]] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)
    hook_before: Callable[..., object] = field(default_factory=lambda: sys.excepthook)  # the script's own, perhaps

    current: ClassVar["_Membership | None"] = None  # one a process

    def leave(self) -> None:
        """All ranks meet once more, and go. Who does not come is named."""
        if os.getpid() != self.process:  # a child of os.fork: it inherits the handler, and is no rank
            return
        assert self.world is not None
        try:
            for call in self.before_leaving:
                call()
            self.world.calls.note(LEAVE)
            self.world.group.barrier()
        except BaseException as error:
            self.end(error)
        self.open.close()

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In the place of sys.excepthook."""
        if os.getpid() != self.process:
            self.hook_before(kind, error, trace)
            return
        if not isinstance(error, PacelineError | KeyboardInterrupt) or os.environ.get("PACELINE_DEBUG") == "1":
            self.hook_before(kind, error, trace)
        self.end(error)

    def end(self, error: BaseException) -> None:
        """Says what is to be said and ends this process. No collective: the others may be anywhere."""
        status = error.exit_status if isinstance(error, PacelineError) else EXIT_FAILED
        status = 130 if isinstance(error, KeyboardInterrupt) else status
        text = str(error) if isinstance(error, PacelineError) else ""
        if isinstance(error, PeerLost) and self.watchdog is not None:
            text = f"{text}. {self.watchdog.explain() or ''}".rstrip(". ")
        if text and isinstance(error, PacelineError) and self._speaks(error):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more: `| head`
                own = f"rank {self.world.rank}: " if self.world and error.reach != "world" else ""
                cry(f"{own}error: {text}")
        with contextlib.suppress(BaseException):
            self.open.__exit__(type(error), error, None)
        _flush_files()
        os._exit(status)

    def _speaks(self, error: PacelineError) -> bool:
        """Whether this rank says it: what all see says the first of them that lives. Once ranks have met, what one of
        a host sees the others need not see."""
        if self.world is None:
            return error.reach != "host" or os.environ.get("LOCAL_RANK", "0") == "0"
        if error.reach != "world":
            return True
        host = self.world.peers[self.world.rank].host
        living = (peer.rank for peer in self.world.peers if peer.host != host or peer.is_alive)
        return self.world.rank == next(living, self.world.rank)


def _flush_files() -> None:
    """What the script wrote into files that it did not close: Python does so at an end of its own, and os._exit not."""
    for found in gc.get_objects():
        if issubclass(type(found), io.TextIOWrapper | io.BufferedWriter):
            with contextlib.suppress(Exception):
                found.flush()


def _make_watchdog(world: World, timeout_s: float) -> Watchdog:
    def tell(verdict: Verdict) -> None:
        speakers = [peer.rank for peer in world.peers if peer.rank not in verdict.culprits]
        if world.rank == min(speakers, default=world.rank):
            cry(f"error: {verdict.message}")

    return Watchdog(
        world.peers,
        world.rank,
        world.store,
        timeout_s=timeout_s,
        waiting_for=lambda: world.group.waiting_for,
        on_verdict=tell,
        calls=world.calls,
    )
