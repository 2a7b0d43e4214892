"""Whether a config fits, by the facts of ranks."""

import dataclasses
from typing import Any

import pytest
from rank_facts import FACTS

from paceline.base import units
from paceline.base.errors import UserError
from paceline.config import Config, load_preset
from paceline.model.cost import num_parameters
from paceline.tools.doctor.finding import Verdict
from paceline.tools.doctor.fit import fits
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.devices import gpu
from paceline.tools.plan.plan import plan

GIB = float(1 << 30)
RANK = dataclasses.replace(FACTS, free_bytes=8 * GIB)


def found(
    free_bytes: float,
    num_ranks: int = 2,
    bytes_per_s: float = 0.0,
    parallel: dict[str, Any] | None = None,
    **train: Any,
) -> list[Verdict]:
    config = load_preset("gpt2-124m", Config()).replace("train", **{"global_batch_size": 64, **train})
    config = config.replace("parallel", **(parallel or {}))
    rank = dataclasses.asdict(dataclasses.replace(RANK, free_bytes=free_bytes))
    return list(fits(config, [{"ranks": [rank]}] * num_ranks, bytes_per_s))


def test_what_fits_is_well() -> None:
    assert [level for level, _, _ in found(32 * GIB, device_batch_size=4, bytes_per_s=10e9)] == ["ok", "ok"]


def test_memory_that_is_too_little_for_the_micro_batch_or_for_the_model() -> None:
    ((level, seen, fix),) = found(6 * GIB, device_batch_size=32)
    assert level == "failure"
    assert "a has 6.0 GiB" in seen
    fitting = int(fix.removeprefix("--train.device-batch-size "))
    assert 0 < fitting < 32
    assert found(6 * GIB, device_batch_size=fitting)[0][0] == "warning", "it fits, with little room"
    assert found(6 * GIB, device_batch_size=fitting + 1)[0][0] == "failure"
    ((level, _, fix),) = found(1 * GIB, device_batch_size=1)
    assert (level, fix.split(",")[0]) == ("failure", "a smaller model")


def test_ranks_without_work_and_a_link_that_takes_longer_than_a_step() -> None:
    verdicts = found(64 * GIB, 8, 12.5e6, global_batch_size=4, device_batch_size=4)
    levels = [(level, fix) for level, _, fix in verdicts]
    assert levels[0] == ("warning", "--train.global-batch-size 8")
    assert levels[-1] == ("warning", "--train.global-batch-size 16: fewer, longer steps")
    model = load_preset("gpt2-124m", Config()).model_of_data(0)
    sent = 2 * 7 / 8 * 4 * num_parameters(model).total  # of a ring all-reduce of float32 on 8 ranks
    seen = f"each host sends {units.size(sent)} a step with ddp, wire exact: {units.duration(sent / 12.5e6)} over the"
    assert verdicts[-1][1] == f"{seen} slowest link"


@pytest.mark.parametrize(
    ("strategy", "sync_every", "share"),
    [("local", 32, 1 / 32), ("zero", 0, 1.0)],  # zero sends gradients and then weights: in float32 as many bytes
)
def test_the_bytes_of_a_step_are_those_of_its_strategy(strategy: str, sync_every: int, share: float) -> None:
    parallel = {"strategy": strategy, "sync_every": sync_every}
    _, seen, _ = found(64 * GIB, 8, 12.5e6, parallel, device_batch_size=4, dtype="float32")[-1]
    of_ddp = 2 * 7 / 8 * 4 * num_parameters(load_preset("gpt2-124m", Config()).model_of_data(0)).total
    assert seen.startswith(f"each host sends {units.size(share * of_ddp)} a step with {strategy}, wire exact: ")


@pytest.mark.parametrize("shared_memory", [True, False])
def test_memory_is_what_a_plan_predicts_also_of_ranks_that_share_theirs(shared_memory: bool) -> None:
    """Finds the gradients of the other ranks, which a rank maps, missing in one of the two."""
    config = load_preset("gpt2-124m", Config()).replace("train", global_batch_size=64, device_batch_size=4)
    config = config.replace("parallel", strategy="ddp", shared_memory=shared_memory)
    ranks = [dataclasses.asdict(dataclasses.replace(RANK, free_bytes=32 * GIB))] * 2
    (_, seen, _), *_ = fits(config, [{"ranks": ranks}], 0.0)
    device = dataclasses.replace(gpu("H100", compiled=True), kind="cpu", dtype=RANK.dtype)
    memory = plan(config, Cluster(ranks_per_host=2), device).memory
    mapped = 4 * num_parameters(config.model_of_data(0)).total / 2
    assert memory["buffers"] == (mapped if shared_memory else 0.0)
    assert f"a rank takes {units.size(sum(memory.values()))}," in seen


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"shares": "32,32"}, "parallel.shares 32,32 is for 2 ranks, and 3 train"),
        ({"expect_ranks": 2}, "parallel.expect-ranks is 2, and this world has 3 ranks"),
    ],
)
def test_a_config_for_another_number_of_ranks_is_refused_as_by_a_run(parallel: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        found(32 * GIB, 3, parallel=parallel, device_batch_size=4)


def test_a_strategy_that_the_ranks_cannot_use() -> None:
    config = load_preset("gpt2-124m", Config()).replace("parallel", strategy="ddp")
    ranks = [dataclasses.asdict(dataclasses.replace(RANK, rounding=rounding)) for rounding in ("1", "2")]
    with pytest.raises(UserError):
        list(fits(config, [{"ranks": ranks}], 0.0))
