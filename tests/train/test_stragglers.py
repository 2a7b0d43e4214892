"""A slow rank is named with what it is slow in; nobody is named for noise, for having more to do, or for waiting."""

import json
import random
from pathlib import Path

import pytest
from program import TINY, rows, run, steps

from paceline.data.plan import BatchPlan
from paceline.train.stragglers import PER_SEQUENCE, PER_STEP, Over, Slow, Stragglers

USUAL = {"data": 0.5, "forward": 10.0, "backward": 20.0, "optimizer": 3.0, "other": 0.5}  # ms; per sequence, per step


def times(plan: BatchPlan, draw: random.Random, slower: dict[tuple[int, str], float]) -> dict[str, list[float]]:
    """One step's milliseconds by phase and rank: what each rank computes, with 8% of noise."""
    parts: dict[str, list[float]] = {phase: [] for phase in (*PER_SEQUENCE, *PER_STEP)}
    for rank in range(plan.world_size):
        count = sum(len(positions) for positions in plan.micro_batches(rank))
        for phase in parts:
            ms = USUAL[phase] * (count if phase in PER_SEQUENCE else 1)
            parts[phase].append(ms * slower.get((rank, phase), 1.0) * draw.lognormvariate(0, 0.08))
    return parts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_noise_and_uneven_shares_name_nobody(world_size: int) -> None:
    plan, draw = BatchPlan(12, 2, world_size), random.Random(0)  # 7 ranks: one of them has nothing to compute
    stragglers = Stragglers(plan)
    for step in range(1, 501):
        jump = {(draw.randrange(world_size), "forward"): 3.0} if step % 4 == 0 else {}  # now and then anyone is slow
        assert stragglers.observe(step, times(plan, draw, jump)) == []
    assert stragglers.cost_ms == 0
    assert stragglers.summary() == []


@pytest.mark.parametrize(("world_size", "rank"), [(2, 0), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("phase", [*PER_SEQUENCE, "optimizer"])
def test_a_slow_rank_is_named_within_ten_steps(world_size: int, rank: int, phase: str) -> None:
    plan, draw = BatchPlan(10, 2, world_size), random.Random(world_size)
    stragglers = Stragglers(plan)
    count = sum(len(positions) for positions in plan.micro_batches(rank))
    usual_ms = USUAL[phase] * (count if phase in PER_SEQUENCE else 1)
    factor = 1 + 20 * count / usual_ms  # two thirds of a step more
    expected_ms, found, named_at = 0.0, [], 0
    for step in range(1, 101):
        slower = {(rank, phase): factor} if 30 < step <= 70 else {}
        parts = times(plan, draw, slower)
        found += stragglers.observe(step, parts)
        if slower and named_at and step > named_at:
            expected_ms += usual_ms * (factor - 1)
        named_at = named_at or (step if found else 0)
    slow, over = found
    assert isinstance(slow, Slow)
    assert (slow.rank, slow.phase) == (rank, phase)
    assert named_at <= 40
    assert 31 <= slow.since_step <= 35
    assert slow.ms == pytest.approx(usual_ms * factor, rel=0.15)
    assert slow.median_ms == pytest.approx(usual_ms, rel=0.15)
    assert isinstance(over, Over)
    assert over.rank == rank
    assert over.cost_s == pytest.approx(expected_ms / 1e3, rel=0.2)
    assert stragglers.cost_ms == pytest.approx(over.cost_s * 1e3, rel=0.05)


def test_a_slow_rank_of_a_real_run_is_told_and_recorded(tmp_path: Path) -> None:
    fault = "rank=1 step=8 phase=data kind=sleep seconds=0.06 times=40"
    out = tmp_path / "run"
    flags = ("--nproc", "2", "--train.steps", "50", "--train.profile", "3", "--out", str(out))
    ended = run("train", *TINY, *flags, env={"PACELINE_FAULTS": fault})
    ended.require(0)
    (found,) = [row for row in rows(out / "events.jsonl") if row["event"] == "straggler"]
    assert (found["rank"], found["phase"]) == (1, "data")
    assert found["since_step"] >= 8
    assert found["step"] <= 18
    assert found["ms"] >= 60
    assert "rank 1" in ended.out
    assert "is slow since step" in ended.out
    end = rows(out / "events.jsonl")[-1]
    slept_s = 0.06 * (48 - found["step"])
    assert slept_s * 0.8 <= end["straggler_cost_s"] <= slept_s * 3
    assert "waiting for slow ranks" in ended.out
    # Where a step went: the parts of each rank are its step, and the others' waiting is no time of their own.
    for row in steps(out):
        parts = ("rank_data_ms", "rank_forward_ms", "rank_backward_ms", "rank_exposed_comm_ms", "rank_optim_ms")
        for rank in range(2):
            known = sum(row[part][rank] for part in parts)
            whole = max(row["step_ms"], row["rank_step_ms"][rank])
            assert -0.02 * whole <= whole - known
    slow = [row for row in steps(out) if 10 <= row["step"] <= 45]
    assert all(row["rank_exposed_comm_ms"][0] > 40 > row["rank_data_ms"][0] for row in slow[:5])
    traces = sorted((out / "profile").iterdir())
    assert [path.name for path in traces] == [f"step-00000003-rank-0000{rank}.json" for rank in range(2)]
    names = {event.get("name", "") for event in json.loads(traces[1].read_text())["traceEvents"]}
    assert any("mm" in name for name in names), "the trace tells of matrix products"
