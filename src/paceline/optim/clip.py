"""Global gradient norm and clipping over flat gradient buffers."""

import torch


def clip_(gradients: list[torch.Tensor], max_norm: float, scale: float = 1.0) -> float:
    """Divides the gradients by `scale` (a loss scaler's) and shrinks them to a global norm of at most max_norm.

    Returns the norm before clipping, after unscaling; not finite if any element is not, and then the gradients are
    left as they are. max_norm 0 only measures. (Pascanu et al., arXiv 1211.5063, algorithm 1.)
    """
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
    norm = float(torch.linalg.vector_norm(norms)) / scale
    factor = 1.0 / scale
    if max_norm > 0 and norm > max_norm:
        factor *= max_norm / norm
    if factor != 1.0 and norm < float("inf"):
        torch._foreach_mul_(gradients, factor)
    return norm
