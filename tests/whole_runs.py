"""Whole runs of the preset `tiny` in the test's own process, and what they leave in their folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program import rows

from paceline.checkpoint import manifest as mf
from paceline.config import Config, load_preset
from paceline.train.loop import train
from paceline.train.request import Request
from paceline.world.env import Environment

STEPS = 6


def tiny(**changes: Any) -> Config:
    """Returns the preset `tiny` with few steps and these changes, `section__field=value`."""
    config = load_preset("tiny", Config())
    config = config.replace("train", steps=STEPS, sample_tokens=0, eval_sequences=8).replace("parallel", threads=1)
    config = config.replace("checkpoint", retry_s=0.0)
    for name, value in changes.items():
        section, field = name.split("__")
        config = config.replace(section, **{field: value})
    config.check()
    return config


def status_of(folder: Path, config: Config, faults: str = "", **request: Any) -> int:
    """Trains, with faults as in PACELINE_FAULTS, and returns the exit status."""
    with _injected(faults):
        return train(Request(config, folder, **request), Environment())


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Returns what happened, in order; of these kinds only, where some are given."""
    return [row for row in rows(folder / "events.jsonl") if not kinds or row["event"] in kinds]


def saved(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints that are there."""
    return mf.list_steps(folder / "checkpoints")


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
