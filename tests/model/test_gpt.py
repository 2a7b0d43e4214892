"""The decoder against a forward pass written out here from the papers, and the laws it keeps.

B batch, T sequence, C width, H heads, K kv heads, D head width, V vocabulary.
"""

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.base.errors import UserError
from paceline.model import cpu, gpt, layers
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build

Array = npt.NDArray[np.float64]
SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 50}


def lively(config: ModelConfig, seed: int = 0) -> GPT:
    """A model with all parameters well away from their first values, so that nothing cancels by being 0 or 1."""
    model = build(config, seed, "cpu")
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.15, generator=generator))
    return model


class Written:
    """The forward pass in float64 numpy, one head and one position at a time where that is the plainer way."""

    def __init__(self, model: GPT) -> None:
        self.config = model.config
        self.w = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0.0)

    def rms(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps) * self.w[name + ".weight"]

    def norm(self, x: Array, name: str) -> Array:
        if self.config.arch == "llama":
            return self.rms(x, name)
        centred = x - x.mean(-1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.config.norm_eps)
        return unit * self.w[name + ".weight"] + self.w.get(name + ".bias", 0.0)

    def turned(self, x: Array, position: int) -> Array:
        """x as D/2 complex numbers (element i with i + D/2), times e^(i position theta_i)."""
        half = len(x) // 2
        angle = position * self.config.rope_theta ** (-np.arange(half) * 2 / len(x))
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
        return np.concatenate((z.real, z.imag))

    def attention(self, x_TC: Array, name: str) -> Array:
        config, num_tokens = self.config, len(x_TC)
        q = self.linear(x_TC, name + ".q_proj").reshape(num_tokens, config.n_head, -1)
        k = self.linear(x_TC, name + ".k_proj").reshape(num_tokens, config.num_kv_heads, -1)
        v = self.linear(x_TC, name + ".v_proj").reshape(num_tokens, config.num_kv_heads, -1)
        if config.qk_norm:
            q, k = self.rms(q, name + ".q_norm"), self.rms(k, name + ".k_norm")
        if config.arch == "llama":
            q, k = (np.array([[self.turned(h, t) for h in heads] for t, heads in enumerate(a)]) for a in (q, k))
        out = np.zeros((num_tokens, config.n_head, config.head_dim))
        for head in range(config.n_head):
            shared = head // (config.n_head // config.num_kv_heads)
            for t in range(num_tokens):
                score = np.exp(k[: t + 1, shared] @ q[t, head] / math.sqrt(config.head_dim))
                out[t, head] = score @ v[: t + 1, shared] / score.sum()
        return self.linear(out.reshape(num_tokens, -1), name + ".o_proj")

    def mlp(self, x: Array, name: str) -> Array:
        up = self.linear(x, name + ".up_proj")
        if self.config.arch == "llama":
            gate = self.linear(x, name + ".gate_proj")
            return self.linear(gate / (1 + np.exp(-gate)) * up, name + ".down_proj")
        if self.config.gelu == "tanh":
            up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            up = 0.5 * up * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
        return self.linear(up, name + ".down_proj")

    def logits(self, tokens_T: npt.NDArray[np.int64]) -> Array:
        embeddings = x = self.w["embed_tokens.weight"][tokens_T]
        for k, weight in enumerate(self.w.get("embed_mix.weight", []), 1):
            x = x + np.concatenate((np.zeros_like(x[:k]), embeddings[:-k] * weight))
        if self.config.arch == "gpt2":
            x = x + self.w["embed_positions.weight"][: len(tokens_T)]
        for n in range(self.config.n_layer):
            x = x + self.attention(self.norm(x, f"layers.{n}.input_layernorm"), f"layers.{n}.self_attn")
            x = x + self.mlp(self.norm(x, f"layers.{n}.post_attention_layernorm"), f"layers.{n}.mlp")
        head = self.w.get("lm_head.weight", self.w["embed_tokens.weight"])
        return self.norm(x, "norm") @ head.T

    def loss(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> float:
        total = 0.0
        for tokens_T, targets_T in zip(tokens_BT.numpy(), targets_BT.numpy(), strict=True):
            logits_TV = self.logits(tokens_T)
            total -= (logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True)))[
                range(len(targets_T)), targets_T
            ].sum()
        return total


def test_logits_and_loss_are_the_written_forward_pass(
    config: ModelConfig, tokens_BT: torch.Tensor, targets_BT: torch.Tensor
) -> None:
    model = lively(config)
    written = Written(model)
    expected = np.stack([written.logits(tokens_T) for tokens_T in tokens_BT.numpy()])
    logits_BTV = model.logits(tokens_BT)
    assert logits_BTV.dtype == torch.float32
    np.testing.assert_allclose(logits_BTV.detach().numpy(), expected, rtol=1e-4, atol=2e-5)
    loss = model(tokens_BT, targets_BT)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert loss.item() == pytest.approx(written.loss(tokens_BT, targets_BT), rel=1e-5)


