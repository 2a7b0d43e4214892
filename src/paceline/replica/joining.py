"""Joining the world from a script, and leaving it: at the end, by an exception, or by a signal."""

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, PacelineError
from paceline.base.process import EXIT_INTERRUPTED, has_launcher, record_status
from paceline.record.output import print_error
from paceline.world.calls import LEAVE, mistake
from paceline.world.config import ParallelConfig
from paceline.world.group import SPEAKS_FIRST_S, PeerLost
from paceline.world.rendezvous import tell_others
from paceline.world.runtime import World, open_world
from paceline.world.watchdog import Verdict, Watchdog

_EXIT = sys.exit
_EXIT_HANDLERS_S = 5.0
_OF_REPLICAS = ("strategy", "wire", "sync_every", "bucket_mb", "shares", "check_every", "step_timeout_s")


def join(config: ParallelConfig | None = None) -> World:
    """Returns this process's World: from torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE ...), from an open
    process group of torch.distributed, or of one process. Call it before making the model; a second call returns the
    same World.

    The world is left at the end of `with paceline.join() as world:`, by `world.leave()`, or when the script ends; a
    process group that was open before stays open. Then `join` may be called again.

    A watchdog ends ranks that have waited for each other for `config.timeout_s` seconds, or at once if they called
    different functions.

    An uncaught exception ends this rank at once, so that the others notice: UserError and RunError print one message,
    others a traceback. Exit status 2 for a UserError, else 1.

    Raises UserError for a wrong interface, device or port, a field that is a Replica's, or another config than in the
    first call; RunError if ranks do not meet.
    """
    current = _Membership.current
    if current is not None and current.world is not None:
        if config not in (None, current.config):
            raise mistake("this process has joined with another ParallelConfig; leave that world first")
        return current.world
    _Membership.current = membership = _Membership(config or ParallelConfig())
    try:
        return membership.enter()
    except BaseException:
        if not membership.is_rank():  # it may be called again, say with another config
            _Membership.current = None
        raise


def at_leaving(call: Callable[[], None]) -> None:
    """Calls `call` before the world is left, such as to wait for the last save."""
    if _Membership.current is not None:
        _Membership.current.before_leaving.append(call)


def at_failing(call: Callable[[BaseException], None]) -> None:
    """Calls `call` with the error that ends this rank. It makes no collective: the others may be anywhere."""
    if _Membership.current is not None:
        _Membership.current.before_failing.append(call)


def exit_status() -> Any:
    """Returns what the script gave to sys.exit, while it leaves the world; None if it came to its end."""
    return None if _Membership.current is None else _Membership.current.status


def at_hang(call: Callable[[Verdict], None]) -> None:
    """Calls `call`, in the watchdog's thread, before a hang ends this rank."""
    if _Membership.current is not None:
        _Membership.current.before_hang.append(call)


def run_script(words: Sequence[str]) -> int:
    """Runs a script with its arguments in this process, as `python SCRIPT ...` does, to the end of its exit handlers.
    Returns its exit status, which a launcher of ranks wants to be told."""
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).absolute().parent)
    status: Any = None
    try:
        _kept_until_exit = runpy.run_path(words[0], run_name="__main__")
    except SystemExit as left:
        status = left.code
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != words[0]:
            trace = trace.tb_next  # ours, and those of runpy; a syntax error has no others
        sys.excepthook(type(error), error.with_traceback(trace), trace)  # in a world it ends this process
        status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
    if (membership := _Membership.current) is not None and membership.world is not None:
        membership.status, membership.num_calls = status, membership.world.calls.number
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
    return status if isinstance(status, int) else EXIT_DONE if status is None else EXIT_FAILED


