"""The ranks that tests may run at once on this machine: eight, however many processes of pytest there are.

Helpers take as many as they start, before they start them. A test that starts ranks while others of it still run says
how many it has at most, `@pytest.mark.ranks(4)`, and gets them before it begins: if two tests each held some and waited
for more, both would wait for ever. The tokens are locks of the bytes of one file, which end with the process.
"""

import contextlib
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

RANKS = 8
_GATE = RANKS  # the byte of whoever is taking; the others wait in line

_reserved: list[int] = []  # what the test has that runs now, or a helper of it
_held: set[int] = set()


@cache
def _file() -> int:
    path = os.path.join(tempfile.gettempdir(), f"paceline-test-ranks-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def ranks_of(words: Sequence[str]) -> int:
    """Returns how many ranks a command starts by its flags; one where they name no number."""
    numbers = {"--hosts": 1, "--nproc": 1, "--nproc-per-node": 1}
    numbers |= {name: int(value) for name, value in pairwise(words) if name in numbers and value.isdigit()}
    return max(1, math.prod(numbers.values()))


@contextlib.contextmanager
def reserve(num_ranks: int) -> Iterator[None]:
    """Tokens for all that is started within."""
    if _reserved:
        yield
        return
    tokens = take(num_ranks)
    _reserved.append(num_ranks)
    try:
        yield
    finally:
        _reserved.clear()
        give_back(tokens)


def take(num_ranks: int) -> set[int]:
    """Waits for as many tokens as there are ranks, at most all; none where they are reserved."""
    if _reserved:
        return set()
    assert not _held, f"{num_ranks} more ranks while {len(_held)} run: say the sum, @pytest.mark.ranks(N)"
    wanted = min(num_ranks, RANKS)
    fcntl.lockf(_file(), fcntl.LOCK_EX, 1, _GATE)
    try:
        while len(_held) < wanted:
            for token in set(range(RANKS)) - _held:
                with contextlib.suppress(OSError):
                    fcntl.lockf(_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, token)
                    _held.add(token)
                if len(_held) == wanted:
                    break
            else:
                time.sleep(0.01)
    finally:
        fcntl.lockf(_file(), fcntl.LOCK_UN, 1, _GATE)
    return set(_held)


def give_back(tokens: set[int]) -> None:
    """Once the ranks have ended; a second time does nothing."""
    for token in tokens & _held:
        fcntl.lockf(_file(), fcntl.LOCK_UN, 1, token)
        _held.discard(token)
    tokens.clear()