def test_gradients_agree_with_differences(
    config: ModelConfig, tokens_BT: torch.Tensor, targets_BT: torch.Tensor
) -> None:
    model = lively(config)
    model(tokens_BT, targets_BT).backward()
    written, step = Written(model), 1e-5
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        weight = written.w[name]
        place = np.unravel_index(int(parameter.grad.abs().argmax()), weight.shape)
        kept, losses = weight[place], []
        for sign in (1, -1):
            weight[place] = kept + sign * step
            losses.append(written.loss(tokens_BT, targets_BT))
        weight[place] = kept
        assert parameter.grad[place].item() == pytest.approx(
            (losses[0] - losses[1]) / (2 * step), rel=2e-3, abs=1e-5
        ), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logit_sees_a_later_token(config: ModelConfig, dtype: torch.dtype, tokens_BT: torch.Tensor) -> None:
    model = lively(config)
    model.compute_dtype = dtype
    before = model.logits(tokens_BT)
    for t in (0, 7, 15):
        changed_BT = tokens_BT.clone()
        changed_BT[:, t] = (changed_BT[:, t] + 1) % config.vocab_size
        after = model.logits(changed_BT)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


def test_parameter_names_are_llamas() -> None:
    names = {name for name, _ in build(ModelConfig(qk_norm=True, **SHAPE), 0, "cpu").named_parameters()}
    block = ["input_layernorm", "post_attention_layernorm"]
    block += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    block += [f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    expected = {f"layers.{n}.{part}.weight" for n in range(2) for part in block}
    assert names == expected | {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    gpt2 = {name for name, _ in build(ModelConfig(arch="gpt2", bias=True, **SHAPE), 0, "cpu").named_parameters()}
    assert {"embed_positions.weight", "layers.1.mlp.up_proj.bias", "norm.bias"} <= gpt2
    assert not {name for name in gpt2 if "gate" in name or "lm_head" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_queries_equal_repeated_heads(dtype: torch.dtype, tokens_BT: torch.Tensor) -> None:
    grouped = lively(ModelConfig(n_kv_head=2, **SHAPE))
    full = build(ModelConfig(**SHAPE), 0, "cpu")
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    full.load_state_dict(state)
    grouped.compute_dtype = full.compute_dtype = dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(full.logits(tokens_BT), grouped.logits(tokens_BT), rtol=tolerance, atol=tolerance)


def test_a_tied_head_gets_the_gradients_of_both_uses(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
    tied = lively(ModelConfig(arch="gpt2", **SHAPE))
    untied = build(ModelConfig(arch="gpt2", head="untied", **SHAPE), 0, "cpu")
    untied.load_state_dict(tied.state_dict() | {"lm_head.weight": tied.embed_tokens.weight})
    for model in (tied, untied):
        model(tokens_BT, targets_BT).backward()
    assert untied.lm_head is not None
    assert untied.lm_head.weight.grad is not None
    both = untied.embed_tokens.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.embed_tokens.weight.grad, both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointed_blocks_give_identical_gradients(
    config: ModelConfig, dtype: torch.dtype, tokens_BT: torch.Tensor, targets_BT: torch.Tensor
) -> None:
    keys_B, saved_bytes, grads = torch.tensor([5, 6, 7]), [], []
    for checkpoint_blocks in (False, True):
        model = lively(dataclasses.replace(config, dropout=0.2))
        model.compute_dtype, model.checkpoint_blocks = dtype, checkpoint_blocks
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens_BT, targets_BT, keys_B)
        saved_bytes.append(sum(sizes))
        loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
    assert saved_bytes[1] < saved_bytes[0] / 2  # the switch does something


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_keeps_float32_outside_and_stays_near(
    config: ModelConfig, dtype: torch.dtype, tokens_BT: torch.Tensor, targets_BT: torch.Tensor
) -> None:
    grads, losses = [], []
    for compute_dtype in (torch.float32, dtype):
        model = lively(config)
        model.compute_dtype = compute_dtype
        loss = model(tokens_BT, targets_BT)
        loss.backward()
        losses.append(loss)
        assert loss.dtype == torch.float32
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())  # type: ignore[union-attr]
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert not torch.equal(grads[0], grads[1])  # the switch does something
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=5e-3)
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.999


@pytest.mark.parametrize("num_tokens", [1, 5, 512, 700])
def test_attention_by_products_is_sdpa(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, num_tokens, 8, generator=generator, dtype=torch.float64).requires_grad_()
    k, v = (torch.randn(2, 2, num_tokens, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in "kv")
    ours = cpu.attend(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, expected)
    weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_torchs_with_its_gradients(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 24, generator=generator).to(dtype).requires_grad_()
    norm = layers.RMSNorm(24, 1e-3)
    torch.nn.init.normal_(norm.weight, generator=generator)
    x_64, weight_64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = torch.nn.functional.rms_norm(x_64, (24,), weight_64, 1e-3)
    got = norm(x)
    assert got.dtype == dtype
    weight = torch.randn(3, 5, 24, generator=generator)
    grads = torch.autograd.grad((got * weight).sum(), (x, norm.weight))
    expected_grads = torch.autograd.grad((expected * weight).sum(), (x_64, weight_64))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for a, b in zip((got, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_rotary_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    tables = layers.rotary_tables(0, 50, 64, 10000.0, torch.device("cpu"))
    q_50, k_50 = (layers.rotate(x.expand(1, 50, 1, 64), tables)[0, :, 0] for x in (q, k))
    products = q_50 @ k_50.T
    for distance in (0, 1, 17):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layers.rotary_tables(7, 5, 64, 1e4, torch.device("cpu")), tables[:, 7:12])


@pytest.mark.long
def test_compiled_blocks_keep_names_and_results(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
    config = ModelConfig(n_kv_head=2, dropout=0.2, **SHAPE)
    keys_B = torch.tensor([5, 6, 7])
    models = [lively(config), lively(config)]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for block in models[1].layers:
            block.compile(backend="aot_eager")  # the graphs; tests/train/test_switches.py asks what C++ makes of them
        losses = [model(tokens_BT, targets_BT, keys_B) for model in models]
        for loss in losses:
            loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    names = [name for name, _ in models[1].named_parameters()]
    assert names == [name for name, _ in models[0].named_parameters()]
    assert not any("_orig_mod" in name for name in models[1].state_dict())
    for name, a, b in zip(names, models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_first_weights_are_a_function_of_seed_and_name() -> None:
    small = build(ModelConfig(arch="gpt2", **SHAPE), 3, "cpu").state_dict()
    torch.rand(5, generator=torch.Generator())
    deep = build(ModelConfig(arch="gpt2", **(SHAPE | {"n_layer": 2, "vocab_size": 50}), head="untied"), 3, "cpu")
    for name, value in small.items():  # an added parameter moves no other
        assert torch.equal(value, deep.state_dict()[name])
    made = GPT(ModelConfig(arch="gpt2", **SHAPE), seed=3).state_dict()  # as a script makes it
    assert all(torch.equal(value, made[name]) for name, value in small.items())
    other = build(ModelConfig(arch="gpt2", **SHAPE), 4, "cpu").state_dict()
    assert not torch.equal(other["embed_tokens.weight"], small["embed_tokens.weight"])
    assert not torch.equal(small["layers.0.mlp.up_proj.weight"], small["layers.1.mlp.up_proj.weight"])


def test_first_weights_are_gpt2s() -> None:
    config = ModelConfig(arch="gpt2", bias=True, n_layer=8, n_head=4, n_embd=128, n_positions=64, vocab_size=300)
    for name, value in build(config, 0, "cpu").state_dict().items():
        if "norm" in name or "bias" in name:
            assert torch.all(value == (0.0 if "bias" in name else 1.0)), name
            continue
        std = 0.02 / 4 if "o_proj" in name or "down_proj" in name else 0.02  # sqrt(2 * 8) = 4
        assert value.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(value.mean().item()) < 5 * std / value.numel() ** 0.5, name


def test_refusals(tokens_BT: torch.Tensor) -> None:
    with pytest.raises(UserError, match=r"model\.vocab-size"):
        build(ModelConfig(n_positions=8), 0, "cpu")
    with pytest.raises(UserError, match=r"model\.n-positions"):
        build(ModelConfig(vocab_size=8), 0, "cpu")
    with pytest.raises(UserError, match=r"17 tokens.*16 positions.*model\.n-positions"):
        build(ModelConfig(**SHAPE), 0, "cpu").logits(torch.zeros(1, 17, dtype=torch.int64))


def test_on_gpus_a_compiled_norm_may_read_more_tensors_than_the_compiler_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block's first norm reads 15 backward; with torch 2.11 and 2.12 there is no limit, and no option. Finds: a model
    that fsdp moves to the GPU later is compiled on the host without it."""
    options, compiled = gpt._compiler_options(), []
    monkeypatch.setattr(layers.Block, "compile", lambda _, options: compiled.append(options))
    lively(ModelConfig(**SHAPE)).compile_blocks()
    assert compiled == [options] * SHAPE["n_layer"]
    torch.compile(lambda x: x, options=options)  # raises for an option that this torch does not know
    with torch._inductor.config.patch(options):
        assert getattr(torch._inductor.config.triton, "mix_order_reduction_max_reads", 16) >= 16
