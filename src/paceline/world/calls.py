"""A script's collective verbs, in call order, on this rank. The watchdog compares them between ranks: a rank that
evaluates alone, or leaves its loop early, would make the others wait for ever."""

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from paceline.base.errors import Reach, UserError

LEAVE = "leave"  # recorded where a rank's script ends
_KEPT = 8  # nearly all verbs wait for the others, so a rank is rarely more than one ahead
_LIBRARIES = (
    *(f"{Path(module).parent}{os.sep}" for module in (Path(__file__).parent, str(torch.__file__))),
    str(contextlib.__file__),  # calls a context manager of ours
    "<frozen ",  # runpy, which runs a script
)


class Calls:
    """This rank's calls; entries are (number, verb, place)."""

    def __init__(self) -> None:
        self.number = 0  # of the last call
        self._last: deque[tuple[int, str, str]] = deque(maxlen=_KEPT)
        self.replicas: weakref.WeakSet[Any] = weakref.WeakSet()  # alive, which depends on this rank's garbage collector
        self.num_replicas = 0  # made so far: the same number on all ranks
        self.has_lockstep = False  # one of them was fsdp, through whose model other replicas' losses may pass, too
        self.at_leaving: Callable[[], None] = lambda: None  # compares the replicas; collective
        self.reducing: object | None = None  # the replica whose gradients are being reduced

    def record(self, verb: str, owner: object | None = None) -> None:
        """Records a verb; each verb calls it first. owner: the replica whose verb it is. Raises UserError between the
        last backward of a step and its `finish`, where a rank without a micro-batch still has to send its gradients."""
        if self.reducing is not None and self.reducing is not owner and verb != LEAVE:
            raise mistake(
                f"{verb} was called between the last step.backward and step.finish, while gradients are on "
                "their way: call it after step.finish()"
            )
        self.number += 1
        self._last.append((self.number, verb, place()))

    def last(self) -> list[tuple[int, str, str]]:
        return list(self._last)


def caller() -> FrameType | None:
    """Returns the script's frame: the innermost that is neither in this package nor in torch."""
    frame = _outside(sys._getframe(1))
    if frame is None and threading.current_thread() is not threading.main_thread():
        # On GPUs autograd runs hooks in its own threads, while the script waits in backward.
        frame = _outside(frame_of(threading.main_thread().ident or 0))
    return frame


def frame_of(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread, by its ident; None if there is no such thread.

    Python 3.11 makes the frames' objects while it holds the lock of its list of threads. If that begins a garbage
    collection, whose finalizers let another thread run which ends or starts, both wait for ever: seen in a test, and
    https://github.com/python/cpython/issues/106883, mended in 3.12. So there is no collection meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def place() -> str:
    """Returns the script's current line, as `train.py:31`."""
    frame = caller()
    return "the end of its script" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def mistake(text: str, reach: Reach = "host") -> UserError:
    """Returns the error for a mistake in a script; its message begins with the script's current line."""
    return UserError(f"{place()}: {text}", reach)


def first_difference(calls: Sequence[Sequence[tuple[int, str, str]]]) -> tuple[int, dict[int, tuple[str, str]]] | None:
    """Returns (number, {rank: (verb, place)}) of the first call in which ranks differ, or None. calls: by rank."""
    by_number: dict[int, dict[int, tuple[str, str]]] = {}
    for rank, known in enumerate(calls):
        for number, verb, where in known:
            by_number.setdefault(number, {})[rank] = (verb, where)
    for number in sorted(by_number):
        if len({verb for verb, _ in by_number[number].values()}) > 1:
            return number, by_number[number]
    return None
