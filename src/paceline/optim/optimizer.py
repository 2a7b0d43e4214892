"""Makes the optimizers: AdamW for all, or Muon for the layers' matrices and AdamW for the rest. They update slices of
parameters: any elements with AdamW, complete matrices with Muon."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.optim.adamw import AdamW
from paceline.optim.config import OptimConfig
from paceline.optim.muon import Muon


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """Elements start .. stop-1 of the flattened parameter `name`, which has this shape. `parameter` is the model's own,
    or a view of it; it is updated in place by its `.grad`."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    parameter: nn.Parameter


def make_optimizers(
    config: OptimConfig,
    parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    lr: float,
    weight_decay: float,
    compute_dtype: torch.dtype,
) -> list[AdamW | Muon]:
    """Returns the optimizers over these named parameters. Norms and biases are not decayed."""
    matrices: list[torch.Tensor] = []
    decayed: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []
    embeddings: list[torch.Tensor] = []
    for name, parameter in parameters:
        if is_updated_whole(config, name, parameter.shape):
            matrices.append(parameter)
        elif config.embedding_lr_ratio != 1.0 and name.startswith("embed_"):
            embeddings.append(parameter)
        else:
            (vectors if role(name, parameter.shape) == "vector" else decayed).append(parameter)
    ratio, betas = config.embedding_lr_ratio, (config.beta1, config.beta2)
    settings: dict[str, Any] = {"lr": lr, "decay": weight_decay, "betas": betas, "eps": config.eps}
    adamw = AdamW(decayed, vectors, embeddings, lr_ratio=ratio, **settings)
    if config.name != "muon":
        return [adamw]
    return [adamw, Muon(matrices, lr=lr, decay=weight_decay, momentum=config.momentum, compute_dtype=compute_dtype)]


def role(name: str, shape: Sequence[int]) -> str:
    """Returns 'matrix' (a layer's weight), 'embedding' (also the head) or 'vector' (norms, biases)."""
    if len(shape) < 2:
        return "vector"
    return "embedding" if name.startswith(("embed_", "lm_head")) else "matrix"


def is_updated_whole(config: OptimConfig, name: str, shape: Sequence[int]) -> bool:
    """Returns whether this parameter's update needs all of its elements on one rank, as Muon's does."""
    return config.name == "muon" and role(name, shape) == "matrix"
