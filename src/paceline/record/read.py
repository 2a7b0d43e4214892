"""Reading the JSONL records of a run, also while it writes them or after a crash."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def rows(path: Path) -> Iterator[Row | None]:
    """Yields each line of a JSONL file as an object, or None if it is not one; nothing if the file does not exist.
    Skips an unfinished last line. Raises OSError if the file cannot be read."""
    try:
        file = path.open(encoding="utf-8", errors="replace", newline="\n")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if line.endswith("\n"):
                yield _row(line)


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
