"""CPU kernels with the results of layers.py, where torch's own are several times slower. Shape letters as there;
N = B * K, R rows of queries that share a kv head."""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.base.cores import has_wide_units, is_amd_with_avx512

# This attention keeps its probabilities, H * T * T numbers a sequence, and gains little on longer sequences.
_MAX_TOKENS = 1024
_QUERIES_AT_ONCE = 512  # later keys are skipped: a quarter of the work at T=1024


def has_faster_mm(x: Tensor) -> bool:
    """Whether `mm` multiplies matrices like x by oneDNN. In float32 torch calls MKL, which has no AVX-512 code for AMD:
    98 GFLOP/s a core where oneDNN reaches 225 (docs/LOG.md, 2026-11-23). With AVX2 alone MKL is the faster one."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_amd_with_avx512() and has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # private, may go


def mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns a @ b, in `out` if given, on any device and in any dtype. Both have one dtype."""
    is_faster = has_faster_mm(a_MK)
    if is_faster and not a_MK.is_contiguous():  # oneDNN copies it, which takes as long as units of 256 bits save
        is_faster = has_wide_units() and torch.backends.cpu.get_cpu_capability() != "AVX2"
    if not is_faster:
        return torch.mm(a_MK, b_KN) if out is None else torch.mm(a_MK, b_KN, out=out)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.t(), None, "none", [], "")
    return product if out is None else out.copy_(product)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Returns x @ weight.T + bias, [..., O], by `mm`."""
    return cast(Tensor, _Linear.apply(x, weight_OI, bias_O))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        y = mm(x.flatten(0, -2), weight_OI.t())
        y = y if bias_O is None else y.add_(bias_O)
        return y.view(*x.shape[:-1], len(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NO = grads[0].flatten(0, -2)
        return (
            mm(grad_NO, weight_OI).view(x.shape) if needs_x else None,
            mm(grad_NO.t(), x.flatten(0, -2)) if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )


def rms_norm(x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight, [..., C], in the dtype of x. torch has no fused CPU kernel."""
    return cast(Tensor, _RMSNorm.apply(x, weight_C, eps))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """As few passes over memory as eager torch allows; computes in the weight's float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=weight_C.dtype)
        inverse_rms = (norm.square_() / x.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(x, weight_C, inverse_rms)
        y: Tensor = (x * inverse_rms).mul_(weight_C)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """With u = x / rms: dx = (g w - u mean(g w u)) / rms, the mean over the width, and dw = sum(g u)."""
        x, weight_C, inverse_rms = ctx.saved_tensors
        unit = x * inverse_rms
        grad_unit = grads[0] * unit
        mean = (grad_unit @ weight_C / x.shape[-1]).unsqueeze(-1)
        grad_x = (grads[0] * weight_C).sub_(unit.mul_(mean)).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_unit.flatten(0, -2).sum(0), None


def attends_faster(q_BHTD: Tensor) -> bool:
    """Whether `attend` beats torch's kernel, which does not use the AVX512_BF16 units."""
    return q_BHTD.device.type == "cpu" and q_BHTD.dtype == torch.bfloat16 and q_BHTD.shape[2] <= _MAX_TOKENS


def attend(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask_BTT: Tensor | None = None) -> Tensor:
    """Returns causal attention, or attention under a mask, [B, H, T, D], as two batched products and a softmax."""
    B, H, T, D = q_BHTD.shape
    num_kv = k_BKTD.shape[1]
    group = H // num_kv
    k_NTD, v_NTD = k_BKTD.reshape(B * num_kv, T, D), v_BKTD.reshape(B * num_kv, T, D)
    outputs = []
    for start in range(0, T, _QUERIES_AT_ONCE):
        end = min(start + _QUERIES_AT_ONCE, T)
        # Queries that share a kv head are stacked along time: one taller product, no copies of keys or values.
        q_NRD = q_BHTD[:, :, start:end].reshape(B * num_kv, group * (end - start), D)
        if mask_BTT is None:
            mask_RS = torch.full((end - start, end), -math.inf, dtype=q_BHTD.dtype).triu(start + 1).repeat(group, 1)
            mask_NRS = mask_RS.expand(B * num_kv, -1, -1)
        else:
            mask_B1RS = mask_BTT[:, None, start:end, :end]
            mask_NRS = mask_B1RS.expand(-1, H, -1, -1).reshape(B * num_kv, group * (end - start), end)
        scores_NRS = torch.baddbmm(mask_NRS, q_NRD, k_NTD[:, :end].transpose(1, 2), alpha=D**-0.5)
        outputs.append(torch.bmm(scores_NRS.softmax(-1), v_NTD[:, :end]).view(B, H, end - start, D))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
