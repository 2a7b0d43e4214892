"""Files of JSON lines: reads them, also while another process writes or after a crash, and opens them to append."""

import json
import os
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.base.files import tail

Row = dict[str, Any]
_CHUNK_BYTES = 2 << 20  # far more than the longest row
_MARK_BYTES = 64


def rows(path: Path, with_text: str = "") -> Iterator[Row | None]:
    """Yields each line of a JSONL file as an object, or None if it is not one; nothing if the file does not exist.
    Skips an unfinished last line, and lines without this text, which are not parsed. Raises OSError if the file cannot
    be read."""
    try:
        file = path.open(encoding="utf-8", errors="replace", newline="\n")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if line.endswith("\n") and with_text in line:
                yield _row(line)


def last_rows(path: Path, num_bytes: int = 1 << 18) -> list[Row]:
    """Returns the rows in the last bytes of a JSONL file; the default holds one of 1,024 ranks. No rows if it
    cannot be read."""
    rows = (_row(line) for line in tail(path, num_bytes).split(b"\n")[:-1])
    return [row for row in rows if row is not None]


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields where each line of a file begins, and the line, the last one first. Holds the longest line in memory and
    a few MB, never the file. Raises OSError."""
    with path.open("rb") as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        while begin:
            size = min(_CHUNK_BYTES, begin)
            begin = file.seek(begin - size)
            block = file.read(size) + rest
            cut = len(block)
            while (line_begin := block.rfind(b"\n", 0, cut - 1) + 1) or not begin:
                yield begin + line_begin, block[line_begin:cut]
                cut = line_begin
                if not cut:
                    break
            rest = block[:cut]


def end_of_step(path: Path, step: int) -> tuple[int, int]:
    """Returns where the rows of later steps begin in a file whose rows are in the order of steps, and the last step
    that has a row, 0 if none has. A line that is no row counts as later if no row follows it. Raises OSError."""
    reached = 0
    for begin, line in lines_from_end(path):
        row = _row(line) if line.endswith(b"\n") else None
        if row is not None and isinstance(row.get("step"), int):
            reached = max(reached, row["step"])
            if row["step"] <= step:
                return begin + len(line), reached
    return 0, reached


def _row(line: str | bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def open_at_line_end(path: Path) -> int:
    """Opens a file to append lines; only the user may read a new one. Removes a last line that a crash cut short."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        begin, line = next(lines_from_end(path), (0, b"\n"))
        if not line.endswith(b"\n"):
            os.ftruncate(descriptor, begin)
    except OSError:  # a disk that is away, which is tried again: it must not cost a descriptor each time
        os.close(descriptor)
        raise
    return descriptor


class Tail:
    """The rows of a file, each once, while another process appends to it, replaces it, or has not made it yet."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self._mark = b""  # the last bytes before the offset
        self.num_skipped = 0  # lines that are no rows

    def read(self, most: int | None = None) -> tuple[bool, list[Row]]:
        """Returns whether the file begins anew, and its next rows, at most so many: from the beginning in that case. It
        does if what was read is no longer there, as when a resumed run drops the rows after its checkpoint. Call it
        until it returns no rows. Skips lines that are no rows, and a last line until it is finished."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._mark))
                is_anew = file.read(len(self._mark)) != self._mark
                if is_anew:
                    self._offset, self._mark, self.num_skipped = file.seek(0), b"", 0
                lines = file.read(_CHUNK_BYTES)
        except OSError:  # not there, or not now: a network file system may lose a file that is replaced
            return False, []
        lines = b"".join(islice(BytesIO(lines[: lines.rfind(b"\n") + 1]), most))
        self._offset += len(lines)
        self._mark = (self._mark + lines)[-_MARK_BYTES:]
        rows = [_row(line) for line in lines.split(b"\n")[:-1]]
        self.num_skipped += rows.count(None)
        return is_anew, [row for row in rows if row is not None]
