"""The update rules against torch's own and against plain loops; the state by parameter name."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.model.config import ModelConfig
from paceline.model.gpt import build
from paceline.optim.adamw import AdamW
from paceline.optim.config import OptimConfig
from paceline.optim.muon import Muon, orthogonalise
from paceline.optim.optimizer import is_updated_whole, make_optimizers, role

CONFIG = ModelConfig(arch="gpt2", bias=True, n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=20)
FLOAT32 = torch.float32


def gradients_for(model: nn.Module, step: int) -> None:
    """Gives every parameter a gradient that is a function of the step."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


Optimizers = list[AdamW | Muon]


def make(model: nn.Module, name: str = "adamw", **fields: float) -> Optimizers:
    config = OptimConfig(name=name, **fields)  # type: ignore[arg-type]
    settings = {"lr": config.lr, "weight_decay": config.weight_decay, "compute_dtype": FLOAT32}
    return make_optimizers(config, model.named_parameters(), **settings)  # type: ignore[arg-type]


def update(optimizers: Optimizers, lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


def run(model: nn.Module, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        gradients_for(model, step)
        update(optimizers, 1e-2 / (step + 1))


def state(model: nn.Module, optimizers: Optimizers) -> dict[str, dict[str, torch.Tensor]]:
    """By parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: moments for optimizer in optimizers for p, moments in optimizer.state.items()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_every_parameter_has_the_role_its_name_and_shape_say() -> None:
    roles = {name: role(name, parameter.shape) for name, parameter in build(CONFIG, 0, "cpu").named_parameters()}
    assert roles["embed_tokens.weight"] == roles["embed_positions.weight"] == "embedding"
    assert all(r == "vector" for name, r in roles.items() if name.endswith("bias") or "norm" in name)
    assert all(r == "matrix" for name, r in roles.items() if name.startswith("layers") and name.endswith("proj.weight"))
    assert role("lm_head.weight", (2, 2)) == "embedding"


def test_adamw_is_the_papers_with_decay_of_matrices_and_embeddings_only() -> None:
    model = build(CONFIG, 0, "cpu")
    optimizer = make(model, weight_decay=0.3, embedding_lr_ratio=4.0)
    by_hand = {name: p.detach().double() for name, p in model.named_parameters()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in by_hand.items()}
    for step in range(4):
        peak = 1e-2 / (step + 1)
        gradients_for(model, step)
        for name, parameter in model.named_parameters():
            lr = 4 * peak if name.startswith("embed_") else peak
            gradient, decay = parameter.grad.double(), 0.3 if parameter.ndim >= 2 else 0.0
            first, second = moments[name]
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            by_hand[name] *= 1 - lr * decay
            by_hand[name] -= (
                lr * (first / (1 - 0.9 ** (step + 1))) / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            )
        update(optimizer, peak)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), by_hand[name], rtol=1e-5, atol=1e-6)


def test_adamw_is_bit_for_bit_torchs_fused_one() -> None:
    model, theirs = build(CONFIG, 0, "cpu"), build(CONFIG, 0, "cpu")
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    optimizer = make(model)
    for step in range(3):
        gradients_for(model, step)
        gradients_for(theirs, step)
        update(optimizer, 1e-2)
        adamw.step()
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_muon_takes_the_layers_matrices_and_leaves_the_rest_to_adamw() -> None:
    model, plain = build(CONFIG, 0, "cpu"), build(CONFIG, 0, "cpu")
    muon, adamw = make(model, "muon"), make(plain)
    run(model, muon, range(2))
    run(plain, adamw, range(2))
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other) == (role(name, mine.shape) != "matrix"), name
    of_muon = {name for name, moments in state(model, muon).items() if "momentum" in moments}
    assert of_muon == {name for name, p in model.named_parameters() if role(name, p.shape) == "matrix"}


# ---- Muon ----


@given(rows=st.integers(2, 40), columns=st.integers(2, 40), seed=st.integers(0, 1000))
def test_orthogonalised_singular_values_lie_about_one(rows: int, columns: int, seed: int) -> None:
    matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(seed))
    # Five iterations lift what is above about a hundredth of the norm; smaller ones stay below one.
    conditioned = torch.linalg.svdvals(matrices)[:, -1] > 0.02 * torch.linalg.matrix_norm(matrices)
    values = torch.linalg.svdvals(orthogonalise(matrices, FLOAT32))
    assert float(values.max()) < 1.3
    if bool(conditioned.any()):
        assert float(values[conditioned].min()) > 0.6


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (32, 4)])
def test_orthogonalise_keeps_the_singular_vectors_whatever_the_scale(scale: float, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = 3.4445, -4.7750, 2.0315
    s = s / s.norm()
    for _ in range(5):  # the iteration acts on each singular value alone
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonalise(matrix[None] * scale, FLOAT32)[0], u * s @ vt, rtol=1e-3, atol=2e-3)


def test_orthogonalise_works_in_bfloat16_and_answers_in_float32() -> None:
    found = orthogonalise(torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(0)), torch.bfloat16)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.35


def test_a_zero_gradient_orthogonalises_to_zero() -> None:
    assert torch.equal(orthogonalise(torch.zeros(1, 4, 5), FLOAT32), torch.zeros(1, 4, 5))


SHAPES = [(8, 8), (8, 16), (16, 8), (8, 8), (8, 16)]


def matrices(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_muons_batched_update_is_that_of_a_loop_over_matrices() -> None:
    params, lr, decay, momentum = matrices(0), 0.02, 0.1, 0.95
    muon = Muon(params, lr=lr, decay=decay, momentum=momentum, compute_dtype=FLOAT32)
    by_hand = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(p) for p in by_hand]
    for step in range(3):
        for parameter, gradient in zip(params, matrices(step + 1), strict=True):
            parameter.grad = gradient.detach()
        muon.step()
        for i, gradient in enumerate(g.detach() for g in matrices(step + 1)):
            buffers[i] = momentum * buffers[i] + (1 - momentum) * gradient
            x = (1 - momentum) * gradient + momentum * buffers[i]
            x = x / x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
            by_hand[i] = by_hand[i] * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(x.shape)) * x
    for mine, wanted in zip(params, by_hand, strict=True):
        torch.testing.assert_close(mine.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_muon_is_torchs_muon_within_its_bfloat16_rounding() -> None:
    """torch's computes in bfloat16 always; so does ours here, batched. One unit of lr * 0.2 * sqrt(16) * 2^-8."""
    mine, theirs = matrices(0), matrices(0)
    ours = Muon(mine, lr=0.02, decay=0.1, momentum=0.95, compute_dtype=torch.bfloat16)
    torchs = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for a, b, gradient in zip(mine, theirs, matrices(step + 1), strict=True):
            a.grad, b.grad = gradient.detach().clone(), gradient.detach().clone()
        ours.step()
        torchs.step()
    for a, b in zip(mine, theirs, strict=True):
        assert float((a - b).detach().abs().max()) < 4 * 0.02 * 0.2 * 4 * 2**-6


# ---- state ----


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_goes_on_bit_for_bit_from_a_copied_state(name: str) -> None:
    """As a checkpoint holds it: moments by parameter, the number of updates by group."""
    straight = build(CONFIG, 0, "cpu")
    run(straight, make(straight, name), range(6))
    first, second = build(CONFIG, 0, "cpu"), build(CONFIG, 99, "cpu")
    before, after = make(first, name), make(second, name)
    run(first, before, range(3))
    second.load_state_dict(first.state_dict())
    targets = dict(second.named_parameters())
    for old, new in zip(before, after, strict=True):
        for group, mine in zip(old.param_groups, new.param_groups, strict=True):
            mine.update({key: value for key, value in group.items() if key != "params"})
        names = {parameter: name for name, parameter in first.named_parameters()}
        for parameter, moments in old.state.items():
            new.state[targets[names[parameter]]] = {key: tensor.clone() for key, tensor in moments.items()}
    run(second, after, range(3, 6))
    wanted = weights(straight)
    assert all(torch.equal(weight, wanted[n]) for n, weight in weights(second).items())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_is_that_of_every_parameter_and_as_large_as_announced(name: str) -> None:
    model = build(CONFIG, 0, "cpu")
    optimizers = make(model, name)
    assert not state(model, optimizers)
    run(model, optimizers, range(1))
    found = state(model, optimizers)
    assert found.keys() == dict(model.named_parameters()).keys()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert all(tensor.shape == shapes[n] for n, moments in found.items() for tensor in moments.values())
    num_elements = sum(tensor.numel() for moments in found.values() for tensor in moments.values())
    per_element = {n: 1 if is_updated_whole(OptimConfig(name=name), n, s) else 2 for n, s in shapes.items()}  # type: ignore[arg-type]
    assert num_elements == sum(per_element[n] * p.numel() for n, p in model.named_parameters())


# ---- runs of elements ----


@pytest.mark.parametrize("seed", range(4))
def test_adamw_by_any_runs_of_elements_is_adamw_of_the_whole(seed: int) -> None:
    """Within rounding, not to the bit: what is left over behind the vectors of a run is rounded otherwise."""
    draw = random.Random(seed)
    whole = torch.randn(301, generator=torch.Generator().manual_seed(seed))
    parted = whole.clone()
    edges = sorted({0, 301, *(draw.randint(1, 300) for _ in range(3))})
    runs = [parted[a:b] for a, b in itertools.pairwise(edges)]
    settings = {"lr": 1e-2, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    one, other = AdamW([whole], [], **settings), AdamW(runs, [], **settings)  # type: ignore[arg-type]
    for step in range(3):
        whole.grad = torch.randn(301, generator=torch.Generator().manual_seed(100 + step))
        for part, (a, b) in zip(runs, itertools.pairwise(edges), strict=True):
            part.grad = whole.grad[a:b]
        one.step()
        other.step()
    torch.testing.assert_close(parted, whole, rtol=1e-6, atol=1e-7)
    for key, tensor in one.state[whole].items():
        joined = torch.cat([other.state[part][key] for part in runs])
        torch.testing.assert_close(joined, tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_parameter_without_a_gradient_stays_and_the_others_get_their_own(name: str) -> None:
    model, plain = build(CONFIG, 0, "cpu"), build(CONFIG, 0, "cpu")
    before = weights(model)
    num_dims = 2 if name == "muon" else 1
    idle = [n for n, p in model.named_parameters() if n.startswith("layers.0.") and p.ndim == num_dims]
    for each in (model, plain):
        gradients_for(each, 0)
    for n, parameter in model.named_parameters():
        parameter.grad = None if n in idle else parameter.grad
    update(make(model, name), 1e-2)
    update(make(plain, name), 1e-2)
    for (n, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, before[n] if n in idle else other, msg=n)


def test_an_optimizer_of_nothing_updates_nothing() -> None:
    for optimizer in make_optimizers(OptimConfig(name="muon"), [], lr=1.0, weight_decay=0.1, compute_dtype=FLOAT32):
        optimizer.step()
        assert optimizer.state == {}


def test_muon_takes_matrices_whole_at_a_cost_that_counts_its_products() -> None:
    assert is_updated_whole(OptimConfig(name="muon"), "layers.0.mlp.up_proj.weight", (64, 16))
    assert not is_updated_whole(OptimConfig(), "layers.0.mlp.up_proj.weight", (64, 16))
    with FlopCounterMode(display=False) as counter:
        orthogonalise(torch.ones(1, 64, 16), FLOAT32)
    matrix = torch.ones(64, 16)
    assert Muon.update_cost(matrix) == Muon.update_cost(matrix.T) == counter.get_total_flops()


def test_small_gradients_survive_float16() -> None:
    small = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)) * 1e-9  # float16 ends at 6e-8
    expected = orthogonalise(small, torch.float32)
    assert (orthogonalise(small, torch.float16) - expected).norm() < 0.02 * expected.norm()
