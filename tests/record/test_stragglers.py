"""A slow rank is named with what it is slow in; nobody is named for noise, for having more to do, or for waiting."""

import json
import random
from pathlib import Path

import pytest
from program import TINY, rows, run, steps

from paceline.data.plan import BatchPlan
from paceline.record.stragglers import PER_SEQUENCE, PER_STEP, Over, Slow, Stragglers

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
    stragglers = Stragglers(plan.world_size)
    for step in range(1, 201):
        jump = {(draw.randrange(world_size), "forward"): 3.0} if step % 4 == 0 else {}  # now and then anyone is slow
        assert stragglers.observe(step, plan.num_sequences(), times(plan, draw, jump)) == []
    assert stragglers.cost_ms == 0
    assert stragglers.summary() == []


def test_a_step_without_sequences_names_nobody() -> None:
    """Finds: the script's run ended by an IndexError after a step of which no rank had a label."""
    plan, draw = BatchPlan(8, 2, 2), random.Random(0)
    stragglers = Stragglers(plan.world_size)
    for step in range(1, 101):
        num_sequences = [0, 0] if step % 10 == 5 else plan.num_sequences()
        assert stragglers.observe(step, num_sequences, times(plan, draw, {})) == []
    assert stragglers.num_steps == 90


@pytest.mark.parametrize(("world_size", "rank"), [(2, 0), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("phase", [*PER_SEQUENCE, "optimizer"])
def test_a_slow_rank_is_named_within_ten_steps(world_size: int, rank: int, phase: str) -> None:
    plan, draw = BatchPlan(4 * world_size, 2, world_size), random.Random(world_size)
    stragglers = Stragglers(plan.world_size)
    count = sum(len(positions) for positions in plan.micro_batches(rank))
    usual_ms = USUAL[phase] * (count if phase in PER_SEQUENCE else 1)
    factor = 1 + 50 * count / usual_ms  # two and a half times as slow
    expected_ms, found, named_at = 0.0, [], 0
    for step in range(1, 101):
        slower = {(rank, phase): factor} if 30 < step <= 70 else {}
        parts = times(plan, draw, slower)
        found += stragglers.observe(step, plan.num_sequences(), parts)
        if slower and named_at and step > named_at:
            expected_ms += usual_ms * (factor - 1)
        named_at = named_at or (step if found else 0)
    slow, over = found
    assert isinstance(slow, Slow)
    assert (slow.rank, slow.phase) == (rank, phase)
    assert named_at <= 40
    assert 31 <= slow.since_step <= 33
    assert slow.ms == pytest.approx(usual_ms * factor, rel=0.15)
    assert slow.median_ms == pytest.approx(usual_ms, rel=0.15)
    assert isinstance(over, Over)
    assert over.rank == rank
    assert over.cost_s == pytest.approx(expected_ms / 1e3, rel=0.2)
    assert stragglers.cost_ms == pytest.approx(over.cost_s * 1e3, rel=0.05)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_a_little_slower_all_the_time_is_named_later(rank: int) -> None:
    plan, draw = BatchPlan(12, 2, 3), random.Random(rank)
    stragglers, found = Stragglers(plan.world_size), []
    slower = {(rank, phase): 1.4 for phase in ("forward", "backward")}
    for _ in range(200):
        found += [
            (stragglers.num_steps, item)
            for item in stragglers.observe(0, plan.num_sequences(), times(plan, draw, slower))
        ]
    ((named_at, item),) = found
    assert isinstance(item, Slow)
    assert (item.rank, item.phase) == (rank, "backward")
    assert 26 < named_at < 80


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.3])
def test_of_two_noisy_ranks_the_slower_one_is_named_and_equal_ones_are_not(slower: float) -> None:
    """Two runs with 10% of noise in each phase. One of two ranks is always the slower of a step, by 7% in its median.
    Finds a test that compares with the faster rank of each step, and one that only knows single steps."""
    for seed in range(2):
        draw, stragglers, found = random.Random(seed), Stragglers(2), []
        for step in range(1, 401):
            usual = {"data": 2.0, "forward": 60.0, "backward": 120.0, "optimizer": 9.0, "other": 1.0}
            noise = {phase: [draw.lognormvariate(0, 0.1) for _ in range(2)] for phase in usual}
            parts = {phase: [ms * noise[phase][0], ms * noise[phase][1] * slower] for phase, ms in usual.items()}
            found += stragglers.observe(step, [8, 8], parts)
        assert [type(item) for item in found] == ([Slow] if slower > 1 else [])
        assert all((item.rank, getattr(item, "phase", "")) == (1, "backward") for item in found)
        assert [rank for rank, *_ in stragglers.summary()] == ([1] if slower > 1 else [])


