"""The verbs of a World: the same answer on all ranks, for numbers and for tensors."""

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from paceline.base.errors import UserError
from paceline.world.runtime import World


def verbs(world: World, folder: Path) -> dict[str, Any]:
    rank = world.rank
    table = torch.tensor([[rank, 1], [2, -rank]])
    own = torch.full((rank, 2), float(rank), dtype=torch.float64)  # rank 0 has none
    given = table.clone()
    found: dict[str, Any] = {
        "sum": world.sum(0.1 * rank),
        "sum of a table": world.sum(table),
        "sum of flags": world.sum(torch.tensor([rank == 0, True])),
        "max": world.max(rank - 5),
        "max of a table": world.max(table),
        "mean": world.mean(rank),
        "weighted": world.mean(float(rank), weight=rank),
        "weighted tensor": world.mean(torch.tensor([1.0, rank]), weight=rank + 1),
        "nothing": world.mean(math.nan, weight=0),
        "nobody's nan": world.mean(torch.tensor([math.nan if rank else 1.0]), weight=int(rank == 0)),
        "whole numbers": world.mean(torch.tensor([4, 6]) + rank, weight=rank),
        "half, many tokens": world.mean(torch.tensor([10.0], dtype=torch.float16), weight=8192),
        "gather": world.gather(rank * 2),
        "gathered scalars": world.gather(torch.tensor(rank)),
        "gathered rows": world.gather(own),
        "gathered rows of nothing": world.gather(torch.zeros(rank, 0)),
        "is as it was": torch.equal(table, given),
    }
    world.barrier()
    mark = folder / "main"
    with world.main_first():
        if world.is_main:
            time.sleep(0.3)
            mark.touch()
        found["came after the main one"] = mark.exists()
    return found


def expected(size: int) -> dict[str, Any]:
    ranks, weight = range(size), size * (size + 1) / 2
    return {
        "sum": math.fsum(0.1 * rank for rank in ranks),
        "sum of a table": torch.tensor([[sum(ranks), size], [2 * size, -sum(ranks)]]),
        "sum of flags": torch.tensor([1, size]),
        "max": size - 6.0,
        "max of a table": torch.tensor([[size - 1, 1], [2, 0]]),
        "mean": sum(ranks) / size,
        "weighted": sum(rank * rank for rank in ranks) / sum(ranks) if size > 1 else math.nan,
        "weighted tensor": torch.tensor([1.0, sum(rank * (rank + 1) for rank in ranks) / weight]),
        "nothing": math.nan,
        "nobody's nan": torch.tensor([1.0]),
        "whole numbers": torch.tensor([4.0, 6.0]) + (sum(r * r for r in ranks) / sum(ranks) if size > 1 else math.nan),
        "half, many tokens": torch.tensor([10.0], dtype=torch.float16),
        "gather": [2.0 * rank for rank in ranks],
        "gathered scalars": [torch.tensor(rank) for rank in ranks],
        "gathered rows": [torch.full((rank, 2), float(rank), dtype=torch.float64) for rank in ranks],
        "gathered rows of nothing": [torch.zeros(rank, 0) for rank in ranks],
        "is as it was": True,
        "came after the main one": True,
    }


def require_expected(found: dict[str, Any], size: int) -> None:
    for name, wanted in expected(size).items():
        if isinstance(wanted, float):
            assert found[name] == pytest.approx(wanted, nan_ok=True), name
        else:
            torch.testing.assert_close(found[name], wanted, msg=name, equal_nan=True)


def gathers_unlike(world: World) -> str:
    with pytest.raises(UserError) as caught:
        world.gather(torch.tensor([7] * world.rank))
    return str(caught.value)


def mixed(world: World) -> list[str]:
    """What is said of a number on rank 0 and tensors on the others."""
    value: Any = torch.ones(2) if world.rank else 0.0
    said = []
    for verb in (world.sum, world.max, world.gather, lambda value: world.mean(value, weight=world.rank)):
        with pytest.raises(UserError) as caught:
            verb(value)
        said.append(str(caught.value))
    return said


def on_ranks(world: World, folder: Path) -> tuple[dict[str, Any], str, list[str]]:
    return verbs(world, folder), gathers_unlike(world), mixed(world)


def test_verbs_of_one_process(world: World, tmp_path: Path) -> None:
    require_expected(verbs(world, tmp_path), 1)


def test_verbs_give_the_same_on_all_ranks_and_unlike_dtypes_are_refused(tmp_path: Path) -> None:
    """Finds: tensors of unlike dtypes given to Gloo, which ends one rank and leaves the others waiting; or a tensor
    where another rank has a number."""
    found = run_ranks(on_ranks, 3, tmp_path)
    for by_verb, said, of_mixed in found:
        require_expected(by_verb, 3)
        assert said == found[0][1]
        assert of_mixed == found[0][2]
    refused = r"test_world.py:\d+: World.gather needs .* got by rank: float32 \[\], int64 \[\], int64 \[\]\."
    assert re.match(refused, found[0][1])
    for name, said in zip(("sum", "max", "gather", "mean"), found[0][2], strict=True):
        shape = r"\[\]" if name == "gather" else r"\[2\]"
        kinds = f"a number, float32 {shape}, float32 {shape}"
        assert re.match(rf"test_world.py:\d+: World.{name} needs one dtype.* got by rank: {kinds}\.", said)


def test_one_rank_speaks_and_takes_what_print_takes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.say("\rstep", 3, end="", sep="-", flush=True)
    assert capsys.readouterr().out == "\rstep-3"
