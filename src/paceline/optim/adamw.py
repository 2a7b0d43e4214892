"""AdamW over any tensors, also slices of parameters (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2). It calls
torch's fused kernel directly: `torch.optim.AdamW` imports torch's compiler, which adds a second to every start."""

from collections.abc import Sequence
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Updates tensors in place by their `.grad`; those without one stay. `param_groups` and `state` are as in
    torch.optim, except for `step`, the number of updates made, which is one per group. The first update makes `state`.
    `embeddings` are decayed, too, and their rate is `lr` times `lr_ratio`."""

    is_elementwise = True
    """Each element is updated by its own gradient and state, so a rank may update any slice of a parameter."""

    def __init__(
        self,
        decayed: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        embeddings: Sequence[torch.Tensor] = (),
        *,
        lr_ratio: float = 1.0,
        lr: float,
        decay: float,
        betas: tuple[float, float],
        eps: float,
    ):
        groups = [(decayed, decay, 1.0), (others, 0.0, 1.0)]
        groups += [(embeddings, decay, lr_ratio)] if embeddings else []
        settings = {"lr": lr, "betas": betas, "eps": eps, "step": 0}
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(tensors), "weight_decay": part, "lr_ratio": ratio, **settings}
            for tensors, part, ratio in groups
        ]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, is_finite: torch.Tensor | None = None) -> None:
        """Makes one update. Its number sets the bias correction of the moments. is_finite: a bool on the GPU; False:
        the update changes nothing but the number, which `undo_count` takes back."""
        found_inf = None if is_finite is None else is_finite.logical_not().float()
        for group in self.param_groups:
            group["step"] += 1
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if not tensors:
                continue
            for tensor in tensors:
                if tensor not in self.state:
                    self.state[tensor] = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
            # Filled on the device: no copy from the host.
            count = torch.full((), group["step"], dtype=torch.float32, device=tensors[0].device)
            torch._fused_adamw_(
                tensors,
                [tensor.grad for tensor in tensors],
                [self.state[tensor]["exp_avg"] for tensor in tensors],
                [self.state[tensor]["exp_avg_sq"] for tensor in tensors],
                [],
                [count] * len(tensors),
                lr=group["lr"] * group["lr_ratio"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )

    def undo_count(self) -> None:
        """Takes back the number of an update that the GPU skipped."""
        for group in self.param_groups:
            group["step"] -= 1
