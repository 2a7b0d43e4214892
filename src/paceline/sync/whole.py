"""What a rank holds where nothing is sharded: every parameter, whole."""

import torch
from torch import nn

from paceline.base.ownership import Slice
from paceline.optim.optimizer import Piece


def whole_pieces(model: nn.Module) -> list[Piece]:
    """Returns each trainable parameter as one piece; it is the model's own, and its `.grad` is read at the update."""
    return [
        Piece(name, parameter.shape, 0, parameter.numel(), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def whole_weights(model: nn.Module) -> dict[Slice, torch.Tensor]:
    """Returns each parameter, flat."""
    return {
        Slice(name, 0, parameter.numel()): parameter.detach().reshape(-1)
        for name, parameter in model.named_parameters()
    }


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns each parameter in its shape."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
