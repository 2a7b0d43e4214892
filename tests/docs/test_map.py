"""tests/README.md names files that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_the_map_of_the_tests_names_files_that_exist() -> None:
    """Mutation: a file that is renamed in tests/ only."""
    text = (TESTS / "README.md").read_text()
    files = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.(?:py|md))`", text))
    assert len(files) > 30
    assert sorted(name for name in files if not name.startswith("src/") and not (TESTS / name).exists()) == []
