"""The shape of a model: what is derived, and what is refused with the field's name and a way out."""

import subprocess
import sys

import pytest

from paceline.base.errors import UserError
from paceline.model.config import ModelConfig


def test_zeros_are_derived_by_family() -> None:
    gpt2 = ModelConfig(arch="gpt2", n_head=6, n_embd=384)
    llama = ModelConfig(arch="llama", n_head=6, n_embd=384)
    assert (gpt2.head_dim, gpt2.num_kv_heads, gpt2.hidden, gpt2.tied) == (64, 6, 4 * 384, True)
    assert (llama.head_dim, llama.num_kv_heads, llama.hidden, llama.tied) == (64, 6, 1024, False)
    assert ModelConfig(n_embd=100, n_head=5).hidden == 320  # 8/3 * 100 = 266.7, up to a multiple of 64
    assert ModelConfig(n_hidden=123).hidden == 123
    assert ModelConfig(arch="gpt2", head="untied").tied is False
    assert ModelConfig(arch="llama", head="tied").tied is True


def test_the_defaults_and_common_shapes_pass() -> None:
    ModelConfig().check()
    ModelConfig(n_head=8, n_kv_head=2, n_embd=64).check()
    ModelConfig(arch="gpt2", bias=True, dropout=0.1, n_head=2, n_embd=6).check()  # odd heads are fine without rotary


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_embd": 250, "n_head": 4}, ["model.n-embd", "250", "model.n-head", "4", "252"]),
        ({"n_head": 6, "n_embd": 384, "n_kv_head": 4}, ["model.n-kv-head", "4", "model.n-head", "1, 2, 3, 6"]),
        ({"n_head": 4, "n_embd": 36}, ["model.n-head", "9 wide", "--model.n-embd 40"]),
        ({"dropout": 1.0}, ["model.dropout", "1.0", "below 1"]),
        ({"dropout": -0.1}, ["model.dropout", "-0.1"]),
        ({"n_layer": 0}, ["model.n-layer", "0", "at least 1"]),
        ({"n_positions": -1}, ["model.n-positions", "-1"]),
        ({"vocab_size": -5}, ["model.vocab-size", "-5"]),
        ({"norm_eps": 0.0}, ["model.norm-eps", "0.0"]),
        ({"rope_theta": float("inf")}, ["model.rope-theta", "inf"]),
        ({"arch": "gpt3"}, ["model.arch", "gpt3", "gpt2, llama"]),
        ({"head": "both"}, ["model.head", "both", "tied"]),
        ({"gelu": "erf"}, ["model.gelu", "erf", "exact"]),
        ({"bias": True}, ["model.bias", "llama"]),
    ],
)
def test_refused_with_field_value_and_remedy(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        ModelConfig(**fields).check()  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_config_and_cost_do_not_import_torch() -> None:
    code = "import sys, paceline.model.config, paceline.model.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
