"""Starts the worlds that `bench scaling` measures: ranks pinned to cores, ranks apart, hosts of a lab.

Ranks are started here and not by `--nproc`, which pins nobody: the environment is what torchrun would set. A process
inherits the cores of the thread that starts it.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from paceline.base.net import listen
from paceline.bench import runs

_LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 0.05
_LAST_WORDS_S = 3.0  # after one has failed: for the others to notice and to end
_LAB_PATIENCE_S = 20.0  # to take its hosts down
# The smallest model, and no large collectives: what is asked for is the bandwidth between two ranks.
_PROBE = ("bench", "link", "--preset", "tiny", "--time-budget", "5", "--max-bytes", "65536")


class Failed(Exception):
    """A world that could not be measured; the message is its own."""


class Starter:
    """Runs worlds, one at a time, in folders of their own."""

    def __init__(self, scratch: Path, *, cores: Sequence[int], threads: int):
        self._scratch, self._cores, self._threads = scratch, cores, threads
        self._number = 0

    def train(self, config: str, ranks: int) -> Path:
        """Returns the run folder of a world of so many ranks on this machine, which has ended well.

        config: TOML. Raises Failed."""
        folder = self._folder()
        command = [*self._train(folder, config), "--parallel.interface", _loopback() if ranks > 1 else ""]
        self.run([(command, environ) for environ in _world(ranks)])
        return folder / "run"

    def train_apart(self, config: str, number: int, device: str) -> list[Path]:
        """Returns the run folders of so many worlds of one that ran at once, each where a rank of its number would.
        Raises Failed."""
        folders = [self._folder() for _ in range(number)]
        alone = runs.environment_of_one(os.environ)
        gpus = [_gpu(place) if device == "cuda" else {} for place in range(number)]
        self.run([(self._train(folder, config), alone | gpu) for folder, gpu in zip(folders, gpus, strict=True)])
        return [folder / "run" for folder in folders]

    def train_in_lab(self, config: str, hosts: int, host_ranks: int, rate: str) -> Path:
        """Returns the run folder of a world on hosts of a lab. Raises Failed, also where there can be no lab here."""
        folder = self._folder()
        self._lab(hosts, host_ranks, rate, self._train(folder, config))
        return folder / "run"

    def bandwidth(self, ranks: int) -> float:
        """Returns bytes a second that a rank sends while it receives as many, between ranks on this machine.

        Payload; the slowest pair. Raises Failed."""
        report = self._folder() / "link.json"
        command = [*runs.PACELINE, *_PROBE, "--json", str(report)]
        self.run([(command, environ | {"GLOO_SOCKET_IFNAME": _loopback()}) for environ in _world(ranks)])
        return _bandwidth(report)

    def bandwidth_in_lab(self, hosts: int, rate: str) -> float:
        """The same between hosts of a lab. Raises Failed."""
        report = self._folder() / "link.json"
        self._lab(hosts, 1, rate, [*runs.PACELINE, *_PROBE, "--json", str(report)])
        return _bandwidth(report)

    def _folder(self) -> Path:
        self._number += 1
        folder = self._scratch / str(self._number)
        folder.mkdir()
        return folder

    def _train(self, folder: Path, config: str) -> list[str]:
        (folder / "config.toml").write_text(config)
        return [*runs.PACELINE, "train", "--config", str(folder / "config.toml"), "--out", str(folder / "run")]

    def _lab(self, hosts: int, host_ranks: int, rate: str, command: list[str]) -> None:
        verb = command[len(runs.PACELINE) :]
        lab = ["lab", "--hosts", str(hosts), "--nproc", str(host_ranks), "--rate", rate, "--", *verb]
        said = self._scratch / f"{self._number}-lab.out"
        process = runs.start([*runs.PACELINE, *lab], said, runs.environment_of_one(os.environ))
        try:
            process.wait()
        finally:
            _end(process, signal.SIGTERM, _LAB_PATIENCE_S)
        if process.returncode:
            raise Failed(runs.reason(said))

    def run(self, commands: Sequence[tuple[list[str], Mapping[str, str]]]) -> None:
        """Runs commands at once, each with its environment and on its own cores, until all have ended well. Raises
        Failed, in the words of one that failed by itself, when no process of them is left."""
        saids = [self._scratch / f"{self._number}-{place}.out" for place in range(len(commands))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for place, ((command, environ), said) in enumerate(zip(commands, saids, strict=True)):
                with self._pinned(place):
                    processes.append(runs.start(command, said, environ))
            _wait(processes)
        finally:
            for process in processes:
                _end(process, signal.SIGKILL, _LAST_WORDS_S)
        failed = [said for process, said in zip(processes, saids, strict=True) if process.returncode]
        told = [text for text in map(runs.reason, failed) if text]
        if failed:
            raise Failed(next((text for text in told if "lost the other ranks" not in text), (told or ["no word"])[0]))

    @contextlib.contextmanager
    def _pinned(self, place: int) -> Iterator[None]:
        """While it is open, what this thread starts runs on the cores of this place; where there are more places than
        cores, places share them."""
        if not self._cores:
            yield
            return
        before = os.sched_getaffinity(0)
        first = place * self._threads
        os.sched_setaffinity(0, {self._cores[(first + i) % len(self._cores)] for i in range(self._threads)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Returns when all have ended, or one has failed and the others have had time to notice."""
    deadline = float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if deadline == float("inf") and any(process.returncode for process in processes):
            deadline = time.monotonic() + _LAST_WORDS_S
        time.sleep(_LOOK_EVERY_S)


def _end(process: subprocess.Popen[bytes], number: signal.Signals, patience_s: float) -> None:
    """Ends a process that still runs: by this signal, and after a while for certain."""
    if process.poll() is not None:
        return
    process.send_signal(number)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _world(ranks: int) -> list[dict[str, str]]:
    """The environment of each rank of a world on this machine, as torchrun would make it; a world of one has none."""
    alone = runs.environment_of_one(os.environ)
    if ranks == 1:
        return [alone]
    with listen(_LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": port}
    return [
        alone | {name: str(value) for name, value in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        for rank in range(ranks)
    ]


def _gpu(place: int) -> dict[str, str]:
    """What shows a process the GPU of this place alone."""
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name, "")
    return {name: visible.split(",")[place] if visible else str(place)}


def _loopback() -> str:
    """The interface of 127.0.0.1."""
    found = psutil.net_if_addrs().items()
    return next((name for name, all_of in found if any(one.address == _LOOPBACK for one in all_of)), "")


def _bandwidth(report: Path) -> float:
    pairs = json.loads(report.read_text())["pairs"]
    return min(float(pair["both_bytes_per_s"]) for pair in pairs)
