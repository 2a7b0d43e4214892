"""AdamW over any tensors, slices of parameters among them (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).

torch's fused kernel does the arithmetic. Its `torch.optim.AdamW` around it would import torch's compiler, which takes a
second of every start and restart, and keeps state by parameter object, where ours goes by name and slice.
"""

from collections.abc import Sequence

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Updates tensors in place by their `.grad`. `state` is made at the first update: moments by tensor."""

    def __init__(
        self,
        decayed: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        *,
        decay: float,
        betas: tuple[float, float],
        eps: float,
    ):
        self._groups = ((list(decayed), decay), (list(others), 0.0))
        self._betas, self._eps = betas, eps
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Makes update `number`, from 1 on: it decides how far the moments are from what they converge to."""
        for tensors, decay in self._groups:
            if not tensors:
                continue
            for tensor in tensors:
                if tensor not in self.state:
                    self.state[tensor] = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
            count = torch.tensor(float(number), device=tensors[0].device)
            torch._fused_adamw_(
                tensors,
                [tensor.grad for tensor in tensors if tensor.grad is not None],
                [self.state[tensor]["exp_avg"] for tensor in tensors],
                [self.state[tensor]["exp_avg_sq"] for tensor in tensors],
                [],
                [count] * len(tensors),
                lr=lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )
