"""`paceline bench scaling`: measures the gain of a second rank or host.

Every row of the table is a `paceline train` command and its metrics.jsonl. All ranks have equally many threads and
their own cores, in every world. A world is compared with:

    alone       one rank; the ideal of n ranks is n times its tokens/s, of as many as there are cores for
    apart       n such ranks at once in n worlds. They share what no program can divide: memory bandwidth, caches, clock
                rate, heat. What they lack of the ideal is the machine's
    together    the n ranks of one world. What they lack of `apart` is synchronisation: waiting for each other, and,
                where the batch is divided, what each rank still does in full

so efficiency = machine x synchronisation. Strong scaling divides the step's batch; weak scaling keeps a rank's share.
All worlds take turns in each round, since a machine's speed may drift.

`--compare ...` and `--cpu 1.0,0.35` measure variants of a run on all hosts of a lab. Their ideal is the sum of hosts
that train at the same time and exchange nothing, so that they share the machine's memory and caches as in one world:
each its part of the batch, or the whole batch if they have shares of a core. So fast hosts make more steps.
"""

import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import string
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.base.errors import RunError
from paceline.base.net import LOOPBACK, listen
from paceline.base.process import RANK_VARIABLES, environment_of_one
from paceline.config import to_toml
from paceline.record.balance import speeds
from paceline.record.console import Console
from paceline.tools.bench import runs
from paceline.tools.bench.runs import Failed
from paceline.tools.bench.worlds import Setup, World
from paceline.world.env import interface_of

