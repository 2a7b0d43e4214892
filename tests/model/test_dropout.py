"""Dropout's laws: a function of the sequence's key, the site and the place; fair, independent, and differentiable."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from paceline.base import seeds
from paceline.model.config import ModelConfig
from paceline.model.dropout import dropout, keep_mask
from paceline.model.gpt import build

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 50}
KEYS = st.integers(0, 2**63 - 1)


def run_keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([seeds.key(seed, "dropout", i) for i in range(count)])


@given(keys=st.lists(KEYS, min_size=1, max_size=5), site=st.integers(0, 200), probability=st.floats(0.0, 0.99))
def test_a_sequence_has_the_same_mask_in_every_batch(keys: list[int], site: int, probability: float) -> None:
    together = keep_mask(torch.tensor(keys), site, 7, 12, probability)
    for i, key in enumerate(keys):
        assert torch.equal(together[i], keep_mask(torch.tensor([key]), site, 7, 12, probability)[0])


@pytest.mark.parametrize("width", [11, 12])
def test_a_compiler_sees_other_operations_and_gives_the_same_mask(width: int) -> None:
    compiled = torch.compile(keep_mask, backend="eager", dynamic=False)
    keys, site = run_keys(3), torch.tensor(5)
    for probability in (0.1, 0.9999999):
        expected = keep_mask(keys, site, 9, width, probability)
        assert torch.equal(compiled(keys, site, 9, width, probability), expected)


@pytest.mark.long
def test_no_constant_of_compiled_positions_is_beyond_what_triton_takes_for_int32() -> None:
    """On a GPU -52497009120 * position, which a compiler had made of two factors, ended the run."""
    keys_B = torch.tensor([5, -(2**62) + 77])

    def mask(keys_B: torch.Tensor) -> torch.Tensor:
        return keep_mask(keys_B, torch.tensor(3), 1024, 64, 0.1)

    found, code = run_and_get_code(torch.compile(mask), keys_B)
    assert torch.equal(found, mask(keys_B))
    assert any("1640531535" in text for text in code)  # positions are multiplied in this code
    factors = [int(number) for text in code for number in re.findall(r"(-?\d{9,})L*\)*\*", text)]
    assert all(-(2**31) <= factor < 2**31 for factor in factors), factors


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_the_kept_fraction_is_right_as_a_whole_and_along_each_dim(probability: float) -> None:
    keep = keep_mask(run_keys(64), 3, 64, 96, probability).double()
    for dims in [(0, 1, 2), (1, 2), (0, 2), (0, 1)]:
        count = keep.numel() / keep.mean(dims).numel()
        deviation = (keep.mean(dims) - (1 - probability)).abs().max().item()
        assert deviation <= 5 * (probability * (1 - probability) / count) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a.flatten().double(), b.flatten().double())))[0, 1].abs().item()


def test_masks_of_sites_sequences_neighbours_and_near_keys_are_independent() -> None:
    near = torch.tensor([0, 1, 2, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 62])  # keys that differ in one bit
    masks = torch.cat([keep_mask(keys, site, 128, 128, 0.5) for keys in (near, run_keys(5)) for site in (0, 1, 2)])
    bound = 5 / 128  # five standard deviations of a correlation of 128 * 128 independent pairs
    for i in range(len(masks)):
        for j in range(i):
            assert correlation(masks[i], masks[j]) < bound
        for step in (1, 2, 16):
            assert correlation(masks[i][:, step:], masks[i][:, :-step]) < bound
            assert correlation(masks[i][step:], masks[i][:-step]) < bound


def test_gradient_is_the_masks() -> None:
    keys = run_keys(2)
    x = torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, keys, 1), (x,))
    y = dropout(x, 0.4, keys, 1)
    keep = keep_mask(keys, 1, 3, 4, 0.4)
    torch.testing.assert_close(y, torch.where(keep, x / 0.6, torch.zeros_like(x)))


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_loss_and_gradients_do_not_depend_on_the_batching(
    arch: str, tokens_BT: torch.Tensor, targets_BT: torch.Tensor
) -> None:
    model = build(ModelConfig(arch=arch, dropout=0.3, **SHAPE), 0, "cpu").double()  # type: ignore[arg-type]
    model.compute_dtype = torch.float64
    keys = run_keys(3)
    whole = model(tokens_BT, targets_BT, keys)
    whole.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = [model(tokens_BT[i : i + 1], targets_BT[i : i + 1], keys[i : i + 1]) for i in (2, 0, 1)]
    torch.stack(parts).sum().backward()
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-6)


def test_it_is_off_in_eval_without_keys_and_at_zero(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
    model = build(ModelConfig(arch="gpt2", dropout=0.3, **SHAPE), 0, "cpu")  # type: ignore[arg-type]
    plain = build(ModelConfig(arch="gpt2", **SHAPE), 0, "cpu")  # type: ignore[arg-type]
    keys = run_keys(3)
    expected = plain(tokens_BT, targets_BT)
    assert torch.equal(plain(tokens_BT, targets_BT, keys), expected)
    assert torch.equal(model(tokens_BT, targets_BT), expected)
    dropped = model(tokens_BT, targets_BT, keys)
    assert not torch.equal(dropped, expected)
    assert torch.equal(model(tokens_BT, targets_BT, keys), dropped)
    assert not torch.equal(model(tokens_BT, targets_BT, run_keys(3, seed=1)), dropped)
    assert torch.equal(model.eval()(tokens_BT, targets_BT, keys), expected)


def test_compiled_blocks_share_one_graph_with_dropout() -> None:
    """Torch gives up compiling after eight graphs; a site in the graph made one for each block."""
    from torch._dynamo.testing import CompileCounterWithBackend  # a second, which collecting does without

    config = ModelConfig(n_layer=3, n_head=2, n_embd=8, vocab_size=16, n_positions=4, dropout=0.1)
    model, counter = build(config, 0, "cpu"), CompileCounterWithBackend("eager")
    tokens_BT, keys_B = torch.zeros(2, 4, dtype=torch.int64), torch.arange(2)
    plain = model(tokens_BT, tokens_BT, keys_B)
    torch._dynamo.reset()
    for block in model.layers:
        block.compile(backend=counter)
    for _ in range(2):
        compiled = model(tokens_BT, tokens_BT, keys_B)
        compiled.backward()
    assert counter.frame_count == 1
    assert compiled == plain
