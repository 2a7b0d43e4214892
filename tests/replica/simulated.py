"""A rank without the others."""

from dataclasses import dataclass, field

import torch

from paceline.world.calls import Calls
from paceline.world.group import Group, LocalGroup


@dataclass(frozen=True)
class SimulatedRank:
    """A rank of a world whose other ranks are not there: their numbers and generators are as its own."""

    rank: int = 0
    world_size: int = 1
    group: Group = field(default_factory=lambda: LocalGroup(torch.device("cpu")))
    calls: Calls = field(default_factory=Calls)
