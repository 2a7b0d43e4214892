"""Global gradient norm and clipping over flat gradient buffers (Pascanu et al., arXiv 1211.5063, algorithm 1)."""

import math
from collections.abc import Callable

import torch


def clip_(
    gradients: list[torch.Tensor], max_norm: float, scale: float = 1.0, total: Callable[[float], float] = float
) -> float:
    """Divides the gradients by `scale` (a loss scaler's) and clips them to a global norm of max_norm; 0: no clipping.

    Returns the norm after unscaling, before clipping. If it is not finite, the gradients stay as they are. If gradients
    are sharded, `total` turns this rank's sum of squares into the sum over all ranks.
    """
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    own = float(torch.linalg.vector_norm(torch.stack(norms)).double().square()) if norms else 0.0
    norm = math.sqrt(total(own / scale**2))
    factor = 1.0 / scale
    if max_norm > 0 and norm > max_norm:
        factor *= max_norm / norm
    if gradients and factor != 1.0 and norm < math.inf:
        torch._foreach_mul_(gradients, factor)
    return norm
