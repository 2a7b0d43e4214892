"""Ranks agree before they act: the same versions, config and data everywhere, or a refusal that names who differs."""

import json
from typing import Any

import torch

from paceline import __version__
from paceline.base.errors import UserError
from paceline.config import Config, flatten
from paceline.data.blend import Blend
from paceline.train.resolve import Settings
from paceline.world.group import Group

# What may differ between hosts: where things are and what a host is made of, not what is computed.
_LOCAL = (
    *("parallel.interface", "parallel.threads", "parallel.port", "parallel.device"),
    *("data.path", "data.mix", "train.init-from"),
)


def choices(settings: Settings) -> dict[str, Any]:
    """Returns what each rank chose for itself and all must have chosen alike."""
    return {
        "train.dtype": str(settings.dtype),
        "train.device-batch-size": settings.plan.device_batch_size,
        "train.global-batch-size": settings.plan.global_batch_size,
        "horizon in steps": settings.num_steps,
        "lr": settings.lr,
        "weight decay": settings.weight_decay,
    }


def facts(config: Config, blend: Blend) -> dict[str, Any]:
    """Returns what every rank must have alike."""
    same = {name: value for name, value in flatten(config).items() if name not in _LOCAL}
    return {
        "torch version": torch.__version__.split("+")[0],
        "paceline version": __version__,
        "data": f"{blend.name} {blend.fingerprint[:16]}",
        **same,
    }


def require_same(group: Group, mine: dict[str, Any]) -> None:
    """Returns if all ranks gave the same facts; else raises UserError on all, naming the ranks and both values.

    Collective.
    """
    theirs = [json.loads(text) for text in group.share_text(json.dumps(mine))]
    differences = []
    for name in dict.fromkeys(name for row in theirs for name in row):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(theirs):
            ranks_by_value.setdefault(json.dumps(row.get(name, "not there")), []).append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on rank {_list(ranks)}" for value, ranks in ranks_by_value.items())
            differences.append(f"{name}: {values}")
    if differences:
        text = ". ".join(differences)
        raise UserError(f"ranks differ, and would train different models: {text}. Make them equal", reach="world")


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
