"""Errors between ranks: a lost connection becomes one message, an error of rank 0 is raised on all ranks."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from paceline.base.errors import LOST_PEERS, PacelineError, RunError

if TYPE_CHECKING:
    from paceline.world.verbs import Group

T = TypeVar("T")

# Gloo raises a plain RuntimeError for everything, its source file first: "[.../tcp/pair.cc:553] Connection closed".
_SOURCE_FILE = r"^\[\S+:\d+\] "
_OWN_GPU = "ncclUnhandledCudaError"  # NCCL found this rank's GPU failing, or its memory full
_GLOO = re.compile(r"^\[\S*gloo[\\/]\S+:\d+\] ")


class PeerLost(RunError):
    """Another rank died, left, or hung past the timeout; this rank can only stop."""

    is_consequence = True


@contextmanager
def lost_peers_named(rank: int, what: str) -> Iterator[None]:
    """Turns transport errors inside into PeerLost, which names this rank and the collective `what`. Others pass."""
    try:
        yield
    except RuntimeError as error:
        # NCCL raises a DistBackendError, the store a DistNetworkError.
        is_transport = isinstance(error, dist.DistError) or _GLOO.match(str(error))
        if not is_transport or _OWN_GPU in str(error):
            raise
        raise PeerLost(
            f"rank {rank} {LOST_PEERS} during {what}: {_first_sentence(error)}. "
            "Another rank has died or hangs; its own output or log says more",
            reach="world",
        ) from error


def _first_sentence(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(_SOURCE_FILE, "", line).split(". This is typically")[0].rstrip(".")


def from_rank_0(group: "Group", call: Callable[[], T]) -> T:
    """Returns on every rank the JSON value of `call`, which only rank 0 calls. Collective. All ranks raise a
    PacelineError that it raises; any other error ends rank 0, and the others by PeerLost."""
    outcome: dict[str, Any] = {}
    raised: PacelineError | None = None
    if group.rank == 0:
        try:
            outcome = {"answer": call()}
        except PacelineError as error:
            if error.is_consequence:
                raise  # no collective is possible any more
            raised, outcome = error, {"error": str(error), "classes": [kind.__name__ for kind in type(error).__mro__]}
    outcome = group.broadcast_json(outcome)
    if raised is not None:
        raised.reach = "world"
        raise raised
    if "error" in outcome:
        known = _error_classes(PacelineError)
        raise next(known[name] for name in outcome["classes"] if name in known)(outcome["error"], reach="world")
    answer: T = outcome["answer"]
    return answer


def _error_classes(base: type[PacelineError]) -> dict[str, type[PacelineError]]:
    classes = {base.__name__: base}
    for kind in base.__subclasses__():
        classes |= _error_classes(kind)
    return classes
