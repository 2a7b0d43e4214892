"""Runs `paceline` commands as processes and reads their records, for benches that train."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.base import units
from paceline.base.errors import LOST_PEERS
from paceline.base.jsonl import rows
from paceline.base.process import die_with_parent
from paceline.config import Config
from paceline.record.console import Console

T = TypeVar("T")
PACELINE = (sys.executable, "-m", "paceline")
_MOST_SAID_BYTES = 1 << 16
_LOOK_EVERY_S = 0.05
_LAST_WORDS_S = 3.0  # after one process failed: time for the others to notice and end
_PATIENCE_S = 20.0  # after a signal: time for a lab to stop its hosts


class Failed(Exception):
    """A failed command, with its own message."""


def only_steps(config: Config, steps: int, **train: Any) -> Config:
    """Returns the config of a run of so many steps, without evaluation, comparison of replicas, checkpoint before the
    end, trace or tracker, and which sends its checkpoints nowhere. It finds a free port. train: other fields."""
    horizons = ("tokens", "tokens_per_param", "time_budget", "max_epochs")
    zero = (*horizons, "stop_at_step", "stop_after", "sample_tokens", "profile")
    config = config.replace("train", steps=steps, eval_every=-1, init_from="", **dict.fromkeys(zero, 0), **train)
    config = config.replace("parallel", check_every=0, port=0)
    config = config.replace("checkpoint", every=0, every_s=0.0, keep_best=False, to="")
    return config.replace("log", every=1, ranks_every=1).replace("track", to="")


def in_turn(todo: Sequence[T], rounds: int, console: Console, describe: Callable[[T], str]) -> Iterator[T]:
    """Yields all of `todo` in each round, since a machine's speed may drift; the console shows what is measured, and
    the time left."""
    began, num_runs = time.monotonic(), len(todo) * rounds
    for done in range(num_runs):
        number, place = divmod(done, len(todo))
        facts = describe(todo[place])
        if number:  # the first round has shown how long one takes
            facts += f"  {units.duration((time.monotonic() - began) / done * (num_runs - done))} left"
        console.advance(done, f"round {number + 1} of {rounds}", facts, num_runs)
        yield todo[place]


# ---- processes ----


@contextlib.contextmanager
def tidy() -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 end this process as Ctrl-C does, so that temporary files are removed."""
    asks = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = [signal.signal(number, signal.default_int_handler) for number in asks]
    try:
        yield
    finally:
        for number, handler in zip(asks, before, strict=True):
            signal.signal(number, handler)


def start(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process with stdout and stderr in the file. It dies with this one, so call this in the main thread: the
    kernel takes the end of the starting thread for the end of the parent."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )


def run_at_once(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    folder: Path,
    cores: Sequence[Sequence[int]] = (),
    end_by: signal.Signals = signal.SIGKILL,
) -> None:
    """Runs commands, each with its environment, until all have ended.

    cores: the processors of each command; none: all. If one fails, the others have a few seconds to end before they get
    the signal. Raises Failed, with the message of a command that did not fail because of another.
    """
    logs = [folder / f"{place}.out" for place in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for place, ((command, environ), log) in enumerate(zip(commands, logs, strict=True)):
            with _pinned(cores[place] if cores else ()):
                processes.append(start(command, log, environ))
        _wait(processes)
    finally:
        for process in processes:
            _end(process, end_by)
    failed = [log for process, log in zip(processes, logs, strict=True) if process.returncode]
    if failed:
        told = [text for text in map(reason, failed) if text] or ["it said nothing"]
        raise Failed(next((text for text in told if LOST_PEERS not in text), told[0]))


@contextlib.contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Returns when all have ended, or some seconds after one has failed."""
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if deadline == float("inf") and any(process.returncode for process in processes):
            deadline = time.monotonic() + _LAST_WORDS_S
        time.sleep(_LOOK_EVERY_S)


def _end(process: subprocess.Popen[bytes], end_by: signal.Signals) -> None:
    if process.poll() is not None:
        return
    process.send_signal(end_by)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE_S)
    process.kill()
    process.wait()


def reason(log: Path) -> str:
    """Returns a failed command's message: its last line with `error: `, from there on, else its last line."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_SAID_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return (errors or lines or [""])[-1]


# ---- records ----


def training_rows(run: Path) -> list[dict[str, Any]]:
    """Returns the steps' rows of metrics.jsonl and ranks.jsonl, in order; none if there is no such file."""
    by_rank = {row["step"]: row for row in rows(run / "ranks.jsonl") if row}
    return [row | by_rank.get(row["step"], {}) for row in rows(run / "metrics.jsonl") if row and "loss" in row]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows(run / "events.jsonl") if row and row.get("event") == kind]
