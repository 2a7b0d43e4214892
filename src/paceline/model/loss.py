"""Next-token cross-entropy, summed, from the last hidden states, without holding all logits.

Forward takes the tokens in chunks of fixed size and computes a chunk's gradients as soon as its logits are there, so
nothing of size N x V is kept or computed twice. It is no slower if all logits fit, so it is the only path (docs/LOG.md,
2026-11-21). The loss, log-sum-exp and softmax are float32.

N tokens, R tokens of one chunk, C width, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.model import cpu
from paceline.model.cost import LOSS_CHUNK_ELEMENTS, LOSS_CHUNK_ELEMENTS_CPU, LOSS_CHUNK_ROWS


def loss_sum(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, compiled: bool = False) -> Tensor:
    """Returns the float32 sum over N tokens of -log softmax(hidden @ weight.T)[target], in nats. Products run in
    hidden's dtype. The weight's gradient has the weight's dtype. Cannot be differentiated twice. compiled: on CUDA
    torch.compile fuses what is done with the logits; within rounding of the uncompiled loss."""
    elements = LOSS_CHUNK_ELEMENTS_CPU if hidden_NC.device.type == "cpu" else LOSS_CHUNK_ELEMENTS
    num_rows = max(LOSS_CHUNK_ROWS, elements // weight_VC.shape[0])
    of_chunk = _compiled() if compiled and hidden_NC.is_cuda else _chunk
    loss = _ChunkedLoss.apply(hidden_NC, weight_VC, targets_N, num_rows, of_chunk)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


class _ChunkedLoss(torch.autograd.Function):
    """The loss in chunks of `num_rows` tokens. Forward computes the gradients; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, num_rows: int, of_chunk: "OfChunk"
    ) -> Tensor:
        need_gradients = any(ctx.needs_input_grad)
        cast_VC = weight_VC.to(hidden_NC.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_NC.device)
        grad_hidden_NC = torch.empty_like(hidden_NC) if need_gradients else None
        grad_weight_VC = None
        for start in range(0, hidden_NC.shape[0], num_rows):
            hidden_RC = hidden_NC[start : start + num_rows]
            logits_RV = cpu.mm(hidden_RC, cast_VC.t())
            chunk_loss, grad_RV = of_chunk(logits_RV, targets_N[start : start + num_rows], need_gradients)
            del logits_RV
            loss += chunk_loss
            if grad_RV is not None and grad_hidden_NC is not None:
                cpu.mm(grad_RV, cast_VC, out=grad_hidden_NC[start : start + num_rows])
                grad_weight_VC = _add_product(grad_weight_VC, grad_RV.t(), hidden_RC, weight_VC.dtype)
        ctx.save_for_backward(grad_hidden_NC, grad_weight_VC)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden_NC, grad_weight_VC = ctx.saved_tensors
        # Of one dimension, or the product would have hidden's dtype, and CUDA would round the factor to it first.
        scale_1 = grads[0][None]
        return (grad_hidden_NC * scale_1).to(grad_hidden_NC.dtype), grad_weight_VC * scale_1, None, None, None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns total + a @ b in the total's dtype, float32, whatever the product's; in place. None: nothing yet."""
    if a.is_cuda and a.dtype != dtype:  # the product's kernel adds in float32: no rounding, and no pass of its own
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    product = cpu.mm(a, b)
    return product.to(dtype) if total is None else total.add_(product)


OfChunk = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def _chunk(half_RV: Tensor, targets_R: Tensor, need_gradients: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the chunk's summed loss and its gradient by the logits, softmax - onehot, in the logits' dtype. Uses one
    buffer of float32 logits, the given one if it is: each temporary of this size costs as much as the arithmetic."""
    logits_RV = half_RV.float()
    targets_R1 = targets_R[:, None]
    target_logits_R1 = logits_RV.gather(1, targets_R1)
    max_R1 = logits_RV.amax(1, keepdim=True)
    exp_RV = logits_RV.sub_(max_R1).exp_()
    total_R1 = exp_RV.sum(1, keepdim=True)
    loss = (total_R1.log() + max_R1 - target_logits_R1).sum()
    if not need_gradients:
        return loss, None
    exp_RV.scatter_(1, targets_R1, exp_RV.gather(1, targets_R1) - total_R1)
    return loss, exp_RV.div_(total_R1).to(half_RV.dtype)


def _fused_chunk(logits_RV: Tensor, targets_R: Tensor, need_gradients: bool) -> tuple[Tensor, Tensor | None]:
    """The same, for a compiler: it reads the logits twice and writes the gradient once, with nothing of float32."""
    float_RV, targets_R1 = logits_RV.float(), targets_R[:, None]
    total_R1 = float_RV.logsumexp(1, keepdim=True)
    loss = (total_R1 - float_RV.gather(1, targets_R1)).sum()
    if not need_gradients:
        return loss, None
    is_target_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == targets_R1  # no scattered write
    return loss, ((float_RV - total_R1).exp() - is_target_RV.float()).to(logits_RV.dtype)


@functools.cache
def _compiled() -> OfChunk:
    return torch.compile(_fused_chunk, fullgraph=True)
