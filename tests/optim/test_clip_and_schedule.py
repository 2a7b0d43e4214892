"""Clipping against torch's, the schedule's shape, and the batch-size rule by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.optim.clip import clip_
from paceline.optim.config import OptimConfig, scaled_with_batch
from paceline.optim.schedule import lr_factor


def gradients(seed: int, sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


@given(st.integers(0, 99), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.floats(0.01, 100))
def test_clipping_is_torchs(seed: int, sizes: list[int], max_norm: float) -> None:
    mine = gradients(seed, sizes)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter, gradient in zip(parameters, gradients(seed, sizes), strict=True):
        parameter.grad = gradient
    wanted = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    assert clip_(mine, max_norm) == pytest.approx(wanted, rel=1e-6)
    for gradient, parameter in zip(mine, parameters, strict=True):
        # torch divides by norm + 1e-6.
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5 + 2e-6 / wanted, atol=1e-7)


@given(st.integers(0, 99), st.sampled_from([2.0, 1024.0, 65536.0]), st.sampled_from([0.0, 0.5, 1e9]))
def test_the_loss_scale_is_taken_out_exactly(seed: int, scale: float, max_norm: float) -> None:
    plain, scaled = gradients(seed, [5, 9]), [gradient * scale for gradient in gradients(seed, [5, 9])]
    assert clip_(scaled, max_norm, scale) == pytest.approx(float(clip_(plain, max_norm)), rel=1e-6)
    for mine, wanted in zip(scaled, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)


def test_a_max_norm_of_zero_only_measures() -> None:
    mine = gradients(0, [5])
    assert clip_(mine, 0.0) == pytest.approx(float(gradients(0, [5])[0].norm()))
    assert torch.equal(mine[0], gradients(0, [5])[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_one_bad_element_makes_the_norm_not_finite_and_leaves_the_gradients(bad: float, scale: float) -> None:
    mine = [torch.ones(4), torch.ones(3)]
    mine[1][2] = bad
    assert not math.isfinite(clip_(mine, 1.0, scale))
    assert torch.equal(mine[0], torch.ones(4))
    assert torch.equal(mine[1][:2], torch.ones(2))


@given(st.integers(0, 99), st.lists(st.integers(0, 40), min_size=2, max_size=6), st.sampled_from([0.0, 0.5, 1e9]))
def test_shares_of_a_gradient_are_clipped_as_the_whole(seed: int, sizes: list[int], max_norm: float) -> None:
    """Three owners, of which one may own nothing; each knows the others' sums of squares."""
    whole, dealt = gradients(seed, sizes), gradients(seed, sizes)
    owned = [dealt[rank::3] for rank in range(3)]
    own_sums = [sum(float(gradient.double().square().sum()) for gradient in share) for share in owned]
    wanted = float(clip_(whole, max_norm))
    for rank, share in enumerate(owned):
        others = sum(own_sums) - own_sums[rank]
        found = clip_(share, max_norm, total=lambda own, others=others: own + others)  # type: ignore[misc]
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    for mine, other in zip(dealt, whole, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_elsewhere_leaves_this_share_as_it_is(bad: float) -> None:
    mine = [torch.ones(4)]
    assert not math.isfinite(clip_(mine, 1.0, 2.0, total=lambda own: own + bad))
    assert torch.equal(mine[0], torch.ones(4))


# ---- schedule ----

configs = st.builds(
    OptimConfig,
    schedule=st.sampled_from(["cosine", "wsd"]),
    warmup_steps=st.integers(0, 50),
    decay_frac=st.floats(0.05, 1.0),
    min_lr_frac=st.floats(0.0, 1.0),
)
progresses = st.floats(0.0, 1.0)


@given(configs, st.integers(0, 1000), st.floats(-1, 2))
def test_the_rate_never_exceeds_its_peak_or_falls_below_zero(config: OptimConfig, step: int, progress: float) -> None:
    assert 0.0 <= lr_factor(config, step, progress) <= 1.0 + 1e-12


@given(configs, progresses)
def test_warm_up_is_linear_in_steps_and_over_after_them(config: OptimConfig, progress: float) -> None:
    full = lr_factor(config, 10**9, progress)
    for step in range(config.warmup_steps + 3):
        share = min(1.0, (step + 1) / (config.warmup_steps + 1))
        assert lr_factor(config, step, progress) == pytest.approx(share * full)


@given(configs, progresses, progresses)
def test_after_warm_up_the_rate_falls_without_jumps(config: OptimConfig, some: float, other: float) -> None:
    early, late = sorted((some, other))
    fall = lr_factor(config, 10**9, early) - lr_factor(config, 10**9, late)
    steepest = math.pi / 2 if config.schedule == "cosine" else 1 / config.decay_frac
    assert -1e-12 <= fall <= steepest * (late - early) + 1e-9


@given(configs)
def test_the_rate_starts_at_its_peak_and_ends_at_its_minimum(config: OptimConfig) -> None:
    assert lr_factor(config, 10**9, 0.0) == pytest.approx(1.0)
    assert lr_factor(config, 10**9, 1.0) == pytest.approx(config.min_lr_frac)


@given(st.floats(0.05, 0.95), st.floats(0, 1), st.floats(0, 1))
def test_wsd_is_flat_until_its_last_part_and_linear_in_it(decay_frac: float, low: float, x: float) -> None:
    config = OptimConfig(schedule="wsd", decay_frac=decay_frac, min_lr_frac=low)
    assert lr_factor(config, 0, x * (1 - decay_frac)) == pytest.approx(1.0)
    assert lr_factor(config, 0, 1 - x * decay_frac) == pytest.approx(low + (1 - low) * x, abs=1e-9)


def test_the_cosine_is_half_way_down_at_half_time() -> None:
    assert lr_factor(OptimConfig(min_lr_frac=0.2), 0, 0.5) == pytest.approx(0.6)
    assert lr_factor(OptimConfig(min_lr_frac=0.0), 0, 0.25) == pytest.approx((1 + math.sqrt(0.5)) / 2)


def test_wsd_without_a_decay_part_stays_at_its_peak() -> None:
    assert lr_factor(OptimConfig(schedule="wsd", decay_frac=0.0), 0, 1.0) == 1.0


# ---- batch rule ----


def test_four_times_the_batch_takes_twice_the_rate_and_the_same_epochs_of_decay() -> None:
    config = OptimConfig(lr=1e-3, weight_decay=0.1, reference_batch_tokens=1000, reference_tokens=10**6)
    assert scaled_with_batch(config, 1000, 10**6) == pytest.approx((1e-3, 0.1))
    assert scaled_with_batch(config, 4000, 10**6) == pytest.approx((2e-3, 0.2))
    assert scaled_with_batch(config, 250, 2 * 10**6) == pytest.approx((5e-4, 0.025))
    assert scaled_with_batch(config, 4000, None) == pytest.approx((2e-3, 0.2))


@given(st.integers(1, 10**8), st.integers(1, 10**12))
def test_the_timescale_in_epochs_is_the_references(batch_tokens: int, total_tokens: int) -> None:
    config = OptimConfig()
    lr, decay = scaled_with_batch(config, batch_tokens, total_tokens)
    reference = config.reference_batch_tokens / (config.lr * config.weight_decay * config.reference_tokens)
    assert batch_tokens / (lr * decay * total_tokens) == pytest.approx(reference)


@pytest.mark.parametrize(
    "fields",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"beta2": 1.5},
        {"beta1": 1.0},  # 0 / 0 in the correction of the moment's bias
        {"beta2": 1.0},
        {"momentum": 1.0},
        {"eps": 0.0},
        {"grad_clip": math.inf},
        {"warmup_steps": -1},
        {"decay_frac": 2.0},
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_the_name_the_user_types(fields: dict[str, float]) -> None:
    name = next(iter(fields)).replace("_", "-")
    with pytest.raises(UserError, match=f"optim.{name} is"):
        OptimConfig(**fields).check()  # type: ignore[arg-type]
    OptimConfig().check()
