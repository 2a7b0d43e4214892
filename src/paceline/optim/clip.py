"""Global gradient norm and clipping over flat gradient buffers."""

import math
from collections.abc import Callable

import torch


def clip_(
    gradients: list[torch.Tensor], max_norm: float, scale: float = 1.0, total: Callable[[float], float] = float
) -> float:
    """Divides the gradients by `scale` (a loss scaler's) and shrinks them to a global norm of at most max_norm.

    Returns the norm before clipping, after unscaling; not finite if any element is not, and then the gradients are
    left as they are. max_norm 0 only measures. Where these gradients are a rank's share, `total` makes of its sum of
    squares that of all ranks, the same number on each. (Pascanu et al., arXiv 1211.5063, algorithm 1.)
    """
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    own = float(torch.linalg.vector_norm(torch.stack(norms)).double().square()) if norms else 0.0
    norm = math.sqrt(total(own)) / scale
    factor = 1.0 / scale
    if max_norm > 0 and norm > max_norm:
        factor *= max_norm / norm
    if gradients and factor != 1.0 and norm < math.inf:
        torch._foreach_mul_(gradients, factor)
    return norm
