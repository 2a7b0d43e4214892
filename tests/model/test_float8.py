"""Products of float8 numbers, which torch emulates on CPUs: each is that of the rounded matrices. A model learns."""

from dataclasses import replace

import pytest
import torch
from rank_facts import FACTS

from paceline.base.errors import UserError
from paceline.config import Config, load_preset
from paceline.model import float8
from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.train.resolve import resolve


def test_all_three_products_are_those_of_matrices_rounded_to_float8() -> None:
    drawn = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*size, generator=drawn).bfloat16() for size in ((2, 24, 48), (32, 48)))
    gradient = (torch.randn(2, 24, 32, generator=drawn) * 1e-6).bfloat16()  # too small for e5m2 without a scale
    x.requires_grad_(), w.requires_grad_()
    out = float8.linear(x, w)
    out.backward(gradient)

    def near(matrix: torch.Tensor, mantissa_bits: int, largest: float) -> torch.Tensor:
        """Rounds to so many bits, subnormal below the exponent that leaves room for `largest` above it."""
        scale = matrix.double().abs().max() / largest
        scaled = matrix.double() / scale
        least = {3: -6, 2: -14}[mantissa_bits]
        unit = 2.0 ** (scaled.abs().log2().floor().clamp(min=least) - mantissa_bits)
        return (scaled / unit).round() * unit * scale

    x8, w8 = near(x.detach().flatten(0, 1), 3, 448.0), near(w.detach(), 3, 448.0)
    g8 = near(gradient.flatten(0, 1), 2, 57344.0)
    for found, wanted in ((out, x8 @ w8.T), (x.grad, g8 @ w8), (w.grad, g8.T @ x8)):
        assert found is not None
        torch.testing.assert_close(
            found.double().reshape(wanted.shape), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())
        )
    assert float((out - torch.nn.functional.linear(x, w)).detach().norm() / out.detach().norm()) < 0.06


@pytest.mark.long
def test_a_model_with_float8_products_learns_nearly_as_one_with_bfloat16() -> None:
    losses = {}
    for is_float8 in (False, True):
        model = build(ModelConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16), 1, "cpu")
        model.compute_dtype = torch.bfloat16
        if is_float8:
            model.use_float8()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens = torch.arange(4 * 16).view(4, 16) % 60
        losses[is_float8] = []
        for _ in range(20):
            loss = model(tokens, tokens.roll(-1, 1)) / tokens.numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[is_float8].append(float(loss.detach()))
    assert losses[True] != losses[False]
    assert losses[False][-1] < losses[False][0] - 1.5
    assert losses[True] == pytest.approx(losses[False], abs=0.1)


def test_float8_is_refused_where_there_are_no_units_for_it_or_sizes_do_not_fit() -> None:
    config = load_preset("tiny", Config()).replace("train", dtype="float8")
    with pytest.raises(
        UserError, match=r"rank 1 computes on a processor: a CPU has no float8 units; use --train.dtype bf"
    ):
        resolve(config, 65, [replace(FACTS, why_no_float8=""), FACTS])
    with pytest.raises(UserError, match=r"multiples of 16, and data.seq-len is 20"):
        resolve(config.replace("data", seq_len=20), 65, [replace(FACTS, why_no_float8="")])
