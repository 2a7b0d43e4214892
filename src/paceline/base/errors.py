"""How paceline says no: what was wrong, the value seen, what to do. The exit status is part of the message."""

import difflib
from collections.abc import Iterable
from typing import Literal

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL in sysexits.h: stopped early, state saved, start me again


# Who sees an error decides who says it: the rank concerned, one rank of its host, or rank 0 for the whole world.
Reach = Literal["rank", "host", "world"]


class PacelineError(Exception):
    """An error that is one clear message, shown without a traceback."""

    exit_status = EXIT_FAILED
    is_consequence = False  # of another rank's end, whose cause is what people need to hear

    def __init__(self, message: str, reach: Reach = "rank"):
        super().__init__(message)
        self.reach: Reach = reach


class UserError(PacelineError):
    """Something the user must change; exit status 2. Before ranks have met, all ranks of a host see the same."""

    exit_status = EXIT_USER

    def __init__(self, message: str, reach: Reach = "host"):
        super().__init__(message, reach)


class RunError(PacelineError):
    """A run that failed through no wrong input: a lost rank, a full disk; exit status 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)` for the closest known word, or an empty string where nothing is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
