"""Linear layers whose three products are of float8 numbers, for GPUs that have units for it (Hopper, Ada, Blackwell).

Each matrix is scaled by its largest magnitude before it is rounded (Micikevicius et al., arXiv 2209.05433): inputs and
weights to e4m3 (largest 448), gradients, whose range is wider, to e5m2 (57344). Sums are float32, results bfloat16.

N tokens, I inputs, O outputs.
"""

import math
from typing import Any

import torch
from torch import Tensor

INPUTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, w_OI: Tensor) -> Tensor:
        x, w = rounded(x_NI, INPUTS), rounded(w_OI, INPUTS)
        ctx.save_for_backward(*x, *w)
        return _multiply(x, (w[0].t(), w[1]), fast=True)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
        x_NI, x_scale, w_OI, w_scale = ctx.saved_tensors
        g_NO, g_scale = rounded(grad_NO, GRADIENTS)
        grad_x = _multiply((g_NO, g_scale), (_by_columns(w_OI), w_scale), fast=False)
        grad_w = _multiply((g_NO.t().contiguous(), g_scale), (_by_columns(x_NI), x_scale), fast=False)
        return grad_x, grad_w


def linear(x: Tensor, w_OI: Tensor) -> Tensor:
    """Returns x @ w.T, [..., I] -> [..., O]; both are bfloat16. N, I and O are multiples of 16."""
    out: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), w_OI)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], -1)


def rounded(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a matrix in float8, and the float32 scale that it is to be multiplied by. Nothing waits for a GPU."""
    largest = torch.linalg.vector_norm(matrix, math.inf).float()  # one read
    scale = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    return (matrix.float() / scale).to(dtype), scale


def _multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], fast: bool) -> Tensor:
    """a: by rows; b: by columns. fast: sums of fewer bits, which forward passes bear."""
    return torch._scaled_mm(a[0], b[0], scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16, use_fast_accum=fast)


def _by_columns(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()
