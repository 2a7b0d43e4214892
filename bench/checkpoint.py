"""What a save costs a step: ours, a blocking torch.save of the same tensors, and torch's own asynchronous one (DCP).

GPT-2 124M with AdamW's state, float32: 1.5 GB. Between saves the model trains, so that the writing in the background
competes for the same cores. The three sides run in turn. `stall` is what the save costs the step it falls into: the
time until the call returns, and by how much the next forward, backward and update take longer than those without a
save (the median of steps before and after it). `total` adds up the lengthening of every step until the save is on the
disk; divided by 50 steps it is the slowdown of a run that saves every 50. `memory` is what the first save of each side
added to the process at its peak: the later ones may use it again. At last a smaller model really saves every 50 steps,
against itself without.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from side import show, show_header

from paceline.base.ownership import Slice
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.save import Saver
from paceline.model.config import ModelConfig
from paceline.model.gpt import build

INTERVAL = 50  # steps from save to save

Wait = Callable[[], object]


class Trainee:
    """A model that trains on made-up tokens."""

    def __init__(self, config: ModelConfig, batch: int, seq_len: int, dtype: torch.dtype):
        self.model = build(config, 0, "cpu")
        self.model.compute_dtype = dtype
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(config.vocab_size, (batch, seq_len + 1))

    def step(self, before_update: Wait = lambda: None) -> float:
        """Makes an update and returns its seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        (self.model(self.tokens[:, :-1], self.tokens[:, 1:]) / self.tokens[:, 1:].numel()).backward()
        before_update()
        self.optimizer.step()
        return time.perf_counter() - began

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns weights and optimizer state by name."""
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        state = {
            f"{name}/{moment}": self.optimizer.state[parameter][moment]
            for name, parameter in self.model.named_parameters()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return weights, state


class Ours:
    """The checkpoint room, one writer."""

    def __init__(self, trainee: Trainee, folder: Path):
        self.trainee, self.step = trainee, 0
        self.saver = Saver(folder, CheckpointConfig(), 0, 1, token="bench")
        self.waited: list[float] = []

    def save(self) -> None:
        self.step += 1
        weights, state = self.trainee.tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.saver.begin(self.step, {"weights": _slices(weights), "optimizer": _slices(state)}, shapes, {})

    def before_update(self) -> None:
        self.waited.append(self.saver.wait_copied())

    def is_done(self) -> bool:
        return not self.saver.is_busy

    def end(self) -> None:
        outcome = self.saver.take_outcome()
        assert outcome is not None
        assert outcome.problem is None, outcome.problem


class Blocking:
    """torch.save, as most training scripts do it: no fsync, nothing compared."""

    def __init__(self, trainee: Trainee, folder: Path):
        self.trainee, self.path = trainee, folder / "state.pt"

    def save(self) -> None:
        torch.save(self.trainee.tensors(), self.path)

    def before_update(self) -> None: ...

    def is_done(self) -> bool:
        return True

    def end(self) -> None:
        self.path.unlink()


class Dcp:
    """torch.distributed.checkpoint.async_save, with a Gloo group of its own, as its documentation asks."""

    def __init__(self, trainee: Trainee, folder: Path):
        self.trainee, self.folder = trainee, folder / "dcp"
        self.group = dist.new_group(backend="gloo")
        self.future: Any = None

    def save(self) -> None:
        weights, state = self.trainee.tensors()
        self.future = dcp.async_save({**weights, **state}, checkpoint_id=self.folder, process_group=self.group)

    def before_update(self) -> None: ...

    def is_done(self) -> bool:
        return bool(self.future.done())

    def end(self) -> None:
        self.future.result()
        shutil.rmtree(self.folder)


Side = Ours | Blocking | Dcp


def _slices(tensors: Mapping[str, torch.Tensor]) -> dict[Slice, torch.Tensor]:
    return {Slice(name, 0, tensor.numel()): tensor for name, tensor in tensors.items()}


class Peak:
    """The most memory that this process has while it is open, beyond that at its beginning."""

    def __enter__(self) -> "Peak":
        self._process, self._is_over = psutil.Process(), threading.Event()
        self._before = self.most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def num_bytes(self) -> int:
        return self.most - self._before

    def _watch(self) -> None:
        while not self._is_over.wait(0.01):
            self.most = max(self.most, self._process.memory_info().rss)


def one_save(trainee: Trainee, side: Side, num_plain: int) -> dict[str, float]:
    """Returns what one save cost, in seconds: plain step, call, stall, total, and until it was on the disk."""
    plain = [trainee.step() for _ in range(num_plain)]
    began = time.perf_counter()
    side.save()
    call = time.perf_counter() - began
    steps = [trainee.step(side.before_update)]
    while not side.is_done():
        steps.append(trainee.step())
    seconds = time.perf_counter() - began
    side.end()
    plain += [trainee.step() for _ in range(num_plain)]
    usual = statistics.median(plain)
    waited = side.waited[-1] if isinstance(side, Ours) else 0.0
    return {
        "step_s": usual,
        "call_s": call,
        "waited_s": waited,
        "stall_s": call + max(waited, steps[0] - usual),
        "total_s": call + sum(steps) - len(steps) * usual,
        "until_done_s": seconds,
    }


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the figures of the three sides, a list of rounds each."""
    config = ModelConfig(arch="gpt2", n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50304)
    trainee = Trainee(config, options.batch, options.seq_len, getattr(torch, options.dtype))
    trainee.step()
    trainee.step()
    sides: dict[str, Side] = {
        "ours": Ours(trainee, folder / "ours"),
        "torch.save": Blocking(trainee, folder),
        "dcp": Dcp(trainee, folder),
    }
    memory_bytes = {}
    for name, side in sides.items():
        with Peak() as peak:
            one_save(trainee, side, 1)  # the first of each makes its buffers
        memory_bytes[name] = peak.num_bytes
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        names = list(sides)
        for name in names[number % 3 :] + names[: number % 3]:
            rounds[name].append(one_save(trainee, sides[name], options.plain))
            print(f"round {number}, {name}: {rounds[name][-1]}", file=sys.stderr)
    num_bytes = sum(tensor.nbytes for part in trainee.tensors() for tensor in part.values())
    return {"rounds": rounds, "memory_bytes": memory_bytes, "saved_bytes": num_bytes}


