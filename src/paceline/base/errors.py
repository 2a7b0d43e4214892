"""Errors that are one message: what is wrong, the value seen, what to do. Each class has an exit status."""

import difflib
import math
from collections.abc import Iterable
from typing import Literal, get_args, get_type_hints

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL in sysexits.h: stopped early, state saved, start me again

# In the message of a rank that noticed the end of another. Programs that read the output look for other messages first.
LOST_PEERS = "lost the other ranks"

# Who sees an error, and so who prints it: this rank, all ranks of its host, or all ranks of the world.
Reach = Literal["rank", "host", "world"]


class PacelineError(Exception):
    """An error that is one clear message, shown without a traceback."""

    exit_status = EXIT_FAILED
    is_consequence = False  # the error follows from another rank's end, which is the cause to report
    is_of_system = False  # a disk or network failed: the same may work later, and what was made is kept

    def __init__(self, message: str, reach: Reach = "rank"):
        super().__init__(message)
        self.reach: Reach = reach


class UserError(PacelineError):
    """The user must change something; exit status 2. Before ranks have joined, all ranks of a host see the same."""

    exit_status = EXIT_USER

    def __init__(self, message: str, reach: Reach = "host"):
        super().__init__(message, reach)


class RunError(PacelineError):
    """The run failed though the input was right, as by a lost rank or a full disk; exit status 1."""


class Stopped(PacelineError):
    """Stopped before there was anything to save; exit status 75. The same command starts the run again."""

    exit_status = EXIT_RESUMABLE


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)` for the closest known word, or an empty string if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def require_choices(values: object, prefix: str) -> None:
    """Raises UserError, naming the field as the user types it after `prefix`, if a Literal has another value."""
    for name, kind in get_type_hints(type(values)).items():
        known, value = get_args(kind), getattr(values, name)
        if known and value not in known:
            raise UserError(f"{prefix}{name.replace('_', '-')} is {value!r}; it is one of {', '.join(known)}")


def require_at_least(values: object, prefix: str, **least: float) -> None:
    """Raises UserError, naming the field as the user types it after `prefix`, if a number is smaller, or not finite."""
    for name, lowest in least.items():
        value = getattr(values, name)
        if not (math.isfinite(value) and value >= lowest):
            raise UserError(f"{prefix}{name.replace('_', '-')} is {value}; it must be at least {lowest}")
