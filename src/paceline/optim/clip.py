"""Global gradient norm and clipping over flat gradient buffers (Pascanu et al., arXiv 1211.5063, algorithm 1)."""

from collections.abc import Callable

import torch


def has_float64(device: torch.device) -> bool:
    """Whether tensors on this device can be float64; on Apple GPUs they cannot."""
    return device.type != "mps"


def clip_(
    gradients: list[torch.Tensor],
    max_norm: float,
    scale: float = 1.0,
    total: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double,
) -> torch.Tensor:
    """Divides the gradients by `scale` (a loss scaler's) and clips them to a global norm of max_norm; 0: no clipping.

    Returns the norm after unscaling, before clipping, as one float64 number on the gradients' device (on mps: on the
    CPU). On a GPU nothing waits for it. If it is not finite, the gradients stay as they are. If gradients are sharded,
    `total` turns this rank's sum of squares into the sum over all ranks.
    """
    dtype = torch.float64 if torch.float64 in [gradient.dtype for gradient in gradients] else torch.float32
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    norm_here = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    norm_here = norm_here if has_float64(norm_here.device) else norm_here.cpu()
    norm = total(norm_here.double().square() / scale**2).sqrt()
    factor = torch.where(norm > max_norm, max_norm / norm, 1.0) if max_norm > 0 else torch.ones_like(norm)
    factor = torch.where(norm.isfinite(), factor * (1.0 / scale), 1.0)
    if norm.is_cuda:
        torch._foreach_mul_(gradients, factor.float())
    elif gradients and float(factor) != 1.0:
        torch._foreach_mul_(gradients, float(factor))
    return norm
