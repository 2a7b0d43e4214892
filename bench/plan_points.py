"""How far `paceline plan` is off on this machine: configurations that it was not calibrated on, drawn by a fixed seed.

`python bench/plan_points.py --out points.jsonl --points 60` measures, for each point, the layers of its model at two
other depths, predicts, and then runs. It appends a JSON line for each point and prints the median and the 95th
percentile of the error. Started again, it continues after the lines that are there. Links and unequal hosts need root
(the lab). The machine must do nothing else.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.base.status import environment_of_one
from paceline.cli.start import find_world
from paceline.config import Config, from_toml, to_toml
from paceline.record.console import Console
from paceline.tools.bench import runs
from paceline.tools.plan import calibrate
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import Device, calibration, store
from paceline.tools.plan.plan import plan
from paceline.world.config import ParallelConfig
from paceline.world.group import DistributedGroup
from paceline.world.hierarchy import Hosts
from paceline.world.runtime import open_world

SEED = 1123
STEPS, WARM_UP = 12, 2
LEAST_STEPS, RUN_S = 4, 8.0  # a run with slow steps makes fewer
SLOW_SPEED = 0.32  # that a quota of 0.35 of a core left on three runs of another shape
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
    slow: bool  # the second host has 0.35 of a core

    def config(self) -> Config:
        layers, width, heads, seq_len = SHAPES[self.shape]
        micro = max(1, 2048 // seq_len)
        config = Config().replace("model", arch=self.arch, n_layer=layers, n_embd=width, n_head=heads)
        config = config.replace("data", seq_len=seq_len, tokenizer_vocab=1024)
        config = config.replace(
            "train",
            steps=STEPS,
            eval_every=-1,
            sample_tokens=0,
            device_batch_size=micro,
            global_batch_size=micro * self.accumulation * self.ranks,
        )
        return config.replace("parallel", strategy=self.strategy, wire=self.wire, check_every=0, device="cpu")

    def cluster(self) -> Cluster:
        if not self.link:
            return Cluster(ranks_per_host=self.ranks)
        speeds = (1.0, SLOW_SPEED) if self.slow else ()
        return Cluster(
            hosts=2, ranks_per_host=self.ranks // 2, link_gbit=GBIT[self.link], latency_us=100, speeds=speeds
        )

    def command(self, folder: Path) -> list[str]:
        train = ["train", "--config", str(folder / "config.toml"), "--out", str(folder / "run")]
        if not self.link:
            return [*runs.PACELINE, *train, "--nproc", str(self.ranks)]
        lab = ["lab", "--hosts", "2", "--nproc", str(self.ranks // 2), "--rate", self.link]
        return [*runs.PACELINE, *lab, *(["--cpu", "1.0,0.35"] if self.slow else []), "--", *train]


def draw(count: int) -> Iterator[Point]:
    """Yields different points, the same ones each time."""
    source, seen = random.Random(SEED), set()
    while len(seen) < count:
        ranks = source.choice((1, 2, 4))
        link = source.choice(("", *GBIT)) if ranks > 1 else ""
        strategy, wire = source.choice((("ddp", "exact"), ("zero", "exact"), ("zero", "int8"), ("fsdp", "exact")))
        slow = bool(link) and ranks == 2 and source.random() < 0.25
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


def peak_bytes(command: list[str], folder: Path) -> float:
    """Runs a command; returns the peak resident memory of its largest process. Raises RuntimeError if it fails."""
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment_of_one(os.environ), cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError((folder / "said").read_text(errors="replace")[-2000:])
    return 1024.0 * usage.ru_maxrss


def measured_device(config: Config, num_ranks: int, num_hosts: int) -> Device:
    """Returns this machine's device, measured now for this config with so many ranks at once."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "config.toml"
        path.write_text(to_toml(config))
        command = [*runs.PACELINE, "plan", "--config", str(path), "--calibrate", "--ranks", str(num_ranks)]
        if 1 < num_hosts < num_ranks:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
            command = [*launcher, __file__, "--out", str(path), "--calibrate-as-hosts", str(num_hosts)]
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, stdout=quiet, stderr=quiet, env=environment_of_one(os.environ))
    return calibration(config).device(num_ranks)


def calibrate_as_hosts(config: Config, num_hosts: int) -> None:
    """Calibrates as one of the ranks of a launcher, which exchange as if they were on so many hosts: those of a host
    add up first, in other code than the ranks of one host, and send gradients in float32. On the lab's hosts the ranks
    share the cores, too."""
    env, _ = find_world("1", ParallelConfig())
    with open_world(ParallelConfig(device="cpu", shared_memory=False), env) as world:
        hosts = [f"host-{rank * num_hosts // world.world_size}" for rank in range(world.world_size)]
        assert isinstance(world.group, DistributedGroup)
        world.group.hosts = Hosts.of(hosts)
        facts = tuple(replace(each, host=host) for each, host in zip(world.facts, hosts, strict=True))
        device = calibrate.measure(replace(world, facts=facts), config, Console(world.rank))
        if world.is_main:
            store(config, world.world_size, device)


def measure(point: Point, interpreter_bytes: float) -> dict[str, Any]:
    """Returns the prediction, made first, and what the run took."""
    config = point.config()
    over_sockets = config.replace("parallel", shared_memory=False)  # as between hosts
    device = measured_device(over_sockets if point.link else config, point.ranks, point.cluster().hosts)
    found = plan(config, point.cluster(), device, vocab_size=1024)
    config = config.replace("train", steps=max(LEAST_STEPS, min(STEPS, round(RUN_S / found.step_s))))
    with tempfile.TemporaryDirectory(prefix="paceline-points-") as scratch:
        folder = Path(scratch)
        (folder / "config.toml").write_text(to_toml(config))
        peak = peak_bytes(point.command(folder), folder) - interpreter_bytes
        steady = runs.training_rows(folder / "run")[WARM_UP:]
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
        "steps": len(steady),
        "time": time.strftime("%H:%M:%S"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--no-lab", action="store_true", help="only points on one host")
    parser.add_argument("--for-s", type=float, default=1e9, help="start no point after so many seconds")
    parser.add_argument("--calibrate-as-hosts", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.calibrate_as_hosts:
        calibrate_as_hosts(from_toml(given.out.read_text(), "config", Config()), given.calibrate_as_hosts)
        return
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    points = [point for point in draw(given.points) if not (given.no_lab and point.link)]
    with tempfile.TemporaryDirectory() as scratch:
        interpreter_bytes = peak_bytes([sys.executable, "-c", "import paceline.cli.start, torch"], Path(scratch))
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
