"""For the tests of replicas: a world of one."""

from collections.abc import Iterator

import pytest

from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import World, open_world


@pytest.fixture
def world() -> Iterator[World]:
    """The world of this one process, without a launcher."""
    with open_world(ParallelConfig(device="cpu", threads=1), Environment()) as world:
        yield world
