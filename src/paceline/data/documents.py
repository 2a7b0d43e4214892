"""Source files to documents, from any range of bytes.

A range is moved to the next borders: after a line end, a separator, or a word of a long plain text. So the ranges of a
file, cut anywhere, give each document once, in order. With a.jsonl of 100 bytes whose lines begin at 0, 30 and 80, the
range 0..49 is read as 0..79, two lines, and the range 50..99 as 80..99. Row groups of Parquet are of the range in which
they begin.

Memory is a few blocks, however long a file is. Documents between separators, JSON lines and Parquet cells are read
completely, the first two up to MAX_RECORD_BYTES.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

from paceline.base import units
from paceline.base.errors import UserError, nearest
from paceline.data import text
from paceline.data.config import Recipe
from paceline.data.sources import SourceFile, open_content, open_stored

MAX_RECORD_BYTES = 1 << 28  # of a line of JSON, or of a document between separators
_READ_BYTES = 1 << 20
_SCAN_BYTES = 1 << 16
_CELL_BYTES = 1 << 20  # of Parquet, decoded at once
_SHOWN_KEYS = 12
_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


class Range(NamedTuple):
    """The bytes start..stop-1 of a file as stored; all of them, if it is compressed."""

    file: SourceFile
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Document(NamedTuple):
    """The text of a document in slices of at most `text.SLICE_BYTES`; none if it is empty. A long plain text comes as
    several, of which only the first `begins`. `num_replaced` counts the places that became U+FFFD."""

    slices: tuple[str, ...]
    num_replaced: int
    begins: bool


class Skipped(NamedTuple):
    """A record, or the rest of a range, that is left out because it cannot be read."""

    source: str
    why: str  # with its place


class _BecameShorter(UserError):
    """The file is another one than was listed."""


def whole(file: SourceFile) -> Range:
    return Range(file, file.start, file.start + file.num_bytes)


def can_be_cut(file: SourceFile, recipe: Recipe) -> bool:
    """Whether ranges of the file can be read by themselves. A plain text whose split depends on its beginning is read
    as one."""
    is_cut_in_documents = file.format != "text" or bool(recipe.separator) or file.split is not None
    return file.is_seekable and is_cut_in_documents


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
        # Kept in the error itself, as a worker's comes to the parent without its cause.
        error.is_of_system = error.is_of_system or getattr(error.__cause__, "errno", None) is not None
        may_work_again = error.is_of_system or isinstance(error, _BecameShorter)  # so nothing is left out
        if recipe.on_error == "stop" or may_work_again:
            raise
        skipped.append(Skipped(part.file.where, str(error)))


def _read(part: Range, stored: BinaryIO, recipe: Recipe, skipped: list[Skipped]) -> Iterator[Document]:
    file = part.file
    if file.format == "parquet":
        for cell in _cells(part, stored, recipe.text_key):
            yield _document(cell, is_plain=False)
        return
    end = _LINE_END if file.format == "jsonl" else _end_of(recipe.separator) if recipe.separator else None
    start, stop = part.start, part.stop
    if file.is_seekable:
        start = _border(file, stored, start, end, limit=stop)
        if start >= stop:
            return
        stop = _border(file, stored, stop, end)
    content = _Content(file, stored, start, stop)
    if end is None:
        yield from _plain(content, is_beginning=start <= file.start)
    elif file.format == "jsonl":
        for text_of_record in _json_texts(content, file, start, recipe, skipped):
            yield _document(text_of_record, is_plain=False)
    else:
        for document, has_end in content.records(end):
            if has_end or not document.isspace():  # what stands behind the last separator may be blank
                yield _document(b"" if document.isspace() else text.with_line_feeds(document), is_plain=True)


def _document(content: bytes, *, is_plain: bool, begins: bool = True) -> Document:
    decode = text.plain_text if is_plain else text.record_text
    decoded = [decode(part) for part in text.slices(content)] if content else []
    num_replaced = sum(count for _, count in decoded)
    return Document(tuple(part for part, _ in decoded), num_replaced, begins)


class _Content:
    """A buffer over the decompressed bytes of a file; `offset` is the position of the next one."""

    def __init__(self, file: SourceFile, stored: BinaryIO, start: int, stop: int) -> None:
        """Reads the bytes start..stop-1; of a compressed file all."""
        self._file = file
        self._stop = stop if file.is_seekable else None
        if file.is_seekable:
            stored.seek(start)
        self._content = open_content(file, stored)
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

    def records(self, end: "_End") -> Iterator[tuple[bytes, bool]]:
        """Takes and yields each record without its end, and whether it has one; the file's last may have none."""
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
                searched = 0
                yield record, True
            elif self._ended:
                if there:
                    yield self.take(there), False
                return
            else:
                searched = max(0, there - end.longest)
                self.look(min(2 * there, MAX_RECORD_BYTES) + 1)

    def _more(self, position: int) -> bytes:
        wanted = _READ_BYTES if self._stop is None else min(_READ_BYTES, self._stop - position)
        data = self._content.read(wanted) if wanted > 0 else b""
        self._ended = not data
        if not data and wanted > 0 and self._stop is not None:
            raise _BecameShorter(f"{self._file.where} became shorter while it was read; start again")
        return data


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


