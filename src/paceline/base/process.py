"""How a process begins and ends: signals while it imports, what it prints, its parent, and how a rank reports its end.

A rank reports its end to the launcher in a small file of the run folder, because an exit status says too little. The
report names the attempt: a second command that is started on the same folder ends at once, and writes there, too. If
the file cannot be written, or is removed, the exit status alone counts.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from paceline.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USER
from paceline.base.files import replace

STATUS_FOLDER = "PACELINE_STATUS_FOLDER"
LAUNCHER = "PACELINE_LAUNCHER"  # the launcher's pid
ATTEMPT = "PACELINE_ATTEMPT"
OVER_SSH = "PACELINE_OVER_SSH"  # standard error is a connection of `launch`: open as long as any process has it
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_OUR_LAUNCHER = (LAUNCHER, STATUS_FOLDER, "PACELINE_JOB", ATTEMPT, OVER_SSH)
_OF_OTHER_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "PET_")  # prefixes
EXIT_INTERRUPTED = 130  # 128 + SIGINT
# SIGTERM last: a launcher looks for its handler.
STOP_SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM)


# ---- what it prints ----


def say(line: str) -> None:
    """Prints a line on standard error. A closed terminal does not end the run."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))  # a path need not be UTF-8


_full: OSError | None = None  # of the disk of standard output


def discard_output(error: OSError | None = None) -> None:
    """Sends standard output to /dev/null: at its end Python would try again to write the rest, and exit with 120.
    error: why; for `flush_output`, if the disk is full."""
    global _full
    if error and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _full = error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def flush_output() -> None:
    """Writes what is still to be printed. Raises OSError, also if a full disk lacks what was printed before."""
    sys.stdout.flush()
    if _full:
        raise _full


# ---- signals before training, while Python imports libraries, which takes seconds ----


def stopped_early(name: str) -> str:
    """Returns the message of a rank that a signal stopped before training."""
    return f"stopped by {name} before training began; start the same command again"


@contextlib.contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside, these signals go to `handler`. A SIGHUP that is ignored (nohup) stays ignored."""
    previous = {}
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python cannot be restored
                signal.signal(number, before)


def end_on_signals() -> None:
    """Makes stop signals end this process at once, as long as there is nothing to save. The handler raises nothing,
    because an import may swallow an exception. Signals that are ignored stay ignored (nohup)."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def end_on_signals_no_more() -> None:
    """Restores Python's default handlers where `end_on_signals` set ours and nobody replaced them."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == _end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> NoReturn:
    if has_launcher():  # it prints one message for all its ranks, as for a rank that had no handler yet
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    is_interrupt = number == signal.SIGINT
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        say("interrupted" if is_interrupt else stopped_early(signal.Signals(number).name))
    os._exit(EXIT_INTERRUPTED if is_interrupt else EXIT_RESUMABLE)


# ---- its parent ----


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when its parent ends; else ranks keep training after kill -9 of a launcher.

    parent: its pid. If it is dead already, this process says so and ends at once. None: our launcher, as its variable
    says, or torchrun; processes that a shell started (ssh, nohup) outlive it.
    """
    if parent is None and os.environ.get(LAUNCHER, "").isdecimal():
        parent = int(os.environ[LAUNCHER])
    if sys.platform != "linux" or (parent is None and "TORCHELASTIC_RUN_ID" not in os.environ):
        return
    pr_set_pdeathsig = 1  # linux/prctl.h
    with contextlib.suppress(AttributeError, OSError):
        import ctypes  # opens a file, for good, which must not get the number of a closed standard stream

        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        say(
            f"error: pid {parent}, which PACELINE_LAUNCHER names or which started this process, is not its parent: it "
            "has ended, or the environment is a copy of a rank's (unset PACELINE_LAUNCHER)"
        )
        os._exit(EXIT_FAILED)


def start_ticks(pid: int) -> int:
    """Returns when a process of this host started, in clock ticks since boot; 0 if the system does not tell. With the
    pid this is unique: psutil's seconds since 1970 change when the clock is set."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # starttime, proc(5)
    return 0


def namespace(kind: str) -> str:
    """Returns this kernel's boot and this process's namespace of a kind (`pid`, `net`): two machines may have one name,
    and containers of one machine share the boot, but not always pids or loopback. The host's name, if the system does
    not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"
    except OSError:
        return socket.gethostname()


# ---- the end of a rank ----


@dataclass(frozen=True)
class Status:
    """How one rank ended."""

    code: int  # exit status
    consequence: str | None = None  # its message, if it ended because another rank did

    @property
    def is_good(self) -> bool:
        """True if the rank finished, or stopped with its state saved."""
        return self.code in (EXIT_DONE, EXIT_RESUMABLE)

    @property
    def is_failure(self) -> bool:
        """True if the rank itself failed, and has printed why."""
        return self.code in (EXIT_FAILED, EXIT_USER) and self.consequence is None


def has_launcher() -> bool:
    """True in a rank that `--nproc` started."""
    return STATUS_FOLDER in os.environ and os.environ.get(LAUNCHER) == str(os.getppid())


def record_status(code: int, consequence: str | None = None) -> int:
    """Reports the exit status to the launcher, if there is one, and returns it. Call it before each exit: after a
    failure the launcher may kill this process at once."""
    if not has_launcher():
        return code
    with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
        sys.stdout.flush()
    path = end_path(Path(os.environ[STATUS_FOLDER]), int(os.environ["RANK"]))
    with contextlib.suppress(OSError):  # a full disk, or the run folder is gone
        path.parent.mkdir(exist_ok=True, mode=0o700)
        report = {"of": _attempt(), **asdict(Status(code, consequence))}
        replace(path, json.dumps(report).encode(), 0o600)  # the launcher may read meanwhile
    return code


def end_path(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank reports its end."""
    return folder / f"rank-{rank:05d}.end"


def _attempt() -> str:
    """Names the attempt, in the launcher and in its ranks."""
    launcher = int(os.environ[LAUNCHER])
    return f"{launcher} {start_ticks(launcher)} {os.environ[ATTEMPT]}"


def read_statuses(folder: Path, ranks: Iterable[int], ends: Mapping[int, int]) -> dict[int, Status]:
    """Returns the statuses that these ranks have reported in this attempt. ends: exit statuses of their processes by
    rank; 0, 2 and 75 count if the file is missing, as where the disk is full: Python ends with 1, too."""
    statuses = {rank: Status(code) for rank, code in ends.items() if code in (EXIT_DONE, EXIT_USER, EXIT_RESUMABLE)}
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads(end_path(folder, rank).read_bytes())
            if report.pop("of") == _attempt():
                statuses[rank] = Status(**report)
    return statuses


def environment_of_one(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that is no rank: without a launcher's variables."""
    variables = environment_of_rank(environ)
    return {
        name: variables[name]
        for name in variables
        if name not in RANK_VARIABLES and not name.startswith(_OF_OTHER_LAUNCHERS)
    }


def environment_of_rank(environ: Mapping[str, str], **changes: str) -> dict[str, str]:
    """Returns the environment of a process that takes this rank's place, with changes. Variables of our launcher are
    left out: a rank under another parent would end itself."""
    return {name: value for name, value in environ.items() if name not in _OF_OUR_LAUNCHER} | changes
