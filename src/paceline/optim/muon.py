"""Muon: momentum, orthogonalised. For the matrices between embedding and head.

Jordan et al., https://kellerjordan.github.io/posts/muon/; the scale that gives its update the size of AdamW's is that
of Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, equation 4.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

# Quintic whose iterates drive singular values towards 1 fastest from anywhere in (0, 1] (Jordan et al.): they end in
# about [0.7, 1.2], which serves as well as exactly 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Update: W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, cols)) orth(g + m M), M the momentum buffer.

    Matrices of one shape are orthogonalised together as one batched product.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        compute_dtype: torch.dtype,
    ):
        super().__init__(list(params), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._compute_dtype = compute_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[(parameter.shape[0], parameter.shape[1])].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                directions = orthogonalise(
                    torch.stack([self._nesterov(p, group["momentum"]) for p in parameters]), self._compute_dtype
                )
                scale = 0.2 * max(rows, columns) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(directions.unbind()), alpha=-group["lr"] * scale)

    def _nesterov(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state["momentum"]
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)


def orthogonalise(matrices: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    """Returns about U V^T for each matrix U S V^T of (batch, rows, columns), in float32, by Newton-Schulz iteration."""
    x = matrices.to(compute_dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # the largest singular value is at most the Frobenius norm
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()
