"""The loss in chunks against torch's cross-entropy over all logits. N tokens, C width, V vocabulary."""

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.model import loss as loss_module
from paceline.model.loss import loss_sum


def inputs(num_tokens: int, width: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NC = torch.randn(num_tokens, width, generator=generator)
    weight_VC = torch.randn(vocab, width, generator=generator) * 0.3
    return hidden_NC, weight_VC, torch.randint(0, vocab, (num_tokens,), generator=generator)


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_cross_entropys(
    num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "LOSS_CHUNK_ELEMENTS_CPU", 1)
    monkeypatch.setattr(loss_module, "LOSS_CHUNK_ROWS", 256)
    hidden_NC, weight_VC, targets_N = inputs(num_tokens, 16, 99)
    hidden_NC, weight_VC = hidden_NC.to(dtype), weight_VC.double() if dtype == torch.float64 else weight_VC
    hidden_NC.requires_grad_()
    weight_VC.requires_grad_()
    loss = loss_sum(hidden_NC, weight_VC, targets_N)
    grads = torch.autograd.grad(loss * 0.25, (hidden_NC, weight_VC))
    assert [grad.dtype for grad in grads] == [dtype, weight_VC.dtype]

    hidden_64, weight_64 = (x.detach().double().requires_grad_() for x in (hidden_NC, weight_VC))
    expected = F.cross_entropy(hidden_64 @ weight_64.T, targets_N, reduction="sum")
    expected_grads = torch.autograd.grad(expected * 0.25, (hidden_64, weight_64))
    tolerance = {torch.bfloat16: 0.02, torch.float16: 0.003}.get(dtype, 1e-5)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance / 4)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert (grad - expected_grad).norm() <= tolerance * expected_grad.norm()


def test_without_gradients_it_is_the_same_number() -> None:
    hidden_NC, weight_VC, targets_N = inputs(64, 16, 99)
    with torch.no_grad():
        without = loss_sum(hidden_NC, weight_VC, targets_N)
    assert torch.equal(without, loss_sum(hidden_NC.requires_grad_(), weight_VC, targets_N))


def test_a_frozen_head_or_frozen_hidden_states() -> None:
    hidden_NC, weight_VC, targets_N = inputs(64, 16, 99)
    for trained, frozen in ((hidden_NC, weight_VC), (weight_VC, hidden_NC)):
        loss_sum(hidden_NC, weight_VC, targets_N)
        trained.requires_grad_()
        loss_sum(hidden_NC, weight_VC, targets_N).backward()
        assert trained.grad is not None
        assert frozen.grad is None
        trained.requires_grad_(False)
        trained.grad = None


def test_large_logits_do_not_overflow() -> None:
    hidden_NC = torch.tensor([[1000.0], [-1000.0]])
    weight_VC = torch.tensor([[1.0], [-1.0]])
    targets_N = torch.tensor([0, 0])
    assert loss_sum(hidden_NC, weight_VC, targets_N).item() == 2000.0


def test_no_factor_is_rounded_to_the_dtype_of_the_products() -> None:
    """CUDA casts a 0-dim operand to the other's dtype first, bfloat16 here; a CPU does not: the dtypes are watched."""

    class Watch(TorchDispatchMode):
        pairs: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mul.Tensor and isinstance(args[1], torch.Tensor):
                self.pairs.append(args[:2])
            return func(*args, **(kwargs or {}))

    hidden_NC, weight_VC, targets_N = inputs(64, 16, 99)
    hidden_NC = hidden_NC.bfloat16().requires_grad_()
    loss = loss_sum(hidden_NC, weight_VC, targets_N)
    with Watch():
        (loss * (1 / 3)).backward()
    rounded = [(a, b) for a, b in Watch.pairs if a.dtype == torch.bfloat16 and b.dtype == torch.float32 and not b.dim()]
    assert Watch.pairs
    assert not rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_is_the_plain_one_and_one_graph(dtype: torch.dtype) -> None:
    hidden_NC, weight_VC, targets_N = inputs(64, 16, 99)
    logits_NV = (hidden_NC @ weight_VC.T).to(dtype)
    fused = torch.compile(loss_module._fused_chunk, fullgraph=True, backend="aot_eager")
    loss, grad_NV = fused(logits_NV, targets_N, True)
    expected, expected_NV = loss_module._chunk(logits_NV.clone(), targets_N, True)
    assert fused(logits_NV, targets_N, False) == (loss, None)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert grad_NV.dtype == dtype
    torch.testing.assert_close(grad_NV, expected_NV, rtol=0.008 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
