"""Small models for every test of the room."""

from collections.abc import Iterator

import pytest
import torch

from paceline.model.config import ModelConfig

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 50}

CONFIGS = {
    "gpt2-bias-tanh": ModelConfig(arch="gpt2", bias=True, gelu="tanh", **SHAPE),
    "gpt2-untied": ModelConfig(arch="gpt2", head="untied", n_hidden=48, **SHAPE),
    "llama": ModelConfig(arch="llama", **SHAPE),
    "llama-mqa-qk-tied": ModelConfig(arch="llama", n_kv_head=1, qk_norm=True, head="tied", rope_theta=500.0, **SHAPE),
    "llama-mix": ModelConfig(arch="llama", embed_mix=2, n_kv_head=2, **SHAPE),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


@pytest.fixture
def tokens_BT() -> torch.Tensor:
    return torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def targets_BT() -> torch.Tensor:
    return torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _leaves_the_global_generator_alone() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "something drew from torch's global generator"
