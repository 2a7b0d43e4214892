"""Optimizers that update slices of parameters."""

import torch
from torch import nn

from paceline.optim.optimizer import ParamSlice
from paceline.replica.updates import Updates


def test_state_that_there_was_is_cut_as_its_parameter_is() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adagrad(model.parameters())
    optimizer.state[model.weight]["sum"] = torch.arange(6.0).view(2, 3)
    mine = ParamSlice("weight", model.weight.shape, 2, 5, nn.Parameter(torch.zeros(3)))
    Updates(model, [optimizer]).adopt([mine])
    assert optimizer.param_groups[0]["params"] == [mine.parameter]
    assert list(optimizer.state) == [mine.parameter]
    assert optimizer.state[mine.parameter]["sum"].tolist() == [2.0, 3.0, 4.0]
