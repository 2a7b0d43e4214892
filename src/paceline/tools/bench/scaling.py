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
"""

import contextlib
import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.base import units
from paceline.base.cores import physical_cores
from paceline.base.errors import RunError, UserError
from paceline.base.net import listen
from paceline.base.status import environment_of_one
from paceline.config import Config, to_toml
from paceline.record.console import Console
from paceline.tools.bench import runs
from paceline.tools.bench.runs import Failed
from paceline.world.cores import usable_cores
from paceline.world.device import choose_device, count_gpus
from paceline.world.env import interface_of

Kind = Literal["strong", "weak"]
WARM_UP_STEPS = 3  # left out: the first step allocates, the next two are still slow
_APART_MS = 1000.0  # left out at either end, since separate ranks start and end at slightly different times
_USUAL_RANKS = 4
_LOOPBACK = "127.0.0.1"
# The smallest model and no large collectives: only the bandwidth between two ranks is needed.
_PROBE = ("bench", "link", "--preset", "tiny", "--time-budget", "5", "--max-bytes", "65536")


@dataclass(frozen=True, kw_only=True)
class World:
    ranks: int
    batch: int  # sequences in a step of all ranks
    hosts: int = 1
    rate: str = ""  # of the lab's links
    is_apart: bool = False  # separate worlds of one rank
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def label(self) -> str:
        if self.hosts > 1:
            return f"{self.hosts} hosts, {self.rate}"
        noun = "GPU" if self.device == "cuda" else "rank"
        return units.plural(self.ranks, noun) + (" apart" if self.is_apart else "")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All worlds to measure, and the resources of each rank."""

    config: Config
    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]  # numbers of ranks on this machine; 1 first
    cores: tuple[int, ...]  # a hardware thread of each core; none: not pinned (GPUs, macOS)
    threads: int
    device: Literal["cpu", "cuda"]
    has_gpu: bool = False  # as well as the CPU ranks
    hosts: int = 0  # in the lab; 0: no lab row
    host_ranks: int = 1
    rates: tuple[str, ...] = ()
    steps: int = 12
    rounds: int = 3

    @property
    def batch(self) -> int:
        return sequences_of(self.config)

    @property
    def num_places(self) -> int:
        """Number of ranks with a core each."""
        return max(1, len(self.cores) // self.threads) if self.cores else self.counts[-1]

    @property
    def alone(self) -> World:
        return World(ranks=1, batch=self.batch, device=self.device)

    def apart(self, ranks: int) -> World:
        """Separate ranks, each as if alone; equal for both kinds."""
        return World(ranks=ranks, batch=self.batch * ranks, is_apart=True, device=self.device)

    def table(self, kind: Kind) -> list[World]:
        each = self.batch if kind == "weak" else 0
        many = self.hosts * self.host_ranks
        found = [World(ranks=n, batch=n * each or self.batch, device=self.device) for n in self.counts]
        if self.hosts:
            batch = many * each or self.batch
            found += [World(ranks=many, batch=batch, hosts=self.hosts, rate=rate) for rate in self.rates]
        if self.has_gpu:
            found.append(World(ranks=1, batch=self.batch, device="cuda"))
        return found

    def worlds(self) -> list[World]:
        """Returns all worlds to measure, each once: a single rank is the same in both kinds."""
        found = [world for kind in self.kinds for world in self.table(kind)]
        return list(dict.fromkeys([*found, *(self.apart(world.ranks) for world in found if world.ranks > 1)]))


def setup_here(
    config: Config, kinds: tuple[Kind, ...], *, max_ranks: int, hosts: int, rates: tuple[str, ...], **more: int
) -> Setup:
    """Returns the worlds to measure on this machine; max_ranks 0: one a core, at most 4, or one a GPU. Raises UserError
    if the devices or the batch are too small."""
    num_gpus, batch = count_gpus(), sequences_of(config)
    wanted, cores = config.parallel.device, usable_cores()
    is_cuda = wanted == "cuda" or (wanted == "auto" and num_gpus > 1)
    most = max_ranks or (max(1, num_gpus) if is_cuda else min(cores, _USUAL_RANKS))
    if is_cuda:
        choose_device("cuda", most - 1, most, most)
    setup = Setup(
        config=config,
        kinds=kinds,
        # 1, 2, 3, 4, powers of two, and the largest
        counts=tuple(n for n in range(1, most + 1) if n <= _USUAL_RANKS or n & (n - 1) == 0 or n == most),
        cores=() if is_cuda else physical_cores()[:cores],
        threads=config.parallel.threads or max(1, cores // most),
        device="cuda" if is_cuda else "cpu",
        has_gpu=not is_cuda and wanted == "auto" and num_gpus > 0,
        hosts=0 if is_cuda else hosts,
        host_ranks=max(1, most // hosts) if hosts else 1,
        rates=rates,
        **more,
    )
    most = max(most, setup.hosts * setup.host_ranks)
    if "strong" in kinds and batch < most:
        raise UserError(
            f"a step has {batch} sequences (--train.global-batch-size), too few for {most} ranks; give at least "
            "one to each, or measure --kind weak alone"
        )
    return setup


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of a world: medians of its steps after the warm-up."""

    tokens_per_s: float = 0.0  # the only value for separate ranks
    step_ms: float = 0.0
    comm_ms: float = 0.0  # with a collective under way on rank 0
    exposed_ms: float = 0.0  # of which a rank waited; mean over ranks
    spread_ms: float = 0.0  # between the first and the last rank to reach the collective
    comm_bytes: float = 0.0  # sent by a rank


def sequences_of(config: Config) -> int:
    """Returns the sequences of a step. Raises UserError if the config leaves them to the run."""
    batch = config.batch_in_sequences().train.global_batch_size
    if not batch:
        raise UserError(
            "bench scaling compares worlds by the same batch, and the config names none; give "
            "--train.global-batch-size, the sequences of a step"
        )
    return batch


# ---- measuring ----


@dataclass
class Found:
    samples: dict[World, list[Sample]] = field(default_factory=dict)
    problems: dict[World, str] = field(default_factory=dict)
    # By hosts and rate: payload bytes a second in each direction, while both are busy; None: not measured.
    links: dict[tuple[int, str], float | None] = field(default_factory=dict)
    seconds: float = 0.0


def measure(setup: Setup, console: Console) -> Found:
    """Returns the results of all worlds in all rounds; takes minutes. Raises RunError if the single rank fails, to
    which all else is compared. Failures of other worlds are recorded in their rows."""
    began, found = time.monotonic(), Found()
    with runs.tidy(), tempfile.TemporaryDirectory(prefix="paceline-scaling-") as scratch:
        bench = _Bench(setup, Path(scratch), found)
        describe = "{0.label}, {0.batch} sequences".format
        with console.progress(None, transient=True):
            for world in runs.in_turn(setup.worlds(), setup.rounds, console, describe):
                if world not in found.problems:
                    bench.measure_once(world)
    found.seconds = time.monotonic() - began
    return found


class _Bench:
    """Runs worlds, one at a time, each in its own folder. Starts ranks with torchrun's environment instead of
    `--nproc`, which does not pin them."""

    def __init__(self, setup: Setup, scratch: Path, found: Found):
        self._setup, self._scratch, self._found = setup, scratch, found
        self._num_folders = 0
        places, cores = range(setup.num_places), setup.cores
        self._places = [cores[i * setup.threads : (i + 1) * setup.threads] for i in places] if cores else []

    def measure_once(self, world: World) -> None:
        found, link = self._found, (world.hosts, world.rate)
        try:
            sample = self._train_apart(world) if world.is_apart else self._train(world)
            found.samples.setdefault(world, []).append(sample)
        except Failed as error:
            found.problems[world] = str(error)
            if world == self._setup.alone:
                raise RunError(f"one rank alone, to which all else is compared, failed: {error}") from None
        else:
            if world.ranks > 1 and not world.is_apart and link not in found.links:
                found.links[link] = self._bandwidth(world)

    def _train(self, world: World) -> Sample:
        folder = self._folder()
        self._run(world, *self._training(folder, world, world.batch))
        return summary(runs.training_rows(folder / "run"), world.batch * self._setup.config.data.seq_len)

    def _train_apart(self, world: World) -> Sample:
        setup, alone = self._setup, environment_of_one(os.environ)
        margin = math.ceil(_APART_MS / self._found.samples[setup.alone][-1].step_ms)
        folders = [self._folder() for _ in range(world.ranks)]
        commands = [
            ([*runs.PACELINE, *self._training(folder, world, setup.batch, 2 * margin)], alone | self._gpu(place))
            for place, folder in enumerate(folders)
        ]
        runs.run_at_once(commands, folders[0], self._cores(world.ranks))
        tokens = setup.batch * setup.config.data.seq_len
        samples = [summary(runs.training_rows(folder / "run"), tokens, margin, margin) for folder in folders]
        return Sample(tokens_per_s=sum(sample.tokens_per_s for sample in samples))

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
        config, setup = self._setup.config, self._setup
        micro_batch = min(config.train.device_batch_size, batch)
        sizes = {"global_batch_size": batch, "global_batch_tokens": 0, "device_batch_size": micro_batch}
        config = runs.only_steps(config, setup.steps + more_steps, **sizes)
        config = config.replace("parallel", threads=setup.threads, device=world.device, interface="", expect_ranks=0)
        (folder / "config.toml").write_text(to_toml(config))
        return ["train", "--config", str(folder / "config.toml"), "--out", str(folder / "run")]

    def _run(self, world: World, *verb: str) -> None:
        """Runs a paceline command as all ranks of a world. Raises Failed, also if this machine cannot make a lab."""
        alone, folder = environment_of_one(os.environ), self._folder()
        if world.hosts > 1:
            lab = ("lab", "--hosts", str(world.hosts), "--nproc", str(world.ranks // world.hosts), "--rate", world.rate)
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
    with listen(_LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": port}
    loopback = interface_of(_LOOPBACK)
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
    return Sample(
        tokens_per_s=1e3 * tokens / step_ms,
        step_ms=step_ms,
        comm_ms=median(row["comm_ms"] for row in steady),
        exposed_ms=median(statistics.fmean(row["rank_exposed_comm_ms"]) for row in steady),
        spread_ms=median(max(row["rank_compute_ms"]) - min(row["rank_compute_ms"]) for row in steady),
        comm_bytes=median(row["comm_bytes"] for row in steady),
    )
