"""The machine that is checked: its facts, and runs of paceline on it with a time limit."""

import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

QUERY = (
    "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,ecc.mode.current"
)

STOPPED = 75  # the exit status of a run that can be continued


def torchrun(ranks: int) -> tuple[str, ...]:
    """Returns what makes a command of Python one of so many ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


class Failed(Exception):
    """A check found something wrong; the text says what."""


class Skipped(Exception):
    """A check cannot be made on this machine; the text says why."""


@dataclass(frozen=True)
class Run:
    """A run of paceline that has ended."""

    folder: Path
    seconds: float
    said: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The training rows of metrics.jsonl."""
        return [row for row in self._rows("metrics.jsonl") if "step_ms" in row]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.steps]

    @property
    def val_loss(self) -> float:
        return float([row for row in self._rows("metrics.jsonl") if "val_loss" in row][-1]["val_loss"])

    @property
    def digest(self) -> str:
        """Of the weights at the end."""
        return str(self.events("end")[-1]["digest"])

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self._rows("events.jsonl") if row["event"] == name]

    def median(self, name: str, warm_up: int = 4) -> float:
        """Returns the median of a field of the training rows, without the first few; NaN where it is unknown."""
        values = [row[name] for row in self.steps[warm_up:] if row[name] is not None]
        return statistics.median(values) if values else float("nan")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Machine:
    """Where a check runs. With device "cpu" the ranks are processes on the CPU: a rehearsal."""

    device: str
    num_ranks: int  # of the checks for several GPUs
    num_gpus: int  # fewer than ranks: they share GPUs
    root: Path
    deadline: float = 0.0  # of this check, by time.monotonic()
    known: "dict[tuple[object, ...], Future[Run]]" = field(default_factory=dict)  # of all checks
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of folders
    is_over: threading.Event = field(default_factory=threading.Event)  # Ctrl-C: checks in threads end what they run

    @property
    def shares_gpu(self) -> bool:
        return 0 < self.num_gpus < self.num_ranks

    def train(self, *flags: str, ranks: int = 1, env: Mapping[str, str] = {}, ends_with: int = 0) -> Run:
        """Returns a run of `paceline train` with these flags. The same run is made once, except one that stops and may
        be continued, or fails. Raises Failed for another exit status, and at this check's time limit."""
        device = () if "--parallel.device" in flags else ("--parallel.device", self.device)
        folder = self.folder("run")
        words = ["train", "--out", str(folder), *flags, *device, "--nproc", str(ranks)]
        if ends_with == STOPPED:
            return self.paceline(folder, *words, env=env, ends_with=ends_with)
        made: Future[Run] = Future()
        key = (*flags, ranks, *sorted(env.items()))
        known = self.known.setdefault(key, made)  # at once, for checks in threads
        if known is made:
            try:
                made.set_result(self.paceline(folder, *words, env=env, ends_with=ends_with))
            except BaseException as error:
                del self.known[key]  # another check has more time
                made.set_exception(error)
        return known.result()

    def folder(self, name: str) -> Path:
        """Returns the path of a folder that does not exist yet."""
        return self.root / f"{name}-{next(self.numbers)}"

    def resume(self, run: Run, *flags: str, ranks: int = 1) -> Run:
        return self.paceline(run.folder, "resume", str(run.folder), *flags, "--nproc", str(ranks))

    def paceline(self, folder: Path, *words: str, env: Mapping[str, str] = {}, ends_with: int = 0) -> Run:
        return self.execute(folder, [sys.executable, "-m", "paceline", *words], env=env, ends_with=ends_with)

    def execute(
        self,
        folder: Path,
        command: Sequence[str],
        env: Mapping[str, str] = {},
        ends_with: int = 0,
        cwd: Path | None = None,
        stop_when: Callable[[], bool] | None = None,
    ) -> Run:
        """Runs a command, and ends it with all its processes at the time limit, and after Ctrl-C. stop_when: asked five
        times a second; the first True sends SIGTERM to the command alone."""
        began = time.monotonic()
        deadline = max(self.deadline, began + 1.0)
        program = subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            while (said := _said_within(0.2, program)) is None:
                if stop_when is not None and stop_when():
                    program.send_signal(signal.SIGTERM)
                    stop_when = None
                if self.is_over.is_set():
                    raise KeyboardInterrupt
                if time.monotonic() > deadline:
                    os.killpg(program.pid, signal.SIGKILL)
                    said, _ = program.communicate()
                    raise Failed(f"no end after {time.monotonic() - began:.0f} s: {said[-600:]}")
        except KeyboardInterrupt:  # the command has a session of its own, which Ctrl-C does not reach
            os.killpg(program.pid, signal.SIGKILL)
            raise
        if program.returncode != ends_with:
            reasons = [line for line in said.splitlines() if line.startswith("error")]  # a launcher's traceback follows
            raise Failed(f"ended with {program.returncode} instead of {ends_with}: {reasons} {said[-1500:]}")
        return Run(folder, time.monotonic() - began, said)

    def facts(self) -> dict[str, Any]:
        """Returns what the figures depend on; a value that cannot be learnt is left out."""
        facts: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if self.device == "cuda" else platform.processor() or "cpu",
            "num_gpus": self.num_gpus,
            "num_ranks": self.num_ranks,
            "ranks_share_a_gpu": self.shares_gpu,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        }
        if self.device == "cuda":
            facts |= {
                "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                "attention": {
                    "flash": torch.backends.cuda.flash_sdp_enabled(),
                    "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
                    "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
                },
                "gpus": _output("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv").splitlines(),
                "topology": _output("nvidia-smi", "topo", "-m").splitlines(),
            }
        return facts


def _said_within(seconds: float, program: "subprocess.Popen[str]") -> str | None:
    """Returns all that a program has said when it has ended; None if it still runs after this time."""
    try:
        return program.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return None


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    except subprocess.TimeoutExpired:  # nvidia-smi hangs where a GPU does
        return ""
