"""Whole runs of the preset `tiny`, in the test's own process or on ranks of run_ranks, and what they leave."""

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from program import rows
from safetensors import safe_open

from paceline.checkpoint.steps import MANIFEST, list_steps
from paceline.config import Config, load_preset
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.env import Environment

STEPS = 6
BATCH, SEQ_LEN = 12, 16  # sequences of a step, and their tokens
SHARDS = Path(__file__).parent / "golden/shards"  # data sets that are there already
_WORLDS = itertools.count()  # of this process, for `first_ranks`


def tiny(**changes: Any) -> Config:
    """Returns the preset `tiny`, smaller and with few steps, and these changes, `section__field=value`.

    12 sequences in micro-batches of 4 are three: of two ranks one has two of them.
    """
    config = load_preset("tiny", Config()).replace("model", n_embd=32)
    path = "" if "data__mix" in changes else str(SHARDS / "trained")
    config = config.replace("data", path=path, tokenizer_vocab=320, seq_len=SEQ_LEN)  # 320: that data set's
    config = config.replace("train", steps=STEPS, sample_tokens=0, eval_sequences=8)
    config = config.replace("train", global_batch_size=BATCH, device_batch_size=4)
    config = config.replace("parallel", threads=1).replace("checkpoint", retry_s=0.0)
    for name, value in changes.items():
        section, field = name.split("__")
        config = config.replace(section, **{field: value})
    config.check()
    return config


def status_of(folder: Path, config: Config, faults: str = "", **request: Any) -> int:
    """Trains, with faults as in PACELINE_FAULTS, and returns the exit status."""
    with _injected(faults):
        return train(Request(config, folder, **request), Environment())


@contextlib.contextmanager
def first_ranks(num_ranks: int, env: Environment, base: Path) -> Iterator[Environment | None]:
    """Gives the environment of a world of the first `num_ranks` of these ranks; None on the others.

    So processes that are there already make worlds of any size, one after another, in the same order on all. Each waits
    until rank 0 has come to this world: one that still waits for its ranks would refuse a rank that is ahead.
    """
    turn = base / f"world-{next(_WORLDS)}"
    if env.rank == 0:
        turn.touch()
    if env.rank >= num_ranks:
        yield None
        return
    while not turn.exists():
        time.sleep(0.01)
    yield dataclasses.replace(env, world_size=num_ranks, local_world_size=num_ranks)


def train_on(num_ranks: int, env: Environment, config: Config, folder: Path, status: int = 0, **request: Any) -> None:
    """Trains on the first `num_ranks` of these ranks (`run_ranks` with opened=False); with hsdp on hosts of two."""
    host = f"{socket.gethostname()}-{env.rank // 2}" if config.parallel.strategy == "hsdp" else socket.gethostname()
    with first_ranks(num_ranks, env, folder.parent) as smaller, patch("socket.gethostname", lambda: host):
        if smaller is not None:
            assert train(Request(config, folder, **request), smaller) == status


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Returns what happened, in order; of these kinds only, where some are given."""
    return [row for row in rows(folder / "events.jsonl") if not kinds or row["event"] in kinds]


def saved(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints that are there."""
    return list_steps(folder / "checkpoints")


def words(text: str) -> str:
    """Returns the text without the line breaks of a terminal."""
    return " ".join(text.split())


def evaluations(folder: Path) -> dict[int, float]:
    """Returns the validation losses by step; fails where a step was evaluated twice."""
    found = [row for row in rows(folder / "metrics.jsonl") if "val_loss" in row]
    by_step = {row["step"]: row["val_loss"] for row in found}
    assert len(by_step) == len(found)
    return by_step


@contextlib.contextmanager
def _injected(faults: str) -> Iterator[None]:
    if not faults:
        yield
        return
    os.environ["PACELINE_FAULTS"] = faults
    try:
        yield
    finally:
        del os.environ["PACELINE_FAULTS"]


def former_manifest(checkpoint: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest as format 3 had it, with a list of the slices in each file."""
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())
    for name, facts in manifest["files"].items():
        with safe_open(checkpoint / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                tensor, _, borders = key.removesuffix("]").partition("[")
                start, stop = borders.split(":") if borders else (0, file.get_tensor(key).numel())
                facts.setdefault("pieces", []).append([key, tensor, int(start), int(stop)])
    for specs in manifest["tensors"].values():
        for spec in specs.values():
            del spec["parts"]
    return manifest | {"format": 3}
