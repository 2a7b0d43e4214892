"""Muon: orthogonalised momentum, for the matrices between embedding and head.

Jordan et al., https://kellerjordan.github.io/posts/muon/. The scale that gives its update AdamW's size is from
Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, equation 4.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch

# The quintic that moves singular values in (0, 1] towards 1 fastest (Jordan et al.). They end in about [0.7, 1.2],
# which works as well as exactly 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5

MOMENTS = ("momentum",)


class Muon:
    """Update: M <- m M + (1 - m) g, then W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, cols)) orth(m M + (1 - m) g), M the
    momentum buffer. Orthogonalises matrices of one shape as a batch. `param_groups` and `state` are as in torch.optim;
    the first update makes `state`."""

    def __init__(
        self, matrices: Sequence[torch.Tensor], *, lr: float, decay: float, momentum: float, compute_dtype: torch.dtype
    ) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(matrices), "lr": lr, "weight_decay": decay, "momentum": momentum}
        ]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._compute_dtype = compute_dtype

    @torch.no_grad()
    def step(self, is_finite: torch.Tensor | None = None) -> None:
        """Updates every matrix in place by its `.grad`. is_finite: a bool on the GPU; False: it changes nothing."""
        one = 1.0 if is_finite is None else is_finite.float()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                gradients = torch.stack([cast(torch.Tensor, matrix.grad) for matrix in matrices])
                buffers = [self._buffer(matrix) for matrix in matrices]
                if is_finite is not None:  # a buffer moved towards itself stays as it is
                    gradients = torch.where(is_finite, gradients, torch.stack(buffers))
                torch._foreach_lerp_(buffers, gradients.unbind(), 1 - group["momentum"])
                torch._foreach_lerp_(gradients.unbind(), buffers, group["momentum"])  # Nesterov's
                directions = orthogonalise(gradients, self._compute_dtype)
                if is_finite is not None:
                    directions.mul_(one)
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"] * one)
                torch._foreach_add_(matrices, list(directions.unbind()), alpha=-group["lr"] * 0.2 * max(shape) ** 0.5)

    def undo_count(self) -> None:
        """As AdamW's; there is nothing to count."""

    @staticmethod
    def update_cost(matrix: torch.Tensor) -> float:
        """Returns the FLOPs of one matrix's update, nearly all in the iteration's products: 4 m^2 max + 2 m^3 each,
        with m the smaller side (X X^T, its product with X, and the square of the Gram matrix)."""
        small, large = sorted(matrix.shape)
        return _NUM_ITERATIONS * (4.0 * small**2 * large + 2.0 * small**3)

    def _buffer(self, matrix: torch.Tensor) -> torch.Tensor:
        if matrix not in self.state:
            self.state[matrix] = {"momentum": torch.zeros_like(matrix)}
        return self.state[matrix]["momentum"]


def orthogonalise(matrices: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    """Returns about U V^T for each matrix U S V^T of (batch, rows, columns), in float32, by Newton-Schulz iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    # The largest singular value is at most the Frobenius norm. Cast after that: float16 would lose small gradients.
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(compute_dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()
