"""Runs the `paceline` command as people do: a process of its own, with a deadline, and nothing of it left afterwards.

    ended = run("train", "--preset", "tiny", cwd=tmp_path)        # waits; ended.status, ended.out, ended.err
    with Program("train", ...) as program:                        # goes on in the background
        program.wait_for(lambda: len(rows(folder)) > 3)
        os.kill(program.ranks()[1], signal.SIGKILL)
        ended = program.wait()

The command, a script or torchrun is forked from the server of ranks.py, which has imported torch, where that makes no
difference to it, and the ranks that it starts are forked from it: importing torch takes 1.5 s of a core. All processes
that descend from it are found by their session or by a mark in their environment: ranks have sessions of their own and,
once their launcher is dead, another parent. The mark also names the file in which forked processes note themselves.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

import psutil
from namespaces import Host
from ranks import FORKS

from paceline.launch import attempt, warm
from paceline.tools.bench import runs

MARK = "PACELINE_TEST_MARK"
_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# The run of the laws: 40 steps of 12 sequences in micro-batches of 2, float32, replicas compared after every step.
# One thread a rank, also of torchrun's: two wait for each other by spinning; on busy cores a step of 0.1 s took 4 s.
TINY = ("--preset", "tiny", "--parallel.check-every", "1", "--train.sample-tokens", "0", "--parallel.threads", "1")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_COMMAND = (sys.executable, "-m", "paceline")
# Beginnings of environment variables that Python or torch read once: with one that has a value, the command is no fork.
# ATEN_CPU_CAPABILITY, MKL_CBWR and ONEDNN_MAX_CPU_ISA are read by a process's first operation, which is in the fork.
_READ_AT_START = ("CUDA", "GLIBC", "LD_", "OMP", "PYTHON", "TORCH")
_READ_LATER = ("TORCHELASTIC_", "TORCH_DISABLE_SHARE_RDZV")
# As it is already: for a command, and ranks, that take their time to start, and for what reads torchrun's command line.
COLD = {"OMP_NUM_THREADS": "1"}
_GONE = (psutil.Error, ProcessLookupError, PermissionError)  # a process that ends while it is looked at
DEADLINE_S = 280.0  # for a command that is to end; machines are shared


@dataclass(frozen=True)
class Ended:
    """How the command ended, and all it said."""

    status: int  # exit status; negative: the signal
    out: str
    err: str
    seconds: float

    def require(self, status: int = 0) -> "Ended":
        """Returns itself if the exit status is this one; else fails with what the command said."""
        assert self.status == status, f"exit status {self.status}, not {status}\n{self.out}\n{self.err}"
        return self


class Program:
    """A running command. Leaving the `with` block kills whatever is left of it."""

    def __init__(
        self,
        *arguments: str,
        command: tuple[str, ...] = _COMMAND,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        host: Host | None = None,
    ):
        """host: on which it runs."""
        inherited = {name: value for name, value in os.environ.items() if name not in _WORLD}
        self._out, self._err, self._ranks = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
        fcntl.fcntl(self._ranks, fcntl.F_SETFL, os.O_APPEND)  # processes of other hosts open it anew
        self.mark = f"{uuid.uuid4().hex} /proc/{os.getpid()}/fd/{self._ranks.fileno()}"
        self.started = time.monotonic()
        environment = {**inherited, MARK: self.mark, **(env or {})}
        words = (*command, *arguments)
        self.process: subprocess.Popen[bytes] | Fork
        if _can_be_forked(words, env or {}):
            streams = [reduction.DupFd(file.fileno()) for file in (self._out, self._err, self._ranks)]
            what = words[1:], environment, cwd or os.getcwd(), streams, host
            self.process = Fork(FORKS.Process(target=_be_the_command, args=what))
            return
        self.process = subprocess.Popen(
            host.inside(*words) if host else words,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self.process.wait()
        for file in (self._out, self._err, self._ranks):
            file.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, deadline_s: float = DEADLINE_S) -> Ended:
        """Returns how it ended; fails, with what it said, where it has not by the deadline."""
        try:
            status = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {deadline_s} s\n{self._said()}") from None
        out, err = self._read(self._out), self._read(self._err)
        return Ended(status, out, err, time.monotonic() - self.started)

    def wait_for(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
        """Returns when the condition holds; fails where the command ends before, or the deadline passes."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before it came to that\n{self._said()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"did not come to that within {deadline_s} s\n{self._said()}")
            time.sleep(0.005)

    def pids(self) -> list[int]:
        """All living processes of this command, launcher and ranks, whoever their parent is now."""
        return [pid for pid, _ in self._living()]

    def ranks(self) -> dict[int, int]:
        """Rank -> pid of the ranks that --nproc started."""
        return {int(rank): pid for pid, rank in self._living() if rank}

    def wait_until_gone(self, deadline_s: float = 60.0) -> float:
        """Returns the seconds until no process of the command lived; fails past the deadline."""
        began = time.monotonic()
        while self.process.poll() is None or self.pids():  # forked, it is seen once it leads a session
            if time.monotonic() - began > deadline_s:
                raise AssertionError(f"still there after {deadline_s} s: {self.pids()}\n{self._said()}")
            time.sleep(0.02)
        return time.monotonic() - began

    def kill_all(self, known: Iterable[int] = ()) -> None:
        """kill -9 of everything, as a power cut does it: stopped first, so that nobody sees another die.

        `known` are pids to begin with, where looking for them (tens of ms) would take too long.
        """
        pids = list(known) or self.pids()
        while pids:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with contextlib.suppress(*_GONE):
                        os.kill(pid, number)
            self.process.poll()
            time.sleep(0.01)
            pids = self.pids()

    def _living(self) -> list[tuple[int, str]]:
        """Pid and rank, where it has one, of each process."""
        forked = dict(line.split(" ") for line in self._read(self._ranks).splitlines())
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(*_GONE):
                env, session = process.environ(), str(os.getsid(process.pid))
                is_ours = env.get(MARK) == self.mark or session in forked or session == str(self.pid)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    warm_rank = process.name().partition("paceline-r")[2]
                    found.append((process.pid, forked.get(str(process.pid), env.get("RANK") or warm_rank)))
        return found

    def _read(self, file: Any) -> str:
        # pread: the command writes at the offset that this descriptor shares with it.
        return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")

    def _said(self) -> str:
        return f"{self._read(self._out)}\n{self._read(self._err)}"