def every_50_steps(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of 2 x 50 steps of a 10.7M model (6 layers x 384), without saves and with two, in turn."""
    config = ModelConfig(arch="gpt2", n_layer=6, n_head=6, n_embd=384, n_positions=256, vocab_size=256)
    trainee = Trainee(config, 8, 256, torch.bfloat16)
    side = Ours(trainee, folder / "small")
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    trainee.step()
    for number in range(rounds):
        for name in ("without", "with") if number % 2 else ("with", "without"):
            began = time.perf_counter()
            for step in range(2 * INTERVAL):
                if name == "with" and step % INTERVAL == 0:
                    side.saver.finish()
                    side.save()
                trainee.step(side.before_update)
            seconds[name].append(time.perf_counter() - began)
    side.saver.finish()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", type=int, default=3, help="steps without a save before and after each")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", help="of matrix products")
    parser.add_argument("--small-rounds", type=int, default=3, help="of the smaller model; 0: leave it out")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured; else a temporary one")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        figures = compare(options, Path(scratch))
        figures["small"] = every_50_steps(Path(scratch), options.small_rounds) if options.small_rounds else {}
    dist.destroy_process_group()
    rounds = figures["rounds"]
    show_header()
    for name, rows in rounds.items():
        for figure in ("step_s", "call_s", "waited_s", "stall_s", "total_s", "until_done_s"):
            show(f"{name}: {figure}", [row[figure] for row in rows], "s")
    stalls = {name: statistics.median(row["stall_s"] for row in rows) for name, rows in rounds.items()}
    slowdowns = {
        name: statistics.median(100 * row["total_s"] / (INTERVAL * row["step_s"]) for row in rows)
        for name, rows in rounds.items()
    }
    summary = {
        "stall_s": stalls,
        "torch_save_over_ours": stalls["torch.save"] / stalls["ours"],
        "dcp_over_ours": stalls["dcp"] / stalls["ours"],
        "slowdown_percent_every_50": slowdowns,
    }
    if small := figures["small"]:
        pairs = zip(small["with"], small["without"], strict=True)
        summary["small_model_slowdown_percent"] = statistics.median(100 * (a / b - 1) for a, b in pairs)
    print(json.dumps({**summary, **figures}))


if __name__ == "__main__":
    main()
