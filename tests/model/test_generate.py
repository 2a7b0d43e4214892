"""Generation: the cache changes no number, and a text is a function of weights and seed."""

import pytest
import torch

from paceline.base.errors import UserError
from paceline.model.config import ModelConfig
from paceline.model.generate import generate
from paceline.model.gpt import GPT, build

CONFIG = ModelConfig(n_kv_head=2, n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=50)


def model_of(config: ModelConfig) -> GPT:
    """A model whose choices differ from token to token."""
    model = build(config, 0, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0) if parameter.dim() == 2 else None
    return model


@pytest.mark.parametrize("cuts", [[1] * 16, [5] + [1] * 11, [3, 4, 1, 8]], ids=["ones", "prompt", "pieces"])
def test_cached_logits_are_those_of_the_whole(config: ModelConfig, cuts: list[int], tokens_BT: torch.Tensor) -> None:
    model = model_of(config)
    cache = model.make_cache(batch=3)
    with torch.no_grad():
        parts = torch.cat([model.logits(piece_BT, cache) for piece_BT in tokens_BT.split(cuts, 1)], 1)
        torch.testing.assert_close(parts, model.logits(tokens_BT), rtol=1e-4, atol=1e-5)


def test_greedy_is_the_likeliest_token_each_time(config: ModelConfig) -> None:
    model, context = model_of(config), [1, 2, 3]
    for token in generate(model, [1, 2, 3], 13, temperature=0.0):
        assert token == int(model.logits(torch.tensor([context]))[0, -1].argmax())
        context.append(token)
    assert len(context) == 16


def test_past_the_positions_the_latest_half_is_read_anew(config: ModelConfig) -> None:
    model, prompt = model_of(config), list(range(20))  # 16 positions
    context = prompt[-16:]
    tokens = list(generate(model, prompt, 30, temperature=0.0))
    assert len(tokens) == 30
    for token in tokens:
        assert token == int(model.logits(torch.tensor([context]))[0, -1].argmax())
        context.append(token)
        context = context if len(context) <= 16 else context[-8:]


def test_a_text_is_a_function_of_the_seed() -> None:
    model = model_of(CONFIG)

    def text(seed: int, **kwargs: float) -> list[int]:
        return list(generate(model, [1], 40, generator=torch.Generator().manual_seed(seed), **kwargs))  # type: ignore[arg-type]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, top_k=1) == text(2, top_k=1) == list(generate(model, [1], 40, temperature=0.0))
    assert text(1, temperature=1e-6) == text(2, temperature=1e-6)


def test_draws_follow_the_distribution() -> None:
    model, generator = model_of(CONFIG), torch.Generator().manual_seed(0)
    likely = (model.logits(torch.tensor([[7, 8]]))[0, -1] / 2.0).topk(4)
    expected = likely.values.softmax(0)
    counts = dict.fromkeys(likely.indices.tolist(), 0)
    for _ in range(400):
        counts[next(generate(model, [7, 8], 1, temperature=2.0, top_k=4, generator=generator))] += 1
    drawn = torch.tensor(list(counts.values())) / 400
    assert (drawn - expected).abs().max() < 5 * (0.25 / 400) ** 0.5


def test_cudnns_attention_which_plans_for_each_length_is_off_while_a_token_is_computed() -> None:
    model = build(ModelConfig(n_layer=1, n_head=2, n_embd=32, n_positions=16, vocab_size=50), 1, "cpu")
    inside = []
    model.layers[0].register_forward_hook(lambda *_: inside.append(torch.backends.cuda.cudnn_sdp_enabled()))
    between = [torch.backends.cuda.cudnn_sdp_enabled() for _ in generate(model, [1], 3)]
    assert (inside, between) == ([False] * 3, [True] * 3)


def test_stop_ends_the_text_and_is_its_last_token() -> None:
    model = model_of(ModelConfig(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=8))
    plain = list(generate(model, [1], 60))
    stopped = list(generate(model, [1], 60, stop=5))
    assert 5 in plain
    assert stopped == plain[: plain.index(5) + 1]


@pytest.mark.parametrize(
    ("prompt", "options", "word"), [([], {}, "prompt"), ([1], {"temperature": -1.0}, "-1.0"), ([1], {"top_k": 0}, "0")]
)
def test_refusals(prompt: list[int], options: dict[str, float], word: str) -> None:
    model = build(ModelConfig(n_layer=1, n_head=2, n_embd=16, n_positions=4, vocab_size=8), 0, "cpu")
    with pytest.raises(UserError, match=word):
        next(generate(model, prompt, 1, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_diverged_has_no_text(temperature: float) -> None:
    model = build(ModelConfig(n_layer=1, n_head=2, n_embd=16, n_positions=4, vocab_size=8), 0, "cpu")
    with torch.no_grad():
        model.norm.weight.mul_(1e38)
        model.head_weight.mul_(1e4)
    with pytest.raises(UserError, match="logits are not finite"):
        next(generate(model, [1], 1, temperature=temperature))
