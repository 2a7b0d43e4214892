"""Ranks all-gather their facts before they train; every later choice is a function of these facts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from paceline import __version__
from paceline.base.errors import UserError
from paceline.config import Config, flatten
from paceline.data.blend import Blend
from paceline.world.device import choose_dtype
from paceline.world.runtime import World

# Fields that may differ between hosts: they change where and how a run is computed, not what.
_LOCAL = (
    *("parallel.interface", "parallel.threads", "parallel.port", "parallel.device"),
    *("data.path", "data.mix", "train.init-from"),
)


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts and config of one rank."""

    device: str  # cpu, cuda, mps
    dtype: str  # what "auto" means on this device
    dtype_reason: str
    free_bytes: float  # memory for this rank: of its GPU, or its part of the host's
    threads: int
    threads_reason: str


def gather_facts(world: World, config: Config, blend: Blend) -> list[RankFacts]:
    """Returns every rank's facts, by rank. Collective. Raises UserError on all ranks, naming them and their values, if
    versions, data or configs differ."""
    dtype, reason = choose_dtype("auto", world.device)
    if world.device.type == "cuda":
        free_bytes = float(torch.cuda.mem_get_info(world.device)[0])
    else:
        free_bytes = psutil.virtual_memory().available / world.local_world_size
    mine = RankFacts(
        device=world.device.type,
        dtype=str(dtype).removeprefix("torch."),
        dtype_reason=reason,
        free_bytes=free_bytes,
        threads=world.threads,
        threads_reason=world.threads_reason,
    )
    told = world.group.share_text(json.dumps({"alike": _must_be_alike(config, blend), "facts": asdict(mine)}))
    rows = [json.loads(text) for text in told]
    _require_alike([row["alike"] for row in rows])
    return [RankFacts(**row["facts"]) for row in rows]


def _must_be_alike(config: Config, blend: Blend) -> dict[str, Any]:
    return {
        "torch version": torch.__version__.split("+")[0],
        "paceline version": __version__,
        "data": f"{blend.name} {blend.fingerprint[:16]}",
        "data content (paceline data info DIR --verify says which shard)": blend.content_digest[:16],
        **{name: value for name, value in flatten(config).items() if name not in _LOCAL},
    }


def _require_alike(rows: Sequence[Mapping[str, Any]]) -> None:
    differences = []
    for name in dict.fromkeys(name for row in rows for name in row):
        ranks_by_value: dict[str, list[str]] = {}
        for rank, row in enumerate(rows):
            ranks_by_value.setdefault(json.dumps(row.get(name, "not there")), []).append(str(rank))
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
            differences.append(f"{name}: {values}")
    if differences:
        text = ". ".join(differences)
        raise UserError(f"ranks differ, and would train different models: {text}. Make them equal", reach="world")
