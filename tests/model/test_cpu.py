"""Float32 products by oneDNN, taken on AMD, against torch's own; here on any processor with oneDNN."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.model import cpu, layers
from paceline.model.loss import loss_sum

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def is_by_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu, "is_amd_with_avx512", lambda: request.param)
    monkeypatch.setattr(cpu, "has_wide_units", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    return bool(request.param)


class OneDNN(TorchDispatchMode):
    """Counts its products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket == torch.ops.mkldnn._linear_pointwise
        return func(*args, **kwargs or {})


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_and_its_gradients(shape: tuple[int, ...], bias: bool, is_by_onednn: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = layers.Linear(8, 5, bias=bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(shape, generator=generator, requires_grad=True)
    factor = torch.randn(*shape[:-1], 5, generator=generator)
    with OneDNN() as onednn:
        (layer(x) * factor).sum().backward()
    assert onednn.count == 3 * is_by_onednn

    exact = [each.detach().double().requires_grad_() for each in (x, *layer.parameters())]
    (F.linear(*exact) * factor.double()).sum().backward()
    for mine, expected in zip((x, *layer.parameters()), exact, strict=True):
        assert mine.grad is not None
        assert expected.grad is not None
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_products_of_the_loss(is_by_onednn: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NC = torch.randn(300, 16, generator=generator, requires_grad=True)
    weight_VC = torch.randn(99, 16, generator=generator, requires_grad=True)
    targets_N = torch.randint(0, 99, (300,), generator=generator)
    with OneDNN() as onednn:
        loss = loss_sum(hidden_NC, weight_VC, targets_N)
        loss.backward()
    assert onednn.count == 3 * is_by_onednn  # of one chunk
    exact = [each.detach().double().requires_grad_() for each in (hidden_NC, weight_VC)]
    F.cross_entropy(exact[0] @ exact[1].T, targets_N, reduction="sum").backward()
    for mine, expected in zip((hidden_NC, weight_VC), exact, strict=True):
        assert mine.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(mine.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize(("is_wide", "capability"), [(False, "AVX512"), (True, "AVX2")])
def test_a_weights_gradient_is_torchs_where_units_have_256_bits(
    monkeypatch: pytest.MonkeyPatch, is_wide: bool, capability: str
) -> None:
    monkeypatch.setattr(cpu, "is_amd_with_avx512", lambda: True)
    monkeypatch.setattr(cpu, "has_wide_units", lambda: is_wide)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    layer = layers.Linear(8, 5, bias=False)
    torch.nn.init.ones_(layer.weight)
    with OneDNN() as onednn:
        (layer(torch.ones(3, 8, requires_grad=True)) * torch.ones(3, 5)).sum().backward()
    assert onednn.count == 2


@needs_onednn
def test_only_float32_of_a_cpu_outside_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_amd_with_avx512", lambda: True)
    assert cpu.has_faster_mm(torch.ones(2))
    assert not cpu.has_faster_mm(torch.ones(2, dtype=torch.bfloat16))
    assert not cpu.has_faster_mm(torch.ones(2, device="meta"))
