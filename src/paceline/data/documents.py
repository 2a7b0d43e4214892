"""Source files to documents, from any range of bytes.

A range has what begins in it: JSON lines, documents between separators, slices of a long plain text, row groups of
Parquet. So the ranges of a file, cut anywhere, give each document once, in order. With a.jsonl of 100 bytes whose
lines begin at 0, 30 and 80, the range 0..49 has two lines, of which it reads the second beyond its own end, and the
range 50..99 skips to byte 80.

Memory is a few blocks, however long a file is. Documents between separators, JSON lines and Parquet cells are read
completely, the first two up to MAX_RECORD_BYTES.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from paceline.base import units
from paceline.base.errors import UserError, nearest
from paceline.data import hub, parquet, text
from paceline.data.config import Recipe
from paceline.data.sources import Readable, SourceFile, Stored, open_content, open_stored

MAX_RECORD_BYTES = 1 << 28  # of a line of JSON, or of a document between separators
_READ_BYTES = 1 << 20
_SCAN_BYTES = 1 << 16
_SHOWN_KEYS = 12
_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


class Range(NamedTuple):
    """The bytes start..stop-1 of a file as stored; stop None: to its end."""

    file: SourceFile
    start: int
    stop: int | None

    @property
    def num_bytes(self) -> int:
        """0 if unknown."""
        return self.file.size if self.stop is None else self.stop - self.start


class Document(NamedTuple):
    """The text of a document in slices of at most `text.SLICE_BYTES`; none if it is empty. A long plain text comes as
    several, of which only the first `begins`. `num_replaced` counts the places that became U+FFFD."""

    slices: tuple[str, ...]
    num_replaced: int
    begins: bool
    side: str | None  # of its file


class Skipped(NamedTuple):
    """A record, or the rest of a range, that is left out because it cannot be read."""

    source: str
    why: str  # with its place


def whole(file: SourceFile) -> Range:
    return Range(file, file.start, file.stop)


def can_be_cut(file: SourceFile, recipe: Recipe) -> bool:
    """Whether ranges of the file can be read by themselves. A plain text whose split depends on its beginning is read
    as one."""
    is_cut_in_documents = file.format != "text" or bool(recipe.separator) or file.side is not None
    return file.is_seekable and file.num_bytes is not None and is_cut_in_documents


def read(part: Range, recipe: Recipe, skipped: list[Skipped]) -> Iterator[Document]:
    """Yields the documents of a range, including empty ones.

    Raises UserError, naming file and line, if the file cannot be read, is damaged or shorter than before, or has a
    record that is too long or without text. With --on-error skip that record, or the rest of the range, is left out
    and added to `skipped`.
    """
    try:
        with open_stored(part.file) as stored:
            yield from _read(part, stored, recipe, skipped)
    except UserError as error:
        is_of_system = getattr(error.__cause__, "errno", None) is not None or hub.is_hub(part.file.path)
        if recipe.on_error == "stop" or is_of_system:  # a disk or network may work again: nothing is left out
            raise
        skipped.append(Skipped(part.file.where, str(error)))


def _read(part: Range, stored: Stored, recipe: Recipe, skipped: list[Skipped]) -> Iterator[Document]:
    if part.file.format == "parquet":
        for cell in parquet.cells(part.file, stored, recipe.text_key, part.start, part.stop):
            yield _document(cell, part.file, is_plain=False)
    elif part.file.format == "jsonl":
        for content in _json_texts(part, stored, recipe, skipped):
            yield _document(content, part.file, is_plain=False)
    elif recipe.separator:
        for content in _separated(part, stored, recipe.separator):
            yield _document(content if content.strip() else b"", part.file, is_plain=True)
    else:
        yield from _plain(part, stored)


def _document(content: bytes, file: SourceFile, *, is_plain: bool, begins: bool = True) -> Document:
    decode = text.plain_text if is_plain else text.record_text
    decoded = [decode(part) for part in text.slices(content)] if content else []
    num_replaced = sum(count for _, count in decoded)
    return Document(tuple(part for part, _ in decoded), num_replaced, begins, file.side)


class _Content:
    """A buffer over the decompressed bytes of a file; `offset` is the position of the next one."""

    def __init__(self, file: SourceFile, stored: Stored, start: int, stop: int | None = None) -> None:
        """Reads up to `stop`; None: to the end of the file, or of the part of it that is a document."""
        self._file = file
        self._stop = stop
        if stop is None and file.is_seekable and file.num_bytes is not None:
            self._stop = file.start + file.num_bytes
        if file.is_seekable:
            stored.seek(start)
        self._content: Readable = open_content(file, stored)
        self._data, self._at, self._ended = b"", 0, False
        self._base = start  # position of the buffer's first byte
        if start == 0 and self.look(len(text.BYTE_ORDER_MARK)).startswith(text.BYTE_ORDER_MARK):
            self._at = len(text.BYTE_ORDER_MARK)

    @property
    def offset(self) -> int:
        return self._base + self._at

    def look(self, size: int) -> bytes:
        """Returns at least the next `size` bytes without taking them; fewer only at the end."""
        parts = [self._data[self._at :]]
        there = len(parts[0])
        self._base, self._at = self.offset, 0
        while there < size and not self._ended:
            parts.append(self._more(self._base + there))
            there += len(parts[-1])
        self._data = b"".join(parts)
        return self._data

    def take(self, size: int) -> bytes:
        """Takes the next `size` bytes, which `look` has returned."""
        self._at += size
        return self._data[self._at - size : self._at]

    def take_record(self, end: "_End") -> tuple[bytes, bool] | None:
        """Takes the next record and its end, which is not returned, and whether it has one; the file's last may have
        none. None: there is no record."""
        searched = 0
        while True:
            match = end.pattern.search(self._data, self._at + searched)
            there = len(self._data) - self._at
            is_ended = match is not None and (match.end() < len(self._data) or self._ended)  # CR may be half of CRLF
            size = match.start() - self._at if match and is_ended else there
            if size > MAX_RECORD_BYTES:
                raise UserError(
                    f"{self._file.where} has a record of more than {units.size(MAX_RECORD_BYTES)} at byte "
                    f"{self.offset}; cut it into several"
                )
            if match and is_ended:
                record = self.take(size)
                self._at = match.end()
                return record, True
            if self._ended:
                return (self.take(there), False) if there else None
            searched = max(0, there - end.longest)
            self.look(min(2 * there, MAX_RECORD_BYTES) + 1)

    def records(self, end: "_End", part: Range) -> Iterator[tuple[bytes, bool]]:
        """Yields the records that begin in the range, as `take_record`."""
        is_first = part.start <= part.file.start  # perhaps behind a byte order mark, and a mark's length is nobody's
        if not is_first:
            self._skip_records(end, max(part.start, self.offset + 1))
        while (is_first or part.stop is None or self.offset < part.stop) and (record := self.take_record(end)):
            is_first = False
            yield record

    def _skip_records(self, end: "_End", start: int) -> None:
        """Takes records until the next begins at `start` or later."""
        while True:
            match = end.pattern.search(self._data, self._at)
            if match and (match.end() < len(self._data) or self._ended):
                self._at = match.end()
                if self.offset >= start:
                    return
            elif self._ended:
                self._at = len(self._data)
                return
            else:
                self._at = max(self._at, len(self._data) - end.longest)
                self.look(len(self._data) - self._at + 1)

    def _more(self, position: int) -> bytes:
        wanted = _READ_BYTES if self._stop is None else min(_READ_BYTES, self._stop - position)
        data = self._content.read(wanted) if wanted > 0 else b""
        self._ended = not data
        if not data and wanted > 0 and self._stop is not None:
            raise UserError(f"{self._file.where} became shorter while it was read; start again")
        return data


# ---- plain text ----


def _plain(part: Range, stored: Stored) -> Iterator[Document]:
    """Yields the slices of a plain text, which is one document, that begin in the range."""
    file, start, stop = part
    end = stop
    if file.is_seekable and stop is not None:
        start = _end_of_word(file, stored, start, stop)
        if start >= stop:
            return
        end = _end_of_word(file, stored, stop, None)
    content = _Content(file, stored, start, end)
    begins = start <= file.start
    while begins or content.look(1):
        data = content.look(text.SLICE_BYTES + 1)
        size = len(data) if len(data) <= text.SLICE_BYTES else text.cut(data)
        yield _document(content.take(size), file, is_plain=True, begins=begins)
        begins = False


def _end_of_word(file: SourceFile, stored: Stored, at: int, limit: int | None) -> int:
    """Returns the first place from `at` on where a plain text can be cut, see `text.end_of_word`; its end, or at least
    `limit`, if there is none before."""
    end = file.start + file.size
    if at <= file.start or at >= end:
        return min(max(at, file.start), end)
    position = max(file.start, at - 4)  # a character before
    stored.seek(position)
    data = b""
    while position + len(data) < end and (limit is None or position < limit):
        more = stored.read(min(_SCAN_BYTES, end - position - len(data)))
        if not more:
            raise UserError(f"{file.where} became shorter while it was read; start again")
        data += more
        place = text.end_of_word(data, max(0, at - position))
        if place is not None:
            return position + place
        position, data = position + max(0, len(data) - 5), data[-5:]
    return end if limit is None else max(position, limit)


# ---- records ----


class _End(NamedTuple):
    """What stands between two records."""

    pattern: "re.Pattern[bytes]"
    longest: int  # bytes


_LINE_END = _End(re.compile(b"\n"), 1)


def _end_of(separator: str) -> _End:
    """Returns a separator as stored: each line end of it can be LF, CRLF or CR, as files come from several systems."""
    lines = text.with_line_feeds(separator.encode("utf-8", "surrogateescape")).split(b"\n")
    # An atomic group: CRLF is never taken for two line ends.
    pattern = rb"(?>\r\n|(?<!\r)\n|\r)".join(map(re.escape, lines))
    return _End(re.compile(pattern), 2 * len(separator.encode("utf-8", "surrogateescape")))


def _separated(part: Range, stored: Stored, separator: str) -> Iterator[bytes]:
    """Yields the documents between separators that begin in the range; not the last, if it is blank."""
    end = _end_of(separator)
    content = _Content(part.file, stored, _unambiguous(part.file, stored, end, part.start))
    for document, has_end in content.records(end, part):
        if has_end or not document.isspace():
            yield text.with_line_feeds(document)


def _unambiguous(file: SourceFile, stored: Stored, end: _End, start: int) -> int:
    """Returns a place before `start` across which no separator lies, whatever came before: of three line ends with
    the separator of two, which two it is depends on the place where the search begins."""
    either = re.compile(rb"(?=(" + end.pattern.pattern + rb"|\r\n))")
    width = _SCAN_BYTES
    while True:
        begin = max(file.start, start - width)
        if begin == file.start:
            return begin
        stored.seek(begin)
        data = b""
        while len(data) < start + end.longest - begin and (
            more := stored.read(start + end.longest - begin - len(data))
        ):
            data += more
        place = start - end.longest - begin
        for match in reversed(list(either.finditer(data))):
            if match.start() < place < match.end(1):
                place = match.start()
        if place > end.longest:
            return begin + place
        width *= 2


def _json_texts(part: Range, stored: Stored, recipe: Recipe, skipped: list[Skipped]) -> Iterator[bytes]:
    """Yields the texts of the JSON lines that begin in the range."""
    file, start, _ = part
    content = _Content(file, stored, max(0, start - 1))
    for number, (stored_line, _) in enumerate(content.records(_LINE_END, part), 1):
        line = stored_line.decode("utf-8", "surrogateescape")
        if not line or line.isspace():
            continue
        try:
            found = _string_under(recipe.text_key, line)
        except ValueError as error:
            before = _num_lines(file, start) if start else 0
            why = f"{file.where} line {before + number} {error}"
            if recipe.on_error == "stop":
                raise UserError(why) from error
            skipped.append(Skipped(file.where, why))
        else:
            yield (found or "").encode("utf-8", "surrogatepass")


@lru_cache(maxsize=8)
def _num_lines(file: SourceFile, place: int) -> int:
    """Returns the number of lines of a file that begin before a place; for messages."""
    lines, left = 1, place - 1  # the LF before the place ends a line, and the next begins at the place
    with open_stored(file) as stored:
        while left > 0 and (data := stored.read(min(left, _READ_BYTES))):
            lines += data.count(b"\n")
            left -= len(data)
    return lines


def _string_under(key: str, line: str) -> str | None:
    """Returns the string under the key of a JSON object, None for null. Raises ValueError, saying what is wrong."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise ValueError(f"can not be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"is {_TYPES.get(type(record), 'null')}, not an object with a key {key!r}")
    if key not in record:
        keys = list(record)
        there = ", ".join(keys[:_SHOWN_KEYS]) + (", ..." if len(keys) > _SHOWN_KEYS else "")
        raise ValueError(f"has no key {key!r}{nearest(key, keys)}; it has {there or 'none'}: give --text-key")
    value = record[key]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"has {_TYPES[type(value)]} under {key!r}, not a string; give --text-key another key")
    return value
