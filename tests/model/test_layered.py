"""Layered accumulation: the gradients of micro-batches one after the other, complete half a block at a time."""

import pytest
import torch

from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build

SIZES = [4, 3, 5]
TOKENS_BT, TARGETS_BT = torch.randint(0, 50, (2, 12, 16), generator=torch.Generator().manual_seed(1))
KEYS_B = torch.arange(12) + (7 << 40)
DOCUMENTS_BT = (torch.arange(16) // 6).repeat(12, 1)


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("dtype", "recomputes"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("sizes", [[12], SIZES], ids=str)
def test_gradients_and_loss_are_those_of_micro_batches_one_after_the_other(
    config: ModelConfig, dtype: torch.dtype, recomputes: bool, sizes: list[int]
) -> None:
    model = build(config, 0, "cpu")
    model.compute_dtype, model.checkpoint_blocks = dtype, recomputes
    batch = TOKENS_BT, TARGETS_BT, KEYS_B, DOCUMENTS_BT
    total = torch.zeros(())
    for micro_batch in zip(*(tensor.split(sizes) for tensor in batch), strict=True):
        loss = model(*micro_batch)
        total += loss.detach()
        (loss * 0.3).backward()
    wanted = gradients(model)
    loss = model(*batch, sizes)
    assert torch.equal(loss.detach(), total)
    (loss * 0.3).backward()
    for name, gradient in gradients(model).items():
        if config.tied and name == "embed_tokens.weight":  # both of its uses are added in another order
            assert (gradient - wanted[name]).abs().max() <= 1e-6 * wanted[name].abs().max()
        else:
            assert torch.equal(gradient, wanted[name]), name


def test_gradients_of_half_a_block_are_complete_before_the_half_before_it_begins() -> None:
    model = build(ModelConfig(arch="llama", n_layer=3, n_head=2, n_embd=16, n_positions=16, vocab_size=50), 0, "cpu")
    seen: list[str] = []
    for index, block in enumerate(model.layers):
        for half, norm in (("self_attn", "input_layernorm"), ("mlp", "post_attention_layernorm")):
            entry = f"{half} {index}"
            getattr(block, half).register_full_backward_pre_hook(lambda *_, entry=entry: seen.append(entry))
            last = getattr(block, norm).weight  # the last gradient of its half
            last.register_post_accumulate_grad_hook(lambda _, entry=entry: seen.append(f"gradients of {entry}"))
    model(TOKENS_BT, TARGETS_BT, split=SIZES).backward()
    halves = [f"{half} {index}" for index in (2, 1, 0) for half in ("mlp", "self_attn")]
    assert seen == [entry for half in halves for entry in [half] * 3 + [f"gradients of {half}"]]
