"""The closed forms against counting."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.model.config import ModelConfig
from paceline.model.cost import (
    activation_bytes,
    flops_per_token,
    loss_bytes,
    loss_bytes_cpu,
    num_parameters,
    parameter_sizes,
)
from paceline.model.gpt import build

SHAPES = [
    {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 11},
    {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_positions": 24, "vocab_size": 64, "n_hidden": 40},
]
VARIANTS = [
    ModelConfig(arch=arch, head=head, bias=bias, qk_norm=qk_norm, **shape)  # type: ignore[arg-type]
    for arch, head, bias, qk_norm, shape in itertools.product(
        ("gpt2", "llama"), ("tied", "untied"), (False, True), (False, True), SHAPES
    )
    if not (arch == "llama" and bias)
]


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_parameters_are_those_of_the_model(config: ModelConfig) -> None:
    model = build(config, 0, "cpu")
    counted = num_parameters(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert counted.total == sum(sizes.values())
    assert counted.non_embedding == sum(size for name, size in sizes.items() if not name.startswith("embed_"))
    matrices = sum(size for name, size in sizes.items() if name.endswith("proj.weight"))
    assert counted.matmul == matrices + config.vocab_size * config.n_embd


@pytest.mark.parametrize("config", [*VARIANTS, replace(VARIANTS[0], embed_mix=3)], ids=str)
def test_sizes_are_those_of_the_models_parameters_in_their_order(config: ModelConfig) -> None:
    """Backward finishes their gradients in the reverse of it, from which `plan` cuts buckets."""
    sizes = parameter_sizes(config)
    in_order = (*sizes.embed, *config.n_layer * sizes.block, *sizes.head)
    assert in_order == tuple(parameter.numel() for parameter in build(config, 0, "cpu").parameters())


def test_gpt2_small_has_its_known_size() -> None:
    config = ModelConfig(arch="gpt2", bias=True, n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50257)
    assert num_parameters(config).total == 124_439_808  # what transformers reports for openai-community/gpt2


@pytest.mark.parametrize("index", [0, 1, len(VARIANTS) - 1])
def test_flops_are_those_torch_counts(index: int) -> None:
    config = VARIANTS[index]
    model = build(config, 0, "cpu")
    model.compute_dtype = torch.bfloat16  # its attention on a CPU is plain products, which the counter sees
    tokens_BT = torch.zeros(2, 8, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT).backward()
    assert counter.get_total_flops() == flops_per_token(config, 8) * tokens_BT.numel()


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_activation_bytes_are_of_the_right_size(arch: str, checkpoint: bool) -> None:
    config = ModelConfig(arch=arch, n_layer=6, n_head=4, n_embd=64, n_positions=64, vocab_size=100)  # type: ignore[arg-type]
    model = build(config, 0, "cpu")
    model.compute_dtype, model.checkpoint_blocks = torch.bfloat16, checkpoint
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens_BT = torch.zeros(8, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens_BT, tokens_BT)
    counted = sum(storage.nbytes() for storage in seen.values()) - 2 * sum(
        parameter.numel() for name, parameter in model.named_parameters() if "proj" in name and not checkpoint
    )  # without the weights' bfloat16 copies, which do not grow with the batch
    estimate = activation_bytes(config, 64, compute_bytes=2, checkpoint=checkpoint, keeps_scores=True)
    one_block = activation_bytes(config, 64, compute_bytes=2, keeps_scores=True) / 6 if checkpoint else 0
    assert 0.6 < (estimate - one_block) / (counted / tokens_BT.numel()) < 1.6


def test_what_needs_memory_beside_a_blocks_products_is_counted() -> None:
    config = ModelConfig(arch="llama", n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50304)
    with_norms = replace(config, qk_norm=True)
    difference = activation_bytes(with_norms, 1024, compute_bytes=2) - activation_bytes(config, 1024, compute_bytes=2)
    assert difference == 12 * 2 * (768 + 768), "q and k before their norms"
    assert 1.3e9 < loss_bytes(config, 2) < 1.5e9
    # On a CPU: 512 rows of logits of 2 bytes, of 4, and of a gradient of 2; float32 ones are changed in place.
    assert loss_bytes_cpu(config, 2048, 2) == 512 * 50304 * 8
    assert loss_bytes_cpu(config, 100, 4) == 100 * 50304 * 4
