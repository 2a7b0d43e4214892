"""The planted mistakes (planted.py) can still be made in the code as it is, and the tests that find them are there."""

import re
from collections import Counter
from pathlib import Path

from planted import MUTATIONS

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src/paceline"


def test_each_can_be_planted_at_one_place() -> None:
    places = {each.name: (SOURCE / each.file).read_text().count(each.old) for each in MUTATIONS}
    assert {name: number for name, number in places.items() if number != 1} == {}
    assert len(places) == len(MUTATIONS), "names differ"


def test_the_tests_that_find_them_are_there() -> None:
    missing = []
    for name in sorted({each.test for each in MUTATIONS}):
        file, _, function = name.partition("::")
        text = (TESTS / file).read_text() if (TESTS / file).exists() else ""
        if not re.search(rf"^def {re.escape(function.partition('[')[0])}\(", text, re.MULTILINE):
            missing.append(name)
    assert missing == []


def test_each_room_has_five() -> None:
    rooms = Counter(each.room for each in MUTATIONS)
    assert {room: number for room, number in rooms.items() if number < 5} == {}
    assert rooms.keys() >= {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} - {"recipes"}