def _border(file: SourceFile, stored: BinaryIO, at: int, end: _End | None, limit: int | None = None) -> int:
    """Returns the first place from `at` on where the file can be cut; its end, or at least `limit`, if there is none
    before. A pure function of the file and `at`. end: None for a plain text."""
    last = file.start + file.num_bytes
    if at <= file.start or at >= last:
        return min(max(at, file.start), last)
    kept = 2 * end.longest + 1 if end else 5  # bytes, enough to decide about the place behind them
    position = max(file.start, at - kept)
    begin = at - position  # in data
    stored.seek(position)
    data = b""
    while position + len(data) < last and (limit is None or position < limit):
        more = stored.read(min(_SCAN_BYTES, last - position - len(data)))
        if not more:
            raise _BecameShorter(f"{file.where} became shorter while it was read; start again")
        data += more
        place = _after_record(data, begin, end) if end else text.end_of_word(data, begin)
        if place is not None:
            return position + place
        dropped = max(0, len(data) - 2 * kept)
        position, begin, data = position + dropped, max(begin - dropped, kept), data[dropped:]
    return last if limit is None else max(position, limit)


def _after_record(data: bytes, begin: int, end: _End) -> int | None:
    """Returns the first place from `begin` on after an end that no other one overlaps. Of three line ends with the
    separator of two, which two it is depends on the place where the search begins."""
    if end is _LINE_END:
        return data.find(b"\n", begin - 1) + 1 or None
    reach = 0
    for match in re.finditer(rb"(?=(" + end.pattern.pattern + rb"))", data):
        first, reached = match.span(1)
        if reached >= begin and first >= reach and first + end.longest < len(data):
            return reached
        reach = max(reach, reached)
    return None


# ---- text and JSON lines ----


def _plain(content: _Content, *, is_beginning: bool) -> Iterator[Document]:
    """Yields the slices of a plain text, which is one document."""
    while is_beginning or content.look(1):
        data = content.look(text.SLICE_BYTES + 1)
        size = len(data) if len(data) <= text.SLICE_BYTES else text.cut(data)
        yield _document(content.take(size), is_plain=True, begins=is_beginning)
        is_beginning = False


def _json_texts(
    content: _Content, file: SourceFile, start: int, recipe: Recipe, skipped: list[Skipped]
) -> Iterator[bytes]:
    """Yields the texts of JSON lines."""
    for number, (stored_line, _) in enumerate(content.records(_LINE_END), 1):
        line = stored_line.decode("utf-8", "surrogateescape")
        if not line or line.isspace():
            continue
        try:
            text = _string_under(recipe.text_key, line)
        except ValueError as error:
            why = f"{file.where} line {_num_lines(file, start) + number} {error}"
            if recipe.on_error == "stop":
                raise UserError(why) from error
            skipped.append(Skipped(file.where, why))
        else:
            yield (text or "").encode("utf-8", "surrogatepass")


@lru_cache(maxsize=8)
def _num_lines(file: SourceFile, place: int) -> int:
    """Returns the number of lines of a file before a place, for messages."""
    lines = 0
    if place:
        with open_stored(file) as stored:
            while place > 0 and (data := stored.read(min(place, _READ_BYTES))):
                lines += data.count(b"\n")
                place -= len(data)
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


# ---- Parquet ----


def _cells(part: Range, stored: BinaryIO, column: str) -> Iterator[bytes]:
    """Yields a column's cells of the row groups in the range, as UTF-8; null is empty. Group i of n counts as beginning
    at i/n of the file, which needs no look into it."""
    file, start, stop = part
    import pyarrow.parquet  # type: ignore[import-untyped]  # slow to import

    try:
        # Without these sizes Arrow reads a row group's complete column, often hundreds of MB.
        parquet = pyarrow.parquet.ParquetFile(
            stored, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        _require_text(file, parquet.schema_arrow, column)
        for group in range(parquet.num_row_groups):
            begin = file.num_bytes * group // parquet.num_row_groups
            if start <= begin < stop:
                yield from _cells_of_group(parquet, group, column)
    except (pyarrow.ArrowException, OSError) as error:
        if not isinstance(error, pyarrow.ArrowException) and type(error) is not OSError:
            raise  # an error of the system or the hub
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file.where} can not be read as Parquet: {reason}; is it damaged or cut short?") from error


def _require_text(file: SourceFile, schema: Any, column: str) -> None:
    """Raises UserError if there is no such column of text."""
    import pyarrow

    types = pyarrow.types
    if column not in schema.names:
        raise UserError(
            f"{file.where} has no column {column!r}{nearest(column, schema.names)}; it has {', '.join(schema.names)}: "
            f"give --text-key"
        )
    stored = kind = schema.field(column).type
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    if not any(test(kind) for test in tests):
        raise UserError(f"{file.where}: column {column!r} is of {stored}, not of text; give --text-key another column")


def _cells_of_group(parquet: Any, group: int, column: str) -> Iterator[bytes]:
    # An encrypted column raises here; if asked for its size first, Arrow would abort the process.
    next(parquet.iter_batches(1, row_groups=[group], columns=[column], use_threads=False), None)
    metadata = parquet.metadata
    names = [parquet.schema.column(i).path for i in range(metadata.num_columns)]
    sizes = metadata.row_group(group)
    size = sizes.column(names.index(column)).total_uncompressed_size if column in names else 0
    batch_rows = min(max(1, _CELL_BYTES * sizes.num_rows // max(size, 1)), 1 << 16)
    for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=[column], use_threads=False):
        yield from _as_bytes(batch.column(0))


def _as_bytes(column: Any) -> list[bytes]:
    import pyarrow

    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return [cell or b"" for cell in column.cast(pyarrow.large_binary()).to_pylist()]
