"""The verbs of a script that all ranks must call alike, in the order in which this rank came to them.

A rank that evaluates alone, or leaves its loop early, does not fail: it waits for ever, and so do the others. Each rank
notes its last verbs with the line that called them; the watchdog holds them against those of other ranks.
"""

import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

from paceline.base.errors import UserError

LEAVE = "leave"  # noted where a rank's script ends
_KEPT = 8  # a rank is hardly ever more than one verb ahead: nearly all of them wait for the others
_LIBRARIES = tuple(str(Path(module).parent) for module in (Path(__file__).parent, str(torch.__file__)))


class Calls:
    """What one rank has called; entries are (number, verb, place)."""

    def __init__(self) -> None:
        self._number = 0
        self._last: deque[tuple[int, str, str]] = deque(maxlen=_KEPT)
        self.travelling: object | None = None  # the replica whose gradients are on their way

    def note(self, verb: str, owner: object | None = None) -> None:
        """Called first thing in a verb, of a replica by itself. 2 us. Raises UserError between the last backward of a
        step and the step: a rank that has no micro-batch sends its gradients in the step only, so there the others'
        gradients would meet this verb."""
        if self.travelling is not None and self.travelling is not owner and verb != LEAVE:
            raise UserError(
                f"{place()}: {verb} was called between replica.backward and replica.step, while gradients are on their "
                "way: call it after the step"
            )
        self._number += 1
        self._last.append((self._number, verb, place()))

    def last(self) -> list[tuple[int, str, str]]:
        """Returns the last calls, oldest first."""
        return list(self._last)


def caller() -> FrameType | None:
    """Returns the innermost frame that is neither in this package nor in torch: the script's."""
    frame = _outside(sys._getframe(1))
    if frame is None and threading.current_thread() is not threading.main_thread():
        # On GPUs autograd runs hooks in threads of its own, while the script waits for them in its backward.
        frame = _outside(sys._current_frames().get(threading.main_thread().ident or 0))
    return frame


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame


def place() -> str:
    """Returns the script's line that is being run, as `train.py:31`."""
    frame = caller()
    return "the end of its script" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def first_difference(
    calls: Sequence[Sequence[tuple[int, str, str]]],
) -> tuple[int, dict[int, tuple[str, str]]] | None:
    """Returns (number, {rank: (verb, place)}) of the first call that ranks made otherwise; None where what is known of
    them agrees. calls: by rank."""
    by_number: dict[int, dict[int, tuple[str, str]]] = {}
    for rank, known in enumerate(calls):
        for number, verb, where in known:
            by_number.setdefault(number, {})[rank] = (verb, where)
    for number in sorted(by_number):
        if len({verb for verb, _ in by_number[number].values()}) > 1:
            return number, by_number[number]
    return None
