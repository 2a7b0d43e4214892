"""What benches that train have in common: `paceline` commands as processes of their own, and the records they leave."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.parent import die_with_parent

PACELINE = (sys.executable, "-m", "paceline")
_OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_")  # beginnings of names
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_OUR_LAUNCHER = ("PACELINE_LAUNCHER", "PACELINE_JOB", "PACELINE_ATTEMPT", "PACELINE_STATUS_FOLDER")
_MOST_SAID_BYTES = 1 << 16


def environment_of_one(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that is no rank of anything."""
    own = environment_of_rank(environ)
    return {name: own[name] for name in own if name not in _OF_RANKS and not name.startswith(_OF_TORCHRUN)}


def environment_of_rank(environ: Mapping[str, str], **changes: str) -> dict[str, str]:
    """Returns the environment for a process that takes this one's place in its world, with changes. What our own
    launcher told this one is not for it: a rank that finds another parent than that launcher ends itself."""
    return {name: value for name, value in environ.items() if name not in _OF_OUR_LAUNCHER} | changes


@contextmanager
def tidy() -> Iterator[None]:
    """While it is open, what asks this process to end does so as Ctrl-C does: what was made for the time is removed."""
    asks = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = [signal.signal(number, signal.default_int_handler) for number in asks]
    try:
        yield
    finally:
        for number, handler in zip(asks, before, strict=True):
            signal.signal(number, handler)


def start(command: list[str], said: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Returns the started process, whose output, both streams, goes to a file. It dies with this one, so call it from
    the main thread: the kernel takes the end of the thread that started a process for the end of its parent."""
    with said.open("wb") as file:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )


def reason(said: Path) -> str:
    """Returns why a command failed, in its own words: its last line with an error in it, else its last line."""
    try:
        with said.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_SAID_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return (errors or lines or [""])[-1]


def training_rows(run: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl that are steps, in order; none where there is no such file."""
    return [row for row in _lines(run / "metrics.jsonl") if "loss" in row]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a kind that a run has recorded, in order."""
    return [row for row in _lines(run / "events.jsonl") if row.get("event") == kind]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
