"""What records and checkpoints of a world of 1,024 ranks cost: the real code, with made-up rows, slices and folders.

    python bench/scale_records.py

Host time of a step's records (processor time, on rank 0 and on another rank), the bytes of
a row, the manifest of a 70B model under fsdp, a resume after 100,000 steps, and a save beside 10,000 kept checkpoints.
"""

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.checkpoint import manifest as mf
from paceline.checkpoint import retention
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.publish import publish
from paceline.checkpoint.steps import MANIFEST, folder_name
from paceline.config import Config
from paceline.record.console import Console
from paceline.record.folder import RunFolder, create
from paceline.replica.result import StepResult, StepTimes
from paceline.train.progress import Progress
from paceline.train.recorder import Recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    num_ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as base:
        for rank in (0, 1):
            spent_ms = step_ms(Path(base) / f"rows-{rank}", rank, num_ranks)
            report(f"records of a step, rank {rank}, ms", statistics.median(spent_ms))
            report("the least (other programs beside)", min(spent_ms))
        metrics, ranks = RunFolder(Path(base) / "rows-0").metrics, RunFolder(Path(base) / "rows-0").ranks
        report("row of metrics.jsonl, bytes", len(metrics.read_bytes().splitlines()[-1]))
        report("bytes of ranks.jsonl a step", ranks.stat().st_size / 300)
        row = metrics.read_bytes().splitlines()[-1]
        seconds, megabytes = resume(Path(base) / "long", json.loads(row))
        report("resume after 100,000 steps, s", seconds)
        report("and memory, MB", megabytes)
        num_bytes, seconds = manifest_70b(Path(base) / "large", num_ranks)
        report("manifest of 70B, fsdp, bytes", num_bytes)
        report("to publish it, s of a core", seconds)
        report("to read it, s", took(lambda: mf.read_manifest(Path(base) / "large" / folder_name(1))))
        report("retention beside 10,000, s", beside(Path(base) / "kept", 10_000))


def report(what: str, value: float) -> None:
    print(f"{what:36}{value:14,.3f}", flush=True)


def took(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def step_ms(path: Path, rank: int, num_ranks: int) -> list[float]:
    """Returns the processor time of each `Recorder.step` of 200 after 100."""
    draw = random.Random(0)
    peers = [SimpleNamespace(host=f"host-{number // 8}") for number in range(num_ranks)]
    world: Any = SimpleNamespace(rank=rank, is_main=rank == 0, world_size=num_ranks, peers=peers)
    settings: Any = SimpleNamespace(config=Config(), tokens_per_step=1 << 22, num_steps=300, share_done=lambda _: 0.5)
    console, folder = Console(rank), create(path)
    console.advance = lambda *_: None  # type: ignore[method-assign]
    recorder = Recorder(world, folder, console, settings, None)
    results = []
    for _ in range(20):
        by_rank = [
            StepTimes(1.0, 90 + draw.random(), 180 + draw.random(), 5.0, 30.0, 9.0, 0.0, 1e9, 290 + draw.random())
            for _ in range(num_ranks)
        ]
        results.append(
            StepResult(
                loss=2.0, grad_norm=1.0, weight=1.0, weights=[], skipped=None, stop_reason=None, numbers=[],
                times=by_rank[rank], by_rank=by_rank,
            )
        )  # fmt: skip
    spent_ms = []
    for step in range(1, 301):
        began = time.thread_time()
        recorder.step(Progress(step=step), results[step % 20], [4] * num_ranks, 0.1, 1.0)
        spent_ms.append((time.thread_time() - began) * 1e3)
    folder.close()
    return spent_ms[100:]


def manifest_70b(checkpoints: Path, num_ranks: int) -> tuple[int, float]:
    """Publishes a checkpoint of Llama 70B's tensors, each divided over all ranks by rows; its files are empty."""
    d, h, vocab = 8192, 28672, 128256
    of_layer = {"q": (d, d), "k": (1024, d), "v": (1024, d), "o": (d, d), "up": (h, d), "gate": (h, d), "down": (d, h)}
    of_layer |= {"norm_1": (d,), "norm_2": (d,)}
    shapes = {f"layers.{layer}.{name}.weight": shape for layer in range(80) for name, shape in of_layer.items()}
    shapes |= {"embedding.weight": (vocab, d), "head.weight": (vocab, d), "norm.weight": (d,)}
    folder = checkpoints / ".unfinished"
    folder.mkdir(parents=True)
    records = []
    for writer in range(num_ranks):
        slices = []
        for name, shape in shapes.items():
            rows, width = shape[0], shape[1] if len(shape) > 1 else 1
            chunk = -(-rows // num_ranks) * width
            start, stop = min(writer * chunk, rows * width), min((writer + 1) * chunk, rows * width)
            if start < stop:
                slices.append((name, start, stop))
        parts = {
            "weights": [[*item, "float32"] for item in slices],
            "optimizer": [
                [f"{name}/{moment}", start, stop, "float32"]
                for name, start, stop in slices
                for moment in ("exp_avg", "exp_avg_sq")
            ],
        }
        files = {mf.file_name(kind, writer, num_ranks): {"bytes": 0, "sha256": "0" * 64} for kind in mf.KINDS[:2]}
        for name in files:
            (folder / name).touch()
        records.append({"files": files, "slices": parts})
    began = time.thread_time()  # by the clock it takes as long as training leaves it
    publish(checkpoints, folder, 1, records, shapes, {"config": {}}, CheckpointConfig())
    return (checkpoints / folder_name(1) / MANIFEST).stat().st_size, time.thread_time() - began


def resume(path: Path, row: dict[str, Any]) -> tuple[float, float]:
    """Returns seconds and MB of a resume at step 99,990: it drops later rows, and looks for validation losses."""
    folder = create(path)
    with folder.metrics.open("w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps(row | {"step": step}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "val_loss": 2.0}) + "\n")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = took(lambda: (folder.forget_after(99_990), retention.recorded_losses(folder.checkpoints)))
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024


def beside(checkpoints: Path, num_kept: int) -> float:
    """Returns what the index, `best` and pruning take in one save."""
    facts: dict[str, Any] = {"files": {"weights-00000-of-00001.safetensors": {"bytes": 0}}, "val_loss": 2.0}
    lines = []
    for step in range(1, num_kept + 1):
        folder = checkpoints / folder_name(step)
        folder.mkdir(parents=True)
        (folder / MANIFEST).touch()
        lines.append(json.dumps({"step": step, "bytes": 0, "val_loss": 2.0, "due_steps": [step]}))
    (checkpoints / "index.jsonl").write_text("\n".join(lines) + "\n")
    config = CheckpointConfig(keep_every=1, keep_best=True)
    return took(lambda: retention.add(checkpoints, {"step": num_kept, **facts}, config))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
