"""Injected faults: a rank dies, hangs or computes wrongly at a chosen moment. Off unless PACELINE_FAULTS is set.

    PACELINE_FAULTS="rank=1 step=7 phase=backward kind=kill"
    PACELINE_FAULTS="rank=2 step=5 kind=stop; rank=0 step=20 phase=save.write kind=full"

`;` separates faults. They are of rank 0, step 1 and phase data if nothing else is given. A fault occurs once
(`times=50`: once in each of 50 consecutive steps), in the first attempt (`attempt=0`), in the third (`attempt=2`) or in
each (`attempt=any`). `mark=PATH` names a file that is made just before, for whoever waits for the fault.

kind      what happens when the rank reaches that phase of that step
kill      SIGKILL to itself, as by a power cut or the kernel's out-of-memory killer
launcher  SIGKILL to its parent process, and so to all its ranks
stop      SIGSTOP to itself: the process lives and does not answer
sleep     a pause of `seconds=0.3`; with `times` it makes a slow rank
raise     an unexpected exception
full      OSError "no space left on device", where a file is written
nan       the caller puts NaN into one gradient            (phase backward)
flip      the caller flips the lowest bit of one weight    (phase publish)
flip-state  the caller flips one bit of the optimizer state, between two steps    (phase check)
"""

import contextlib
import errno
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import UserError, nearest

VARIABLE = "PACELINE_FAULTS"
STEP_PHASES = ("data", "forward", "backward", "reduce", "exchange", "update", "publish")
SAVE_PHASES = ("save.copy", "save.write", "save.sync", "save.verify", "save.manifest", "save.rename", "save.prune")
PHASES = (*STEP_PHASES, "evaluate", "check", *SAVE_PHASES, "restore")
KINDS = ("kill", "launcher", "stop", "sleep", "raise", "full", "nan", "flip", "flip-state")
_ONLY_AT = {"nan": "backward", "flip": "publish", "flip-state": "check"}  # kinds that the caller causes
_FIELDS = ("rank", "step", "phase", "kind", "attempt", "seconds", "times", "mark")


@dataclass
class Fault:
    rank: int
    step: int
    phase: str
    kind: str
    seconds: float
    times: int = 1
    mark: str = ""
    last_struck: int = 0  # the step


class Injected(Exception):
    """The exception of the kind `raise`."""


_pending: list[Fault] = []


def install(rank: int, world_size: int, attempt: int, text: str | None = None) -> list[Fault]:
    """Sets this rank's faults from PACELINE_FAULTS (or `text`) and returns them. Raises UserError for invalid text."""
    specification = os.environ.get(VARIABLE, "") if text is None else text
    faults = [_read(part, world_size, attempt) for part in specification.split(";") if part.strip()]
    _pending[:] = [fault for fault in faults if fault is not None and fault.rank == rank]
    return list(_pending)


def strike(phase: str, step: int) -> str | None:
    """Causes the fault due at a phase of a step (from 1). Returns its kind if the caller must cause it, else None."""
    caused = None
    for fault in _pending:
        is_due = fault.step <= step < fault.step + fault.times and step > fault.last_struck
        if is_due and fault.phase == phase:
            fault.last_struck = step
            caused = _do(fault) or caused
    return caused


def _do(fault: Fault) -> str | None:
    if fault.mark:
        Path(fault.mark).touch()
    if fault.kind in ("kill", "stop", "launcher"):
        number = signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL
        os.kill(os.getppid() if fault.kind == "launcher" else os.getpid(), number)
    elif fault.kind == "sleep":
        time.sleep(fault.seconds)
    elif fault.kind == "raise":
        raise Injected(f"an injected fault: {fault.phase} of step {fault.step}")
    elif fault.kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        return fault.kind
    return None


def _read(part: str, world_size: int, attempt: int) -> Fault | None:
    settings: dict[str, str] = {}
    for word in part.split():
        name, _, value = word.partition("=")
        if name not in _FIELDS or not value:
            raise UserError(
                f"{VARIABLE}: '{word}'{nearest(name, _FIELDS)} is not NAME=VALUE; the names are {', '.join(_FIELDS)}"
            )
        settings[name] = value
    kind = settings.get("kind", "kill")
    phase = settings.get("phase") or _ONLY_AT.get(kind) or "data"
    for name, value, known in (("phase", phase, PHASES), ("kind", kind, KINDS)):
        if value not in known:
            raise UserError(f"{VARIABLE}: no {name} '{value}'{nearest(value, known)}; there are {', '.join(known)}")
    if phase != _ONLY_AT.get(kind, phase):
        raise UserError(f"{VARIABLE}: {kind} happens only at {_ONLY_AT[kind]}, not at {phase}; leave the phase out")
    rank, step = _number(settings, "rank", 0), _number(settings, "step", 1)
    if step < 1:
        raise UserError(f"{VARIABLE}: step is {step}; the first one is 1")
    its_attempt = attempt if settings.get("attempt") == "any" else _number(settings, "attempt", 0)
    if rank >= world_size and its_attempt >= attempt:  # an earlier attempt may have had more ranks
        raise UserError(f"{VARIABLE}: rank is {rank}, in a world of {world_size}; the last one is {world_size - 1}")
    seconds, times = _seconds(settings.get("seconds", "1")), _number(settings, "times", 1)
    fault = Fault(rank, step, phase, kind, seconds, times, settings.get("mark", ""))
    return fault if its_attempt == attempt else None


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := float(text)) and seconds >= 0:
            return seconds
    raise UserError(f"{VARIABLE}: seconds is '{text}'; it must be a number, 0 or more")


def _number(settings: Mapping[str, str], name: str, default: int) -> int:
    text = settings.get(name)
    if text is not None and not text.isdecimal():
        raise UserError(f"{VARIABLE}: {name} is '{text}'; it must be a whole number")
    return default if text is None else int(text)
