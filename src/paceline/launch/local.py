"""`--nproc N --max-restarts M`: runs N ranks of this command on this machine; if one fails, all of them start again.

Ranks report their ends in the run folder (base/process.py), because torch's launcher knows only success and failure: 75
("saved, start me again") is neither. A later attempt runs the same command line; PACELINE_JOB tells its ranks which run
folder is theirs, and they resume from it.
"""

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psutil

from paceline.base.errors import UserError
from paceline.base.net import LOOPBACK, listen, require_loopback
from paceline.base.process import ATTEMPT, LAUNCHER, STATUS_FOLDER, Status, read_statuses, say
from paceline.launch import warm
from paceline.launch.attempt import Grace, Order, Place, run_attempt
from paceline.launch.attempts import Attempts
from paceline.launch.ends import Ends
from paceline.launch.job import JOB
from paceline.launch.restarts import Records
from paceline.launch.signals import StopSignals
from paceline.launch.warm import WarmServer

Places = Callable[[int], Place]  # the place of this host's ranks in an attempt


def one_host(num_ranks: int, port: int = 0) -> Places:
    """All ranks are on this host; their store is on loopback. port: of the store; 0: a free one."""

    def place(attempt: int) -> Place:
        listener = listen(LOOPBACK, port)
        return Place(0, num_ranks, num_ranks, LOOPBACK, listener.getsockname()[1], listener, attempt)

    return place


def one_of_many(num_ranks: int, host: int, num_hosts: int, address: str, port: int) -> Places:
    """A scheduler starts this command on each host, as in the pods of a job, and starts it again. Rank 0 holds the
    store of all ranks. Launchers know nothing of each other: when one host's ranks end, so do the others'."""
    first, world_size = host * num_ranks, num_hosts * num_ranks
    return lambda attempt: Place(first, num_ranks, world_size, address, port, None, attempt, knows_all=False)


@contextlib.contextmanager
def open_ranks(
    command: Sequence[str],
    run: Path,
    *,
    grace_s: float = 120.0,
    job: str = "",
    address: str = LOOPBACK,
    preload: Sequence[str] = (),
) -> Iterator["HostRanks"]:
    """Yields the ranks of this host, which run a command, and write the run in this folder. Stop signals are theirs.

    grace_s: how long they may save after a signal, see `Grace`. job: names all attempts; empty: a random name. address:
    of the interface that ranks use, unless their config names one, or the user does and it is not loopback; empty: the
    backend chooses. preload: modules that ranks import; if there are any, ranks are forked from one process that has
    imported them (warm.py). Raises UserError if loopback is down."""
    require_loopback()
    if address and (name := _interface_of(address)):
        if address == LOOPBACK:  # a variable that is exported for several hosts would open ports to them
            if (exported := os.environ.get("GLOO_SOCKET_IFNAME", name)) != name:
                say(f"warning: GLOO_SOCKET_IFNAME is {exported}; ranks of one host use {name}, or --parallel.interface")
            os.environ["GLOO_SOCKET_IFNAME"] = name
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ[JOB] = job or uuid.uuid4().hex
    is_new = not run.exists()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        stack.callback(_forget_refused, run, is_new)
        server = WarmServer(preload, command) if preload and warm.is_supported() else None
        if server:
            stack.enter_context(closing(server))
        yield HostRanks(command, run, signals, grace_s, server)


class HostRanks:
    """The ranks of this host, in one attempt after another."""

    def __init__(
        self, command: Sequence[str], run: Path, signals: StopSignals, grace_s: float, server: WarmServer | None
    ):
        self._command, self.folder, self._signals = command, run, signals
        self._grace_s, self._server = grace_s, server
        self.grace = Grace(grace_s, run / "checkpoints")  # of the attempt

    def run(self, place: Place, order: Callable[[], Order] = lambda: "") -> tuple[dict[int, Status], dict[int, int]]:
        """Runs one attempt here; none of its processes remains. Returns the ranks' reports, and their exit statuses.
        order: see `run_attempt`. Raises UserError if the run folder cannot be written."""
        statuses = self._make_folder()
        os.environ[STATUS_FOLDER], os.environ[ATTEMPT] = str(statuses.absolute()), str(place.attempt)
        self.grace, job = Grace(self._grace_s, self.folder / "checkpoints"), os.environ[JOB]
        exits = run_attempt(place, self._command, job, self._signals, statuses, self.grace, order, self._server)
        return read_statuses(statuses, place.own_ranks, exits), exits

    def run_to_the_end(self, places: Places, max_restarts: int = 0) -> int:
        """Runs one attempt after another, and returns all ranks' common exit status. After a failure that the user's
        input did not cause, all ranks start again, at most max_restarts times. Raises RunError naming the rank that
        died without a message, or listing all attempts; KeyboardInterrupt after a second Ctrl-C, or one before anything
        was saved."""
        records = Records(self.folder)

        def run_once(attempt: int) -> Ends:
            place = places(attempt)
            records.is_mine = place.first_rank == 0  # else rank 0, elsewhere, may still write
            reports, exits = self.run(place)
            judged = range(place.world_size) if place.knows_all else place.own_ranks
            return Ends(ranks=judged, reports=reports, exits=exits)

        return Attempts(run_once, records, self.folder, max_restarts, self._grace_s, self._signals).run()

    def _make_folder(self) -> Path:
        """Returns the folder in which ranks report their ends. Raises UserError if it cannot be written."""
        folder = self.folder / "ranks"
        try:
            for made in (self.folder, folder):
                made.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UserError(f"cannot write in {folder}, where ranks report their ends: {error.strerror}") from None
        return folder


def _forget_refused(run: Path, is_new: bool) -> None:
    """Removes what the launcher has made in the folder of a run that its ranks refused, or that was stopped at once."""
    if (run / "config.toml").exists():
        return
    with contextlib.suppress(OSError):
        for path in (run / "ranks").glob("rank-*.end"):
            path.unlink()
        (run / "ranks").rmdir()
        if is_new:
            run.rmdir()


def _interface_of(name: str) -> str | None:
    address = socket.gethostbyname(name)
    interfaces = psutil.net_if_addrs().items()
    return next((str(name) for name, known in interfaces if any(a.address == address for a in known)), None)