def test_a_rank_that_was_a_little_slower_is_over_once() -> None:
    """Finds a report by means that their last ones end, or begin anew."""
    stragglers, found = Stragglers(2), []
    others = {phase: [1.0, 1.0] for phase in (*PER_SEQUENCE, *PER_STEP) if phase != "backward"}
    for step in range(1, 801):
        backward = {"backward": [50.0, 56.0 if step <= 300 else 50.0]}
        found += [(step, type(item)) for item in stragglers.observe(step, [2, 2], others | backward)]
    assert found == [(175, Slow), (400, Over)]


def test_who_is_ready_with_the_others_is_not_slow_however_few_its_sequences() -> None:
    stragglers = Stragglers(2)
    alike = {phase: [5.0, 5.0] for phase in (*PER_SEQUENCE, *PER_STEP)}
    assert all(stragglers.observe(step, [2, 1], alike) == [] for step in range(1, 61))


def test_shares_by_speed_name_nobody() -> None:
    """Rank 1 needs three times as long for a sequence; after 20 steps it has a third of them."""
    alike = {phase: [1.0, 1.0] for phase in (*PER_SEQUENCE, *PER_STEP)}
    stragglers, found = Stragglers(2), []
    for step in range(1, 61):
        counts = [16, 16] if step <= 20 else [24, 8]
        backward = {"backward": [10.0 * counts[0], 30.0 * counts[1]]}
        found += stragglers.observe(step, counts, alike | backward)
    slow, over = found
    assert (slow.rank, over.rank) == (1, 1)
    assert isinstance(over, Over)


def test_two_stretches_of_slowness_cost_what_each_took() -> None:
    stragglers, found = Stragglers(3), []
    for step in range(1, 101):
        is_slow = 10 < step <= 30 or 60 < step <= 80
        fast = step > 90  # and later faster than the others, which earns nothing back
        backward = [20.0, 20.0, 50.0 if is_slow else 10.0 if fast else 20.0]
        others = {phase: [1.0, 1.0, 1.0] for phase in (*PER_SEQUENCE, *PER_STEP) if phase != "backward"}
        found += stragglers.observe(step, [2, 2, 2], others | {"backward": backward})
    costs = [item.cost_s for item in found if isinstance(item, Over)]
    assert costs == pytest.approx([0.39, 0.39])  # named after 7 of 20 steps, 30 ms in each of the other 13
    assert stragglers.cost_ms == pytest.approx(780)


@pytest.mark.alone
@pytest.mark.long
def test_a_slow_rank_of_a_real_run_is_told_and_recorded(tmp_path: Path) -> None:
    fault = "rank=1 step=8 phase=data kind=sleep seconds=0.06 times=40"
    out = tmp_path / "run"
    flags = ("--nproc", "2", "--train.steps", "50", "--train.profile", "3", "--out", str(out))
    ended = run("train", *TINY, *flags, env={"PACELINE_FAULTS": fault})
    ended.require(0)
    (found,) = [row for row in rows(out / "events.jsonl") if row["event"] == "straggler"]
    assert (found["rank"], found["phase"]) == (1, "data")
    assert found["since_step"] >= 4  # 8, or a step before it on a machine with other work
    assert found["step"] <= 18
    assert found["ms"] >= 45  # 60 and more, but for a noisy step in the window
    assert "rank 1" in ended.out
    assert "has been slow since step" in ended.out
    end = rows(out / "events.jsonl")[-1]
    slept_s = 0.06 * (48 - found["step"])
    assert end["straggler_cost_s"] >= slept_s * 0.8
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
    products = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")  # the last one on AMD
    assert names & set(products), "the trace tells of matrix products"
