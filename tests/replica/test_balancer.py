"""Shares that follow the ranks' speeds: they converge, follow a change, and stay where they are in noise."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.plan import in_proportion
from paceline.replica.balance import Balancer, divide
from paceline.replica.result import StepTimes

SEQUENCE_MS, UPDATE_MS = 10.0, 5.0


def adopted(
    num_sequences: int,
    speeds_at: Callable[[int], Sequence[float]],
    num_steps: int,
    noise: float = 0.1,
    seed: int = 0,
    begin: tuple[int, ...] = (),
    work_ms: Callable[[int], float] = lambda count: count * SEQUENCE_MS,
    link_ms: float = 0.0,
    limit_ms: Callable[[int], float] = lambda step: math.inf,
) -> list[tuple[int, tuple[int, ...]]]:
    """Simulates steps that take as long as the slowest rank, or as `link_ms`; each change is in force two steps later.
    Returns (step, shares) of each change. Times have lognormal noise, and one in 50 is three times as long. The last
    rank's work beyond `limit_ms` takes four times as long."""
    draw, speeds = random.Random(seed), speeds_at(0)
    shares = begin or in_proportion(num_sequences, [1] * len(speeds))
    balancer, coming, found = Balancer(shares), {}, []
    for step in range(num_steps):
        shares = coming.pop(step, shares)

        def noisy(ms: float) -> float:
            return ms * draw.lognormvariate(0, noise) * (3 if draw.random() < 0.02 else 1)

        work = [work_ms(n) / speed for n, speed in zip(shares, speeds_at(step), strict=True)]
        work[-1] += 3 * max(0.0, work[-1] - limit_ms(step))
        own = [(noisy(ms), noisy(UPDATE_MS)) for ms in work]
        step_ms = max(link_ms, *map(sum, own))
        times = [
            StepTimes(0, ms / 3, ms * 2 / 3, update, 0, step_ms - ms - update, 0, 0, step_ms) for ms, update in own
        ]
        if change := balancer.observe(shares, times):
            coming[step + 2] = change.shares
            found.append((step, change.shares))
    return found


def longest(shares: Sequence[int], speeds: Sequence[float]) -> float:
    return max(UPDATE_MS + n * SEQUENCE_MS / speed for n, speed in zip(shares, speeds, strict=True))


@pytest.mark.parametrize("speeds", [(1.0, 0.35), (1.0, 0.5, 0.25), (0.2, 1.0), (1.0, 1.0, 1.0, 0.5)])
@pytest.mark.parametrize("num_sequences", [16, 32, 64])
def test_the_shares_converge_to_the_shortest_step(num_sequences: int, speeds: tuple[float, ...]) -> None:
    changes = adopted(num_sequences, lambda _: speeds, 200)
    best = longest(divide(num_sequences, [SEQUENCE_MS / s for s in speeds], [UPDATE_MS] * len(speeds)), speeds)
    assert longest(changes[-1][1], speeds) <= 1.05 * best
    in_40_steps = [shares for step, shares in changes if step <= 38]
    assert longest(in_40_steps[-1], speeds) <= 1.1 * best


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_it_follows_a_machine_that_slows_down_and_recovers_within_40_steps(noise: float) -> None:
    usual, slow = (1.0, 1.0), (1.0, 0.5)
    changes = adopted(32, lambda step: slow if 100 <= step < 200 else usual, 300, noise)
    for begin, speeds, best in ((100, slow, (21, 11)), (200, usual, (16, 16))):
        shares = [shares for step, shares in changes if begin <= step <= begin + 38][-1]
        assert longest(shares, speeds) <= 1.1 * longest(best, speeds)
    assert not [step for step, _ in changes if not 100 <= step < 240]


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.35), (1.0, 0.5, 0.25), (1.0,) * 8])
def test_noise_changes_nothing_in_500_steps(speeds: tuple[float, ...]) -> None:
    begin = divide(64, [SEQUENCE_MS / s for s in speeds], [UPDATE_MS] * len(speeds))
    for seed in range(2):
        assert not adopted(64, lambda _: speeds, 500, seed=seed, begin=begin)


def test_where_a_link_limits_the_step_own_work_is_balanced_once_and_a_slower_machine_is_followed() -> None:
    """The link takes 400 ms, whatever is computed meanwhile."""
    changes = adopted(32, lambda k: (1.0, 0.8) if k < 500 else (1.0, 0.3), 540, noise=0.03, link_ms=400.0)
    assert [shares for step, shares in changes if step < 500] == [(18, 14)]
    assert changes[-1][1] == (25, 7)


def test_costs_that_depend_on_the_micro_batch_do_not_make_it_oscillate() -> None:
    """Each micro-batch of up to 16 costs as much as 4 more sequences."""
    for speed in (0.4, 0.7):
        changes = adopted(
            32,
            lambda _, speed=speed: (1.0, speed),  # type: ignore[misc]
            1000,
            noise=0.03,
            work_ms=lambda count: (count + 4 * math.ceil(count / 16)) * SEQUENCE_MS,
        )
        assert len(changes) <= 8, changes  # ever less often


@pytest.mark.parametrize("seed", range(2))
def test_a_limit_of_processor_time_does_not_make_it_oscillate(seed: int) -> None:
    """Up to a limit the last rank is as fast as the other one, then four times as slow; the limit varies."""
    draw = random.Random(seed)

    def limited(step: int) -> float:
        return 100.0 if step // 50 % 2 else draw.choice((60.0, 140.0))

    changes = adopted(32, lambda _: (1.0, 1.0), 2000, noise=0.05, seed=seed, limit_ms=limited)
    assert len(changes) <= 30, "without a limit on turns it makes some 60"


def test_a_rank_without_sequences_or_a_world_of_one_stays_as_it_is() -> None:
    assert not adopted(2, lambda _: (1.0, 0.5, 0.5), 100)
    assert not adopted(8, lambda _: (1.0,), 100)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 30)), min_size=2, max_size=3), st.integers(0, 9))
def test_no_other_shares_end_sooner(ranks: list[tuple[float, float]], more: int) -> None:
    num_sequences, (costs, fixed) = len(ranks) + more, zip(*ranks, strict=True)
    others = [(n, num_sequences - n) for n in range(1, num_sequences)]
    if len(ranks) == 3:
        others = [(n, k, rest - k) for n, rest in others for k in range(1, rest)]  # type: ignore[misc]

    def end(shares: Sequence[int]) -> float:
        return max(a + b * n for a, b, n in zip(fixed, costs, shares, strict=True))

    dealt = divide(num_sequences, costs, fixed)
    assert sum(dealt) == num_sequences
    assert end(dealt) <= min(map(end, others)) * (1 + 1e-9)