WARM_UP_STEPS = 3  # left out: the first step allocates, the next two are still slow
_ADAPTING_STEPS = 40  # left out of a variant with shares by speed: changes after 10 steps, and a small one after 34
_APART_MS = 1000.0  # left out at either end, since separate ranks start and end at slightly different times
# The smallest model and no large collectives: only the bandwidth between two ranks is needed.
_PROBE = ("bench", "link", "--preset", "tiny", "--time-budget", "5", "--max-bytes", "65536")
# The shell's command that makes a host of a lab a world of one.
_ALONE = shlex.join(["exec", "env", *(f"--unset={name}" for name in RANK_VARIABLES), *runs.PACELINE, "train"])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run: medians of its steps after the warm-up. Lists are by rank."""

    tokens_per_s: float = 0.0
    step_ms: float = 0.0
    comm_ms: float = 0.0  # with a collective under way on rank 0
    exposed_ms: float = 0.0  # of which a rank waited; mean over ranks
    spread_ms: float = 0.0  # between the first and the last rank to reach the collective
    comm_bytes: float = 0.0  # sent by a rank
    sequences: tuple[int, ...] = ()  # in the last step
    idle_frac: tuple[float, ...] = ()  # waiting for other ranks or for the network


# ---- measuring ----


@dataclass
class Measurements:
    samples: dict[World, list[tuple[Sample, ...]]] = field(default_factory=dict)  # by round; of ranks apart one each
    problems: dict[World, str] = field(default_factory=dict)
    # By hosts and rate: payload bytes a second in each direction, while both are busy; None: not measured.
    links: dict[tuple[int, str], float | None] = field(default_factory=dict)
    seconds: float = 0.0


def measure(setup: Setup, console: Console) -> Measurements:
    """Returns the results of all worlds in all rounds; takes minutes. Raises RunError if the first world fails, to
    which all else is compared. Failures of other worlds are recorded in their rows."""
    began, measured = time.monotonic(), Measurements()
    with runs.tidy(), tempfile.TemporaryDirectory(prefix="paceline-scaling-") as scratch:
        bench = _Bench(setup, Path(scratch), measured)
        describe = "{0.label}, {0.batch} sequences".format
        with console.progress(None, transient=True):
            for world in runs.in_turn(setup.worlds(), setup.rounds, console, describe):
                if world not in measured.problems:
                    bench.measure_once(world)
    measured.seconds = time.monotonic() - began
    return measured


class _Bench:
    """Runs worlds, one at a time, each in its own folder. Starts ranks with torchrun's environment instead of
    `--nproc`, which does not pin them."""

    def __init__(self, setup: Setup, scratch: Path, measured: Measurements):
        self._setup, self._scratch, self._measured = setup, scratch, measured
        self._num_folders = 0
        places, cores = range(setup.num_places), setup.cores
        self._places = [cores[i * setup.threads : (i + 1) * setup.threads] for i in places] if cores else []

    def measure_once(self, world: World) -> None:
        measured, link = self._measured, (world.hosts, world.rate)
        try:
            samples = self._train_apart(world) if world.is_apart else (self._train(world),)
            measured.samples.setdefault(world, []).append(samples)
        except Failed as error:
            measured.problems[world] = str(error)
            if world == self._setup.worlds()[0]:
                raise RunError(f"{world.label}, to which all else is compared, failed: {error}") from None
        else:
            if world.ranks > 1 and not (world.is_apart or world.variant) and link not in measured.links:
                measured.links[link] = self._bandwidth(world)

    def _train(self, world: World) -> Sample:
        folder, config = self._folder(), self._setup.config_of(world)
        adapting = _ADAPTING_STEPS if world.variant and config.parallel.shares == "auto" else 0
        self._run(world, *self._training(folder, world, world.batch, adapting))
        return summary(runs.training_rows(folder / "run"), world.batch * config.data.seq_len, adapting)

    def _train_apart(self, world: World) -> tuple[Sample, ...]:
        if world.hosts > 1:
            return self._train_hosts_apart(world)
        setup, alone = self._setup, environment_of_one(os.environ)
        margin = math.ceil(_APART_MS / self._measured.samples[setup.alone][-1][0].step_ms)
        folders = [self._folder() for _ in range(world.ranks)]
        commands = [
            ([*runs.PACELINE, *self._training(folder, world, setup.batch, 2 * margin)], alone | self._gpu(place))
            for place, folder in enumerate(folders)
        ]
        runs.run_at_once(commands, folders[0], self._cores(world.ranks))
        tokens = setup.batch * setup.config.data.seq_len
        return tuple(summary(runs.training_rows(folder / "run"), tokens, margin, margin) for folder in folders)

    def _train_hosts_apart(self, world: World) -> tuple[Sample, ...]:
        """Trains on each host of the lab alone, all at once. Hosts that are n times as fast make n times as many steps,
        so that they end at about the same time."""
        setup, folder, batch = self._setup, self._folder(), world.batch // world.ranks
        cores = list(map(float, setup.cpu)) or [1.0] * world.hosts
        hosts = [folder / name for name in string.ascii_lowercase[: world.hosts]]
        for host, core in zip(hosts, cores, strict=True):
            host.mkdir()
            self._training(host, world, batch, round(setup.steps * core / min(cores)) - setup.steps)
        host_out = f"{folder}/$(hostname)"
        self._run(world, "exec", "sh", "-c", f'{_ALONE} --config "{host_out}/config.toml" --out "{host_out}/run"')
        tokens = batch * setup.config.data.seq_len
        return tuple(summary(runs.training_rows(host / "run"), tokens) for host in hosts)

    def _bandwidth(self, world: World) -> float | None:
        """Returns payload bytes a second of the slowest pair in each direction; None: cannot be measured."""
        report = self._folder() / "link.json"
        with contextlib.suppress(Failed):
            # On one host any two ranks will do, as loopback is the same for all.
            probe = (*_PROBE, "--parallel.device", world.device, "--json", str(report))
            self._run(replace(world, ranks=max(2, world.hosts)), *probe)
            return min(float(pair["bytes_per_s"]) for pair in json.loads(report.read_text())["pairs"])
        return None

    def _training(self, folder: Path, world: World, batch: int, more_steps: int = 0) -> list[str]:
        setup, config = self._setup, self._setup.config_of(world)
        micro_batch = min(config.train.device_batch_size, batch)
        sizes = {"global_batch_size": batch, "global_batch_tokens": 0, "device_batch_size": micro_batch}
        if world.is_apart and batch < setup.batch:
            sizes["layered_micro_batches"] = 1
        config = runs.only_steps(config, setup.steps + more_steps, **sizes)
        config = config.replace("parallel", threads=setup.threads, device=world.device, interface="", expect_ranks=0)
        (folder / "config.toml").write_text(to_toml(config))
        return ["train", "--config", str(folder / "config.toml"), "--out", str(folder / "run")]

    def _run(self, world: World, *verb: str) -> None:
        """Runs a paceline command as all ranks of a world. Raises Failed, also if this machine cannot make a lab."""
        alone, folder = environment_of_one(os.environ), self._folder()
        if world.hosts > 1:
            lab = ["lab", "--hosts", str(world.hosts), "--nproc", str(world.ranks // world.hosts), "--rate", world.rate]
            if self._setup.cpu:
                lab += ["--cpu", ",".join(self._setup.cpu)]
            runs.run_at_once([([*runs.PACELINE, *lab, "--", *verb], alone)], folder, end_by=signal.SIGTERM)
            return
        commands = [([*runs.PACELINE, *verb], alone | ranks) for ranks in _environments(world.ranks)]
        runs.run_at_once(commands, folder, self._cores(world.ranks))

    def _folder(self) -> Path:
        self._num_folders += 1
        folder = self._scratch / str(self._num_folders)
        folder.mkdir()
        return folder

    def _cores(self, ranks: int) -> list[tuple[int, ...]]:
        return [self._places[rank % len(self._places)] for rank in range(ranks)] if self._places else []

    def _gpu(self, place: int) -> dict[str, str]:
        """Returns the environment that shows a process only the GPU of this place."""
        if self._setup.device != "cuda":
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {"CUDA_VISIBLE_DEVICES": visible.split(",")[place] if visible else str(place)}


def _environments(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    loopback = interface_of(LOOPBACK)
    common = {name: str(value) for name, value in world.items()}
    common |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def summary(rows: Sequence[dict[str, Any]], tokens: int, first: int = 0, last: int = 0) -> Sample:
    """Returns medians of a run's rows of metrics.jsonl, without the warm-up, and `first` and `last` more at the ends.
    tokens: of a step. Raises Failed if none is left."""
    steady = rows[WARM_UP_STEPS + first : len(rows) - last]
    if not steady:
        raise Failed(f"it left {len(rows)} steps in metrics.jsonl")

    def median(values: Iterable[float]) -> float:
        return float(statistics.median(values))

    step_ms = median(row["step_ms"] for row in steady)
    balance = speeds(steady)
    return Sample(
        tokens_per_s=1e3 * tokens / step_ms,
        step_ms=step_ms,
        comm_ms=median(row["comm_ms"] for row in steady),
        exposed_ms=median(statistics.fmean(row["rank_exposed_comm_ms"]) for row in steady),
        spread_ms=median(max(row["rank_compute_ms"]) - min(row["rank_compute_ms"]) for row in steady),
        comm_bytes=median(row["comm_bytes"] for row in steady),
        sequences=tuple(rows[-1]["rank_sequences"]),
        idle_frac=tuple(balance.idle_frac) if balance else (),
    )
