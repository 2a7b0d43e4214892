"""Next-token cross-entropy, summed, from the last hidden states, without holding all logits.

The tokens are taken some rows at a time, and each piece's gradients are computed as soon as its logits are there, in
the forward pass: nothing of size N x V is kept or computed twice. The loss, log-sum-exp and softmax are float32.

Measured forward and backward, 2 threads, torch 2.13 CPU: the best of some runs in ms, and the peak memory beyond the
inputs in MB (`lce` is torch.nn.functional.linear_cross_entropy with its chunking; `recompute` is chunks of 512 or 256
rows under checkpoint):

| V, C, N          | dtype    | all logits | lce        | recompute  | this file |
|------------------|----------|------------|------------|------------|-----------|
| 4096, 384, 2048  | bfloat16 | 47, 173    | 101, 146   | 64, 157    | 31, 62    |
| 4096, 384, 2048  | float32  | 120, 117   | 92, 112    | 127, 204   | 91, 67    |
| 50304, 768, 1024 | bfloat16 | 597, 530   | 9072, 687  | 1224, 430  | 587, 361  |
| 50304, 768, 1024 | float32  | 1351, 458  | 5486, 243  | 2079, 389  | 1206, 216 |

So this is the one path, for every size: no slower where all logits would fit, and it never needs them. The pieces are
the same at every batch, so memory for logits does not grow with the micro-batch.

N tokens, R tokens of one piece, C width, V vocabulary.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits of one piece. On a CPU 8 MiB of float32 stay in the cache; a GPU needs larger products to be busy.
_PIECE_ELEMENTS_CPU = 1 << 21
_PIECE_ELEMENTS = 1 << 27
_MIN_ROWS = 512  # with fewer, adding up the pieces' V x C weight gradients shows: V=50304 bfloat16 587 -> 654 ms at 256


def loss_sum(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> Tensor:
    """Returns the float32 sum over N tokens of -log softmax(hidden @ weight.T)[target], in nats.

    Products run in hidden's dtype. The weight's gradient has the weight's dtype. Not differentiable twice.
    """
    elements = _PIECE_ELEMENTS_CPU if hidden_NC.device.type == "cpu" else _PIECE_ELEMENTS
    num_rows = max(_MIN_ROWS, elements // weight_VC.shape[0])
    return cast(Tensor, _PiecewiseLoss.apply(hidden_NC, weight_VC, targets_N, num_rows))  # type: ignore[no-untyped-call]


class _PiecewiseLoss(torch.autograd.Function):
    """The loss in pieces of `num_rows` tokens. Its gradients exist after forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, num_rows: int) -> Tensor:
        need_gradients = any(ctx.needs_input_grad)
        cast_VC = weight_VC.to(hidden_NC.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_NC.device)
        grad_hidden_NC = torch.empty_like(hidden_NC) if need_gradients else None
        grad_weight_VC = None
        for start in range(0, hidden_NC.shape[0], num_rows):
            hidden_RC = hidden_NC[start : start + num_rows]
            piece_loss, grad_RV = _piece(hidden_RC, cast_VC, targets_N[start : start + num_rows], need_gradients)
            loss += piece_loss
            if grad_RV is not None and grad_hidden_NC is not None:
                torch.mm(grad_RV, cast_VC, out=grad_hidden_NC[start : start + num_rows])
                piece_VC = grad_RV.t() @ hidden_RC
                # Summed in the weight's float32, whatever dtype the product has.
                grad_weight_VC = (
                    piece_VC.to(weight_VC.dtype) if grad_weight_VC is None else grad_weight_VC.add_(piece_VC)
                )
        ctx.save_for_backward(grad_hidden_NC, grad_weight_VC)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_NC, grad_weight_VC = ctx.saved_tensors
        # Scaled in float32 before the cast: under float16 the loss scale over the token count may be far from 1.
        return (grad_hidden_NC * grads[0]).to(grad_hidden_NC.dtype), grad_weight_VC * grads[0], None, None


def _piece(
    hidden_RC: Tensor, weight_VC: Tensor, targets_R: Tensor, need_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the piece's summed loss and its gradient by the logits, softmax - onehot, [R, V] in hidden's dtype.

    Works in the one buffer of float32 logits: each temporary of this size costs as much as the arithmetic.
    """
    logits_RV = F.linear(hidden_RC, weight_VC).float()
    targets_R1 = targets_R[:, None]
    target_logits_R1 = logits_RV.gather(1, targets_R1)
    max_R1 = logits_RV.amax(1, keepdim=True)
    exp_RV = logits_RV.sub_(max_R1).exp_()
    total_R1 = exp_RV.sum(1, keepdim=True)
    loss = (total_R1.log() + max_R1 - target_logits_R1).sum()
    if not need_gradients:
        return loss, None
    exp_RV.scatter_add_(1, targets_R1, -total_R1)
    return loss, exp_RV.div_(total_R1).to(hidden_RC.dtype)
