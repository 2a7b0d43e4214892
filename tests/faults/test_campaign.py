"""The short form of the campaign: a run hit in each of the ways in which one can be lost, against one undisturbed."""

import random
from pathlib import Path
from typing import Any

import pytest
from campaign import EVERY, STEPS, Hit, make, undisturbed

from paceline.base.faults import SAVE_PHASES, STEP_PHASES

ZERO_OF_THREE = 2  # in SETTINGS: the state is in three parts, so a kill loses a part that nobody else has


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("straight"), ZERO_OF_THREE)


def faults() -> dict[str, str]:
    """By way: drawn anew each time, so that many sessions see many moments; a failure says which it was."""
    draw = random.Random()
    rank, step, save = draw.randrange(3), draw.randint(1, STEPS), EVERY * draw.randint(1, STEPS // EVERY)
    return {
        "rank": f"rank={rank} step={step} phase={draw.choice(STEP_PHASES)} kind=kill",
        "save": f"rank=0 step={save} phase={draw.choice(SAVE_PHASES)} kind=kill",
        "launcher": f"rank={rank} step={step} phase={draw.choice(STEP_PHASES)} kind=launcher",
        "all": "",
    }


@pytest.mark.long
@pytest.mark.parametrize("way", ["rank", "save", "launcher", "all"])
def test_what_was_hit_ends_as_the_undisturbed_run(way: str, straight: dict[str, Any], tmp_path: Path) -> None:
    what = faults()[way]
    env = {"PACELINE_FAULTS": what} if what else {}
    hit = make(Hit(0, way, what, ZERO_OF_THREE), env, 0.3, tmp_path, straight)
    assert not hit.problems, hit
    assert hit.by_itself or way in ("launcher", "all"), hit