@dataclass
class _Membership:
    """This process in its world, from `join` until it leaves."""

    config: ParallelConfig
    open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    world: World | None = None
    watchdog: Watchdog | None = None
    before_leaving: list[Callable[[], None]] = field(default_factory=list)
    before_failing: list[Callable[[BaseException], None]] = field(default_factory=list)
    before_hang: list[Callable[[Verdict], None]] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)
    hook_before: Callable[..., object] = field(default_factory=lambda: _script_hook())
    status: Any = None  # given to sys.exit
    num_calls: int = -1  # made when it was

    current: ClassVar["_Membership | None"] = None  # one per process

    def enter(self) -> World:
        sys.excepthook, sys.exit = self.on_exception, self.exit
        self.config.check()
        default = ParallelConfig()
        if unread := [name for name in _OF_REPLICAS if getattr(self.config, name) != getattr(default, name)]:
            raise mistake(
                f"paceline.join was given {', '.join(unread)}, which has no effect there: give strategy, wire, "
                "sync_every and bucket_mb to paceline.Replica, shares to paceline.share; leave the others out"
            )
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # a child imports its parent's script
            raise mistake(
                "this is a worker process, which reads the script from its top: put what the script does "
                'beneath `if __name__ == "__main__":`'
            )
        self.world = world = self.open.enter_context(open_world(self.config))
        # init_process_group has wrapped the hook; its wrapper prints after the inner hook, which never returns.
        sys.excepthook = self.on_exception
        if world.world_size > 1:
            world.group.set_timeout(self.config.timeout_s + SPEAKS_FIRST_S)
            watchdog = Watchdog(world, timeout_s=self.config.timeout_s, on_verdict=self._on_verdict, calls=world.calls)
            self.watchdog = self.open.enter_context(watchdog)
        for warning in world.warnings:
            world.say(f"warning: {warning}")
        world.exits.append(self.leave)
        atexit.register(self.leave_at_exit)
        return world

    def is_rank(self) -> bool:
        """Whether there are other ranks, which notice an error when this process ends."""
        return "RANK" in os.environ or (self.world is not None and self.world.world_size > 1)

    def exit(self, status: Any = None, /) -> NoReturn:
        """Stands for sys.exit: Python tells nobody the status at exit."""
        if self.world is not None and threading.current_thread() is threading.main_thread():
            self.status, self.num_calls = status, self.world.calls.number
        raise SystemExit(status)

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the world after a last meeting of all ranks; the watchdog names a missing rank. With an error there is
        no collective, because the others may be anywhere; they notice when this rank ends. sys.exit() is no error."""
        if _Membership.current is not self or os.getpid() != self.process:  # already left, or a child of os.fork
            return
        assert self.world is not None
        if not isinstance(error, SystemExit | None):
            if not self.is_rank():  # the caller may catch it
                self._close(error)
            return
        was_caught = self.num_calls != self.world.calls.number
        self.status = error.code if error is not None else None if was_caught else self.status
        try:
            with contextlib.ExitStack() as calls:  # each is called, also if another fails
                for call in self.before_leaving:
                    calls.callback(call)
            if self.world.group.is_open:  # else the script has destroyed its process group
                self.world.calls.record(LEAVE)
                for replica in self.world.calls.replicas:
                    replica.wait_for_params()  # what the script reads afterwards
                self.world.calls.at_leaving()
                self.world.group.barrier()
        except BaseException as failure:
            if self.is_rank():
                self._show_traceback(failure)
                self.end(failure)
            self._close(failure)
            raise
        self._let_go()
        self.open.close()

    def leave_at_exit(self) -> None:
        """Runs at exit, where Python would print an exception and still exit with status 0."""
        try:
            self.leave()
        except BaseException as error:
            self._show_traceback(error)
            self.end(error, at_exit=True)

    def _close(self, error: BaseException) -> None:
        """Leaves a world of one after an error. Finishes a save under way."""
        self._tell_failure(error)
        for call in self.before_leaving if _Membership.current is self else ():
            with contextlib.suppress(Exception):
                call()
        self._let_go()
        with contextlib.suppress(BaseException):
            self.open.__exit__(type(error), error, None)

    def _tell_failure(self, error: BaseException) -> None:
        calls, self.before_failing = self.before_failing, []
        for call in calls:
            with contextlib.suppress(Exception):
                call(error)

    def _let_go(self) -> None:
        if _Membership.current is self:
            _Membership.current = None
        atexit.unregister(self.leave_at_exit)
        if sys.exit == self.exit:
            sys.exit = _EXIT
        if sys.excepthook == self.on_exception and self.is_rank():
            sys.excepthook = self.hook_before

    def on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self.process:
            self.hook_before(kind, error, trace)
            return
        self._show_traceback(error)
        self.end(error)

    def _show_traceback(self, error: BaseException) -> None:
        """Prints an error that is no message of ours."""
        if not isinstance(error, PacelineError | KeyboardInterrupt) or os.environ.get("PACELINE_DEBUG") == "1":
            self.hook_before(type(error), error, error.__traceback__)

    def end(self, error: BaseException, at_exit: bool = False) -> NoReturn:
        """Prints the message and ends this process without a collective. at_exit: other exit handlers have run."""
        status = error.exit_status if isinstance(error, PacelineError) else EXIT_FAILED
        status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else status
        told, culprits = self._explained(error)
        self._tell_failure(told)  # first: a launcher ends this rank soon
        is_consequence = isinstance(told, PacelineError) and told.is_consequence
        if not (is_consequence and has_launcher()):  # which knows who died, and prints it
            self._print(told, culprits)
        status = record_status(status, str(told) if is_consequence else None)
        if isinstance(error, PacelineError):
            tell_others(error)
        atexit.unregister(self.leave_at_exit)
        if not self.is_rank():  # one process ends normally: exit handlers run, files are written
            self._close(error)
            if not at_exit:
                _flush_files()
                raise SystemExit(status)
        with contextlib.suppress(BaseException):
            self.open.__exit__(type(error), error, None)
        if not at_exit:  # exit handlers of trackers may hang: they get some seconds
            handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
            with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread during exit
                handlers.start()
                handlers.join(_EXIT_HANDLERS_S)
        _flush_files()
        os._exit(status)

    def _explained(self, error: BaseException) -> tuple[BaseException, tuple[int, ...]]:
        """Returns the error, if it is of lost ranks with what is known of them, and whom it blames."""
        if not isinstance(error, PeerLost) or self.watchdog is None:
            return error, ()
        text, culprits = self.watchdog.explained(error)
        return type(error)(text, error.reach).with_traceback(error.__traceback__), culprits

    def _print(self, error: BaseException, culprits: tuple[int, ...]) -> None:
        """Prints a PacelineError as one message; other errors have printed their traceback."""
        if isinstance(error, PacelineError) and str(error) and self._speaks(error, culprits):
            with contextlib.suppress(OSError, ValueError):  # the reader is gone: `| head`
                speaker = f"rank {self.world.rank}: " if self.world and error.reach != "world" else ""
                print_error(f"{speaker}error: {error}")

    def _on_verdict(self, verdict: Verdict) -> None:
        assert self.world is not None
        for call in self.before_hang:
            with contextlib.suppress(OSError):
                call(verdict)
        if self.world.rank == verdict.speaker(self.world.world_size):
            print_error(f"error: {verdict.message}")
        record_status(EXIT_FAILED)

    def _speaks(self, error: PacelineError, culprits: tuple[int, ...]) -> bool:
        """Whether this rank prints the error. An error that all ranks see is printed by the first that is alive and not
        to blame; once ranks have met, an error of reach "host" may be seen by one rank only."""
        if self.world is None:
            return error.reach != "host" or os.environ.get("LOCAL_RANK", "0") == "0"
        return error.reach != "world" or self.world.is_first(culprits)


def _script_hook() -> Callable[..., object]:
    """Returns the sys.excepthook that is not ours."""
    owner = getattr(sys.excepthook, "__self__", None)
    return owner.hook_before if isinstance(owner, _Membership) else sys.excepthook


def _flush_files() -> None:
    """Flushes files that the script left open: os._exit does not."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.TextIOWrapper | io.BufferedWriter):
            with contextlib.suppress(Exception):
                thing.flush()
