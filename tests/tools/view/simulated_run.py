"""Run folders as training leaves them while it goes on, of any number of ranks, written row by row."""

import json
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

SLOW_RANK = 37
PARTS = ("data", "forward", "backward", "optim", "exposed_comm")


class Simulated:
    """A run whose writer is this process. `rank slow_rank` works twice as long in forward as the others."""

    def __init__(self, folder: Path, num_ranks: int = 2, num_steps: int = 500, slow_rank: int | None = None):
        (folder / "checkpoints").mkdir(parents=True)
        self.folder, self.num_ranks, self.slow_rank = folder, num_ranks, slow_rank
        self.step, self._draws = 0, random.Random(7)
        (folder / "lock.holder").write_text(f"host {socket.gethostname()}, pid {os.getpid()}\n")
        (folder / "config.toml").write_text(f"[train]\nsteps = {num_steps}\n")
        self.hosts = [f"node{rank // 8}" for rank in range(num_ranks)]
        self.event("start", world_size=num_ranks, hosts=self.hosts)

    def event(self, kind: str, **facts: Any) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.append("events.jsonl", {"time": now, "event": kind, **facts})

    def append(self, name: str, row: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def steps(self, count: int) -> None:
        """Appends rows of so many further steps, in which all ranks take equally long."""
        for _ in range(count):
            self.step += 1
            self.append("metrics.jsonl", self.row(self.step))

    def row(self, step: int) -> dict[str, Any]:
        own = {"data": 2.0, "forward": 60.0, "backward": 118.0, "optim": 9.0}
        by_rank = {
            name: [ms * (1 + 0.05 * self._draws.random()) for _ in range(self.num_ranks)] for name, ms in own.items()
        }
        if self.slow_rank is not None:
            by_rank["forward"][self.slow_rank] *= 2
        work = [sum(values) for values in zip(*by_rank.values(), strict=True)]
        step_ms = max(work) + 20
        by_rank["exposed_comm"] = [step_ms - ms - 1 for ms in work]
        scalars = dict.fromkeys(("compute_ms", "comm_ms", "comm_cpu_ms", "other_ms", "lr", "grad_norm"), 1.0)
        return {
            **scalars,
            **{f"{name}_ms": by_rank[name][0] for name in PARTS},
            **{f"rank_{name}_ms": by_rank[name] for name in PARTS},
            "step": step,
            "loss": 2.0 + 4.0 / (1 + step / 30) + 0.1 * self._draws.random(),
            "skipped": False,
            "tokens": 1000 * step,
            "step_ms": step_ms,
            "tokens_per_s": 1e6 / step_ms,
            "mfu": 0.31,
            "comm_bytes": 1000,
            "world_size": self.num_ranks,
            "rank_sequences": [8] * self.num_ranks,
            "rank_step_ms": [ms + 1 for ms in work],
            "rank_compute_ms": work,
        }