class Fork:
    """A forked process, with what is used here, and by paceline's launcher, of a Popen."""

    def __init__(self, process: BaseProcess) -> None:
        self._process, main = process, sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else the server's fork runs a script that starts one, too
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("paceline", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _can_be_forked(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether it is Python with a script or a module known here, and a variable of its own is not read too early."""
    early = [name for name, value in env.items() if value and name.startswith(_READ_AT_START)]
    if words[0] != sys.executable or any(not name.startswith(_READ_LATER) for name in early):
        return False
    first, second, *_ = [word for word in words[1:] if word != "-u"] + ["", ""]
    return first.endswith(".py") or (first == "-m" and second in (_COMMAND[-1], TORCHRUN[-1]))


def _be_the_command(
    words: Sequence[str], env: dict[str, str], cwd: Path | str, streams: list[Any], host: Host | None
) -> None:
    if host:
        host.enter()
    os.chdir(cwd)
    out, err, ranks = (stream.detach() for stream in streams)
    be_forked(words, env, [os.open(os.devnull, os.O_RDONLY), out, err], ranks)


def be_forked(words: Sequence[str], env: dict[str, str], streams: Sequence[int], ranks: int) -> None:
    """In a fork of the server: runs what `python WORDS` runs, with these standard streams; what it starts is forked,
    and notes itself in the file `ranks`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    for standard, file in enumerate(streams):
        os.dup2(file, standard)
    _open_standard_streams()
    os.write(ranks, f"{os.getpid()} {env.get('RANK', '')}\n".encode())

    def popen(command: Sequence[str], env: dict[str, str], start_new_session: bool = True) -> Fork:
        assert start_new_session
        assert _can_be_forked(command, {}), command
        process = multiprocessing.get_context("fork").Process(target=_be_a_rank, args=(command[1:], env, ranks))
        rank = Fork(process)
        while rank.poll() is None and os.getsid(rank.pid) != rank.pid:
            time.sleep(0.001)  # until then the launcher would send signals to its own handlers, and to its own session
        return rank

    def popen_of_bench(command: Sequence[str], env: dict[str, str], stdout: IO[bytes], **how: Any) -> Any:
        """From the server, since `verify` is in a world itself; it inherits no processors from there."""
        changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
        if not _can_be_forked(command, changed):
            return subprocess.Popen(command, env=env, stdout=stdout, **how)
        streams = [reduction.DupFd(file) for file in (stdout.fileno(), stdout.fileno(), ranks)]
        what = os.sched_getaffinity(0), command[1:], env, os.getcwd(), streams, None
        return Fork(FORKS.Process(target=_be_the_command_on, args=what))

    attempt.subprocess = SimpleNamespace(Popen=popen)  # type: ignore[assignment]
    warm.is_supported = lambda: False  # its server would import torch once more
    runs.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=popen_of_bench, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    SubprocessHandler._popen = lambda self, args, env: popen(args, env)  # type: ignore[method-assign]
    os.execve = _become
    _be(words, env)


def _become(_: str, command: Sequence[str], env: dict[str, str]) -> NoReturn:
    _be(command[1:], env)
    sys.exit()


def _open_standard_streams() -> None:
    """Makes Python's objects anew: those of the server's know whether its own streams were files or terminals."""
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _be_the_command_on(cores: set[int], *what: Any) -> None:
    os.sched_setaffinity(0, cores)
    _be_the_command(*what)


def _be_a_rank(words: Sequence[str], env: dict[str, str], ranks: int) -> None:
    """The launcher has threads and handlers of signals, open files, and files that it will remove."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.write(ranks, f"{os.getpid()} {env['RANK']}\n".encode())
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the folder's own
            if file not in (0, 1, 2, ranks) and (stat.S_ISREG(mode := os.fstat(file).st_mode) or stat.S_ISSOCK(mode)):
                os.close(file)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    _be(words, env)


# The globals of the script that this process was. They are never freed: torch's ProcessGroupGloo would join its thread
# with the GIL held, for which that thread may wait for ever (seen with DistributedDataParallel).
_of_scripts: list[dict[str, Any]] = []


def _be(words: Sequence[str], env: dict[str, str]) -> None:
    """Runs what `python WORDS` runs, in a session of its own."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    gc.freeze()  # what the server imported (see ranks.py)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # else that of before
    multiprocessing.set_start_method(None, force=True)  # else that of the server
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    sys.argv = list(words[1:] if words[0] == "-m" else words)
    sys.path.insert(0, "" if words[0] == "-m" else str(Path(words[0]).absolute().parent))
    try:
        if words[0] != "-m":
            _of_scripts.append(runpy.run_path(words[0], run_name="__main__"))
        elif words[1] == TORCHRUN[-1]:
            importlib.import_module(words[1]).main()  # run_module warns of one that is imported
        else:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out


def run(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    deadline_s: float = DEADLINE_S,
) -> Ended:
    """Runs `python -m paceline ARGUMENTS` to its end; fails where a process of it outlives it."""
    with Program(*arguments, env=env, cwd=cwd) as program:
        ended = program.wait(deadline_s)
        program.wait_until_gone()
    return ended


def fork_what_runs() -> None:
    """Makes `subprocess.run` fork what can be forked, in this process."""
    in_a_process = subprocess.run

    def run_a_fork(command: Sequence[str], *, capture_output: bool = False, text: bool = False, **how: Any) -> Any:
        if how or not (capture_output and text and _can_be_forked(command, {})):
            return in_a_process(command, capture_output=capture_output, text=text, **how)
        with Program(command=tuple(command)) as program:
            ended = program.wait()
        return subprocess.CompletedProcess(command, ended.status, ended.out, ended.err)

    subprocess.run = run_a_fork  # type: ignore[assignment]


def start_ranks(
    arguments_by_rank: Sequence[tuple[str, ...]],
    env_by_rank: Sequence[Mapping[str, str]],
    command: tuple[str, ...] = _COMMAND,
    deadline_s: float = 60,
) -> list[Ended]:
    """Starts ranks as a cluster's own scripts do, by the environment alone, and returns how each ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(len(env_by_rank)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(Program(*arguments, command=command, env={**world, "RANK": str(rank), **env}))
            for rank, (arguments, env) in enumerate(zip(arguments_by_rank, env_by_rank, strict=True))
        ]
        return [program.wait(deadline_s) for program in programs]


def one_message(endings: Iterable[Ended]) -> str:
    """All ranks refused with status 2, and one of them said why, in one line. Returns the line."""
    lines = [line for ended in endings for line in ended.require(2).err.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; none where it is not there yet, and not one that is half written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps(run_folder: Path) -> list[dict[str, Any]]:
    """The training rows of a run."""
    return [row for row in rows(run_folder / "metrics.jsonl") if "loss" in row]


def losses(run_folder: Path) -> list[float]:
    """The loss of each step of a run, in order; fails where a step is missing or stands there twice."""
    found = steps(run_folder)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    return [row["loss"] for row in found]


def val_loss(run_folder: Path) -> float:
    """The last validation loss of a run."""
    value: float = [row["val_loss"] for row in rows(run_folder / "metrics.jsonl") if "val_loss" in row][-1]
    return value


def digest(run_folder: Path) -> str:
    """The digest of the weights that a run ended with."""
    value: str = [row["digest"] for row in rows(run_folder / "events.jsonl") if row["event"] == "end"][-1]
    return value
