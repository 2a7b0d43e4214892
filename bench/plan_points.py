"""How far `paceline plan` is off on this machine: configurations that it was not calibrated on, drawn by a seed.

`python bench/plan_points.py --out points.jsonl --points 60` calibrates for each point with two models of other depths,
and runs it, both in turn for some seconds each. It appends a JSON line for each point and prints the median and the
95th percentile of the error. Started again, it continues after the lines that are there. It needs root, for the lab and
for the freezer of cgroup v1. The machine must do nothing else.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from paceline.base.process import environment_of_one
from paceline.cli.start import find_world
from paceline.config import Config, from_toml, to_toml
from paceline.model import cost
from paceline.record.console import Console
from paceline.tools.bench import runs
from paceline.tools.lab.network import BURST_S
from paceline.tools.plan import calibrate as calibration
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import Device, scaled
from paceline.tools.plan.plan import Plan, plan
from paceline.world.config import ParallelConfig
from paceline.world.group import DistributedGroup
from paceline.world.hierarchy import Hosts
from paceline.world.runtime import open_world

SEED = 2719
MOST_STEPS, RUN_S, WARM_UP = 400, 12.0, 2
LEAST_TURN_S, STEPS_IN_TURN, PASSES_IN_TURN = 2.0, 3, 12  # some steps are cut in two by a change of turns
TURNS, UNEQUAL_TURNS = 3, 8  # of a run, at least; a quota adds noise
OTHER_LAYERS = 3  # no shape has so many
VOCAB = 1024
QUOTA = 0.6  # of a core, of a slow host; a step under 0.35 scatters by 10%: the kernel throttles unevenly
SHAPES = {"2x128": (2, 128, 4, 128), "4x256": (4, 256, 4, 256), "6x384": (6, 384, 6, 256)}  # and the sequence length
GBIT = {"1gbit": 1.0, "300mbit": 0.3, "100mbit": 0.1}


@dataclass(frozen=True)
class Point:
    """One configuration."""

    shape: str
    arch: str
    ranks: int
    link: str  # of the lab's two hosts; empty: one host
    strategy: str
    wire: str
    accumulation: int
    slow: bool  # the second host has a quota

    def config(self) -> Config:
        layers, width, heads, seq_len = SHAPES[self.shape]
        micro = max(1, 2048 // seq_len)
        config = Config().replace("model", arch=self.arch, n_layer=layers, n_embd=width, n_head=heads)
        config = config.replace("data", seq_len=seq_len, tokenizer_vocab=VOCAB)
        config = config.replace(
            "train",
            eval_every=-1,
            sample_tokens=0,
            device_batch_size=micro,
            global_batch_size=micro * self.accumulation * self.ranks,
        )
        return config.replace("parallel", strategy=self.strategy, wire=self.wire, check_every=0, device="cpu")

    def cluster(self, speeds: tuple[float, ...] = ()) -> Cluster:
        if not self.link:
            return Cluster(ranks_per_host=self.ranks)
        return Cluster(
            hosts=2,
            ranks_per_host=self.ranks // 2,
            link_gbit=GBIT[self.link],
            latency_us=100,
            burst_ms=1e3 * BURST_S,
            speeds=speeds,
        )

    def command(self, config: Path) -> list[str]:
        train = ["train", "--config", str(config), "--out", str(config.with_suffix(""))]
        if not self.link:
            return [*runs.PACELINE, *train, "--nproc", str(self.ranks)]
        lab = ["lab", "--hosts", "2", "--nproc", str(self.ranks // 2), "--rate", self.link]
        return [*runs.PACELINE, *lab, *(["--cpu", f"1.0,{QUOTA}"] if self.slow else []), "--", *train]


def draw(count: int, seed: int) -> Iterator[Point]:
    """Yields different points, the same ones each time for a seed."""
    source, seen = random.Random(seed), set[Point]()
    while len(seen) < count:
        ranks = source.choice((1, 2, 4))
        link = source.choice(("", *GBIT)) if ranks > 1 else ""
        strategy, wire = source.choice((("ddp", "exact"), ("zero", "exact"), ("zero", "int8"), ("fsdp", "exact")))
        slow = bool(link) and ranks == 2 and source.random() < 0.5
        point = Point(
            shape=source.choice(tuple(SHAPES)),
            arch=source.choice(("gpt2", "llama")),
            ranks=ranks,
            link=link,
            strategy=strategy if ranks > 1 else "ddp",
            wire=wire if ranks > 1 else "exact",
            accumulation=source.choice((1, 4)),
            slow=slow,
        )
        if point not in seen:
            seen.add(point)
            yield point


class Frozen:
    """A command whose processes run only while it is thawed, by the kernel's freezer (cgroup v1)."""

    def __init__(self, command: list[str], folder: Path, name: str):
        self._group = Path("/sys/fs/cgroup/freezer", f"paceline-{os.getpid()}-{name}")
        self._group.mkdir()
        self._set("FROZEN")
        self._said = folder / f"{name}.said"
        enter = ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs; exec "$@"', "sh"]
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*enter, *command],
                stdout=said,
                stderr=said,
                env={**environment_of_one(os.environ), "PACELINE_LAB": name},  # labs of one name would be in the way
                cwd=folder,
            )
        self.peak_bytes = 0.0  # of its largest process, once it is over

    def __enter__(self) -> Self:
        return self

    def runs_for(self, seconds: float) -> bool:
        """Lets it run for so long, or to its end; returns whether it is over. Raises RuntimeError if it failed."""
        self._set("THAWED")
        until = time.monotonic() + seconds
        while not self.peak_bytes and time.monotonic() < until:
            time.sleep(0.01)
            ended, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if ended:
                self.peak_bytes = 1024.0 * usage.ru_maxrss
                if status:
                    raise RuntimeError(self._said.read_text(errors="replace")[-2000:])
        if not self.peak_bytes:
            self._set("FROZEN")
        return bool(self.peak_bytes)

    def __exit__(self, *error: object) -> None:
        """Ends what is left of it."""
        self._set("THAWED")
        while processes := (self._group / "cgroup.procs").read_text().split():
            for process in map(int, processes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.wait4(self._process.pid, os.WNOHANG)
            time.sleep(0.01)
        self._group.rmdir()

    def _set(self, state: str) -> None:
        (self._group / "freezer.state").write_text(state)
        while (self._group / "freezer.state").read_text().strip() != state:
            time.sleep(0.001)


def calibrate(config: Config, num_hosts: int, seconds: float, found: Path) -> None:
    """Calibrates as one of a launcher's ranks, which exchange as if they were on so many hosts: those of a host add up
    first, in other code than the ranks of one host, and send gradients in float32. On the lab's hosts the ranks share
    the cores, too. Rank 0 writes what was found."""
    env, _ = find_world("1", ParallelConfig())
    with open_world(config.parallel, env) as world:
        if num_hosts > 1:
            hosts = [f"host-{rank * num_hosts // world.world_size}" for rank in range(world.world_size)]
            assert isinstance(world.group, DistributedGroup)
            world.group.hosts = Hosts.of(hosts)
            facts = tuple(replace(each, host=host) for each, host in zip(world.facts, hosts, strict=True))
            world = replace(world, facts=facts)
        device = calibration.measure(world, config, Console(world.rank), seconds)
        if world.is_main:
            found.write_text(json.dumps(asdict(device)))


class Calibration(Frozen):
    """A calibration by so many ranks at once."""

    def __init__(self, config: Config, num_ranks: int, num_hosts: int, seconds: float, folder: Path):
        path, self._found = folder / "calibrated.toml", folder / "calibrated.json"
        path.write_text(to_toml(config))
        launcher = [sys.executable]
        if num_ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        as_hosts = ["--calibrate-as-hosts", str(num_hosts if num_hosts < num_ranks else 1), "--config", str(path)]
        given = ["--out", str(self._found), "--for-s", str(seconds), *as_hosts]
        super().__init__([*launcher, str(Path(__file__).resolve()), *given], folder, "calibrated")

    def device(self) -> Device:
        return Device(**json.loads(self._found.read_text()))


def pass_rate(device: Device, config: Config) -> float:
    """Returns the seconds for a token of forward and backward."""
    passes, times = (device.forward, device.backward), {"block tokens": config.model.n_layer}
    rates = [rate for each in passes for rate in each[config.model.arch].items()]
    return sum(times.get(kind, 1) * seconds for kind, seconds in rates)


def unequal(device: Device, point: Point, config: Config, run: Path) -> tuple[Device, Cluster]:
    """Returns the faster one of two unequal hosts, and both with their speeds, by a run of a model of another depth on
    them, whose config is given. No rank alone shows it: they share a core's units, and a quota of 0.6 is no speed of
    0.6. Passes show the speeds. What the slow host does while the fast one waits, its update and messages, is quicker
    than that: it has the core's units for itself then."""
    rows = steady_rows(run)
    passes_ms = [
        statistics.median(row["rank_forward_ms"][rank] + row["rank_backward_ms"][rank] for row in rows)
        for rank in (0, 1)
    ]
    tokens = config.train.global_batch_size * config.data.seq_len / 2  # of each rank
    fast = device.slower(passes_ms[0] / 1e3 / tokens / pass_rate(device, config))
    cluster = point.cluster((1.0, passes_ms[0] / passes_ms[1]))
    measured_s, (low, high) = statistics.median(row["step_ms"] for row in rows) / 1e3, (0.0, 2.0)
    for _ in range(20):
        middle = (low + high) / 2
        is_over = plan(config, cluster, beside_passes(fast, middle), vocab_size=VOCAB).step_s > measured_s
        low, high = (low, middle) if is_over else (middle, high)
    return beside_passes(fast, low), cluster


def beside_passes(device: Device, factor: float) -> Device:
    """Returns a device whose updates and messages take so many times as long."""
    update = {name: scaled(rates, factor) for name, rates in device.update.items()}
    return replace(device, update=update, exchange=scaled(device.exchange, factor))


def steady_rows(run: Path) -> list[dict[str, Any]]:
    """Returns a run's steps without the first ones, and without those that were frozen meanwhile."""
    rows = runs.training_rows(run)[WARM_UP:]
    middle = statistics.median(row["step_ms"] for row in rows)
    return [row for row in rows if row["step_ms"] < 1.5 * middle]


def guessed_s(point: Point, config: Config) -> tuple[float, float]:
    """Returns about how long a step takes, and a micro-batch of all ranks at once."""
    size = cost.num_parameters(replace(config.model, vocab_size=VOCAB)).total
    passes_s = 6 * size * config.train.global_batch_size * config.data.seq_len / 4e11
    sent = {"ddp": 4.0, "zero": 2.0, "fsdp": 2.0 + 2.0 * point.accumulation}[point.strategy]  # bytes of an element
    sent = 0.5 if point.wire == "int8" else sent
    link_s = sent * size / (GBIT[point.link] * 1e9 / 8) if point.link else 0.0
    return passes_s / (QUOTA if point.slow else 1.0) + link_s, passes_s / point.accumulation


def measure(point: Point, interpreter_bytes: float) -> dict[str, Any]:
    """Returns the prediction, and what the run took. Calibration and run alternate, each frozen while the other one
    runs, for some steps at a time: the machine's speed drifts within seconds."""
    config, cluster = point.config(), point.cluster()
    step_s, pass_s = guessed_s(point, config)
    turn_s = max(LEAST_TURN_S, STEPS_IN_TURN * step_s, PASSES_IN_TURN * pass_s)
    run_s = max(RUN_S, (UNEQUAL_TURNS if point.slow else TURNS) * turn_s)
    config = config.replace("train", steps=min(MOST_STEPS, round(run_s / step_s)))
    calibrated = config.replace("parallel", shared_memory=not point.link)  # as between hosts
    trained = {"run": config, "other": config.replace("model", n_layer=OTHER_LAYERS)}
    with tempfile.TemporaryDirectory(prefix="paceline-points-") as scratch:
        folder = Path(scratch)
        files = [folder / f"{name}.toml" for name in trained][: 1 + point.slow]
        for path in files:
            path.write_text(to_toml(trained[path.stem]))
        with contextlib.ExitStack() as stack:
            together = stack.enter_context(Calibration(calibrated, point.ranks, cluster.hosts, run_s, folder))
            run, *beside = [stack.enter_context(Frozen(point.command(path), folder, path.stem)) for path in files]
            going = [together, run, *beside]
            while going:
                going = [each for each in going if not each.runs_for(turn_s)]
        device = together.device()
        if point.slow:
            device, cluster = unequal(device, point, trained["other"], folder / "other")
        steady = steady_rows(folder / "run")
    return row_of(point, plan(config, cluster, device, vocab_size=VOCAB), steady, run.peak_bytes - interpreter_bytes)


def row_of(point: Point, found: Plan, steady: list[dict[str, Any]], peak: float) -> dict[str, Any]:
    """Returns predicted and measured. peak: bytes of the largest process, less the interpreter's."""
    step_ms = statistics.median(row["step_ms"] for row in steady)
    measured = {
        part: statistics.median(statistics.fmean(row[f"rank_{name}_ms"]) for row in steady)
        for part, name in (("forward", "forward"), ("backward", "backward"), ("exposed communication", "exposed_comm"),
                           ("optimizer", "optim"))
    }  # fmt: skip
    return {
        **asdict(point),
        "predicted_ms": 1e3 * found.step_s,
        "measured_ms": step_ms,
        "error": 1e3 * found.step_s / step_ms - 1,
        "predicted_bytes": sum(found.memory.values()),
        "measured_bytes": peak,
        "memory_error": sum(found.memory.values()) / peak - 1,
        "predicted_part_ms": {part: 1e3 * seconds for part, seconds in found.parts.items()},
        "measured_part_ms": measured,
        "speeds": found.cluster.speeds,
        "steps": len(steady),
        "time": time.strftime("%H:%M:%S"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--for-s", type=float, default=1e9, help="start no point after so many seconds")
    parser.add_argument("--calibrate-as-hosts", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.calibrate_as_hosts:
        config = from_toml(given.config.read_text(), "config", Config())
        calibrate(config, given.calibrate_as_hosts, given.for_s, given.out)
        return
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    points = list(draw(given.points, given.seed))
    # Its own peak: what wait4 says of a process is at least what its parent had, this one with torch and more.
    say_peak = "import paceline.cli.start, torch; print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    interpreter = subprocess.run([sys.executable, "-c", say_peak], stdout=subprocess.PIPE, check=True, text=True)
    interpreter_bytes = 1024.0 * int(interpreter.stdout)
    begun = time.monotonic()
    for number in range(len(rows), len(points)):
        if time.monotonic() - begun > given.for_s:
            break
        try:
            rows.append(measure(points[number], interpreter_bytes))
        except (RuntimeError, OSError) as error:
            rows.append({**asdict(points[number]), "failed": str(error)})
        with given.out.open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps({name: value for name, value in rows[-1].items() if not name.endswith("part_ms")}), flush=True)
    for name in ("error", "memory_error"):
        errors = sorted(abs(row[name]) for row in rows if name in row)
        if errors:
            worst = errors[min(len(errors) - 1, round(0.95 * (len(errors) - 1)))]
            print(f"{name}: {len(errors)} points, median {statistics.median(errors):.1%}, 95th percentile {worst:.1%}")


if __name__ == "__main__":
    main()
