"""The short form of the campaign: a run hit in each of the ways in which one can be lost, against one undisturbed."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaign import EVERY, SETTINGS, STEPS, Hit, make, undisturbed

from paceline.base.faults import SAVE_PHASES, STEP_PHASES

ZERO_OF_THREE = 2  # in SETTINGS: the state is in three parts, so a kill loses a part that nobody else has
INT4_OF_TWO = 4  # what messages left out is lost, too


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    return functools.cache(lambda setting: undisturbed(tmp_path_factory.mktemp("straight"), setting))


def faults(num_ranks: int) -> dict[str, str]:
    """By way: drawn anew each time, so that many sessions see many moments; a failure says which it was."""
    draw = random.Random()
    rank, step, save = draw.randrange(num_ranks), draw.randint(1, STEPS), EVERY * draw.randint(1, STEPS // EVERY)
    return {
        "rank": f"rank={rank} step={step} phase={draw.choice(STEP_PHASES)} kind=kill",
        "save": f"rank=0 step={save} phase={draw.choice(SAVE_PHASES)} kind=kill",
        "launcher": f"rank={rank} step={step} phase={draw.choice(STEP_PHASES)} kind=launcher",
        "all": "",
    }


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("way", "setting"),
    [*((way, ZERO_OF_THREE) for way in ("rank", "save", "launcher", "all")), ("rank", INT4_OF_TWO)],
)
def test_what_was_hit_ends_as_the_undisturbed_run(
    way: str, setting: int, straight: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    what = faults(SETTINGS[setting][0])[way]
    env = {"PACELINE_FAULTS": what} if what else {}
    hit = make(Hit(0, way, what, setting), env, 0.3, tmp_path, straight(setting))
    assert not hit.problems, hit
    assert hit.by_itself or way in ("launcher", "all"), hit
