"""Reading the JSONL records of a run, also while it writes them or after a crash."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.base.files import tail

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


def last_rows(path: Path, num_bytes: int = 1 << 18) -> list[Row]:
    """Returns the rows in the last bytes of a JSONL file; the default holds one of 1,024 ranks. None if it cannot be
    read."""
    found = (_row(line) for line in tail(path, num_bytes).split(b"\n")[:-1])
    return [row for row in found if row is not None]


def _row(line: str | bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
