"""Muon: momentum, orthogonalised. For the matrices between embedding and head.

Jordan et al., https://kellerjordan.github.io/posts/muon/; the scale that gives its update the size of AdamW's is that
of Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, equation 4.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

# Quintic whose iterates drive singular values towards 1 fastest from anywhere in (0, 1] (Jordan et al.): they end in
# about [0.7, 1.2], which serves as well as exactly 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5

MOMENTS = ("momentum",)


class Muon:
    """Update: W <- W (1 - lr wd) - lr 0.2 sqrt(max(rows, cols)) orth(g + m M), M the momentum buffer.

    Matrices of one shape are orthogonalised together as one batched product. `state` is made at the first update.
    """

    def __init__(
        self, matrices: Sequence[torch.Tensor], *, decay: float, momentum: float, compute_dtype: torch.dtype
    ) -> None:
        self._by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for matrix in matrices:
            self._by_shape[matrix.shape].append(matrix)
        self._decay, self._momentum, self._compute_dtype = decay, momentum, compute_dtype
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Changes every matrix, in place, by its `.grad`."""
        for shape, matrices in self._by_shape.items():
            directions = orthogonalise(torch.stack([self._nesterov(m) for m in matrices]), self._compute_dtype)
            torch._foreach_mul_(matrices, 1 - lr * self._decay)
            torch._foreach_add_(matrices, list(directions.unbind()), alpha=-lr * 0.2 * max(shape) ** 0.5)

    def _nesterov(self, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.grad is not None
        if matrix not in self.state:
            self.state[matrix] = {"momentum": torch.zeros_like(matrix)}
        buffer = self.state[matrix]["momentum"]
        buffer.lerp_(matrix.grad, 1 - self._momentum)
        return matrix.grad.lerp(buffer, self._momentum)


def update_cost(rows: int, columns: int) -> float:
    """Returns the floating-point operations of one matrix's update, nearly all of them the iteration's products: with
    m the smaller side, 4 m^2 max + 2 m^3 each (X X^T and its use on X, the square of the gram matrix)."""
    small, large = min(rows, columns), max(rows, columns)
    return _NUM_ITERATIONS * (4.0 * small**2 * large + 2.0 * small**3)


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
