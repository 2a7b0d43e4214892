"""Files to blocks of raw documents, in order; and a block to its texts, in any process.

Blocks are a pure function of the files: reading from a block's `next` yields the blocks after it. Memory is a few
blocks, however long a file is. A plain file that is one document is read in slices. Documents between separators, JSON
lines and Parquet cells are read completely, the first two up to MAX_RECORD_BYTES.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paceline.base import units
from paceline.base.errors import UserError, nearest
from paceline.data import hub, text
from paceline.data.config import Recipe
from paceline.data.sources import Readable, SourceFile, Sources, Stored, open_content, open_stored

BLOCK_BYTES = 1 << 20  # a task for a worker, 25 ms of encoding on a core
MAX_RECORD_BYTES = 1 << 28  # of a line of JSON, or of a document between separators
_CHUNK_COST_BYTES = 256  # overhead of a chunk in memory: a million files may have one byte each
_READ_BYTES = 1 << 20
_SHOWN_KEYS = 12
_TYPES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


@dataclass(frozen=True)
class Place:
    """A position between two documents, or between two slices of one."""

    file: int = 0
    offset: int = 0  # bytes of the decompressed file; of Parquet: rows
    line: int = 0  # JSONL: number of lines before


@dataclass(frozen=True)
class Chunk:
    """Documents of one file as stored: plain "text", "json" lines, or "record"s (text that is not changed). Only a
    plain file's document has slices, one a chunk: `begins` and `ends` mark the first and the last."""

    kind: Literal["text", "json", "record"]
    documents: tuple[bytes, ...]
    where: str
    side: str | None
    begins: bool = True
    ends: bool = True
    first_line: int = 1


class Skipped(NamedTuple):
    """A record, or the rest of a file, that is left out because it cannot be read."""

    source: str
    why: str  # with its place


@dataclass(frozen=True)
class Block:
    """About BLOCK_BYTES of documents, in order, from one or more files. Reading resumes at `next`; `read_bytes` counts
    the stored bytes read so far of the last file, `next.file`."""

    chunks: tuple[Chunk, ...]
    next: Place
    read_bytes: int
    skipped: tuple[Skipped, ...] = ()  # rests of files


@dataclass(frozen=True)
class Document:
    """The text of a document, or a part of it, in slices of at most `text.SLICE_BYTES`; no slices if empty. `side` is
    its file's; `num_replaced` counts the places that became U+FFFD."""

    slices: tuple[str, ...]
    num_replaced: int
    begins: bool
    ends: bool
    side: str | None


@dataclass(frozen=True)
class _Read:
    """A chunk, its bytes, and the position after it."""

    chunk: Chunk
    num_bytes: int
    offset: int
    read_bytes: int
    line: int = 0


def read_blocks(sources: Sources, recipe: Recipe, start: Place = Place()) -> Iterator[Block]:
    """Yields the blocks from a position: the beginning, or a block's `next`.

    Raises UserError, naming the file, if it cannot be read, is damaged or shorter than before, has a record that is too
    long, or is a Parquet file without the column. With --on-error skip the rest of such a file is left out instead.
    """
    chunks: list[Chunk] = []
    skipped: list[Skipped] = []
    weight = 0
    last = None
    for number in range(start.file, len(sources.files)):
        here = start if number == start.file else Place(number)
        file = sources.files[number]
        try:
            with open_stored(file) as stored:
                for read in _read(file, stored, recipe, here):
                    chunks.append(read.chunk)
                    weight += read.num_bytes + _CHUNK_COST_BYTES
                    last = Place(number, read.offset, read.line), read.read_bytes
                    if weight >= BLOCK_BYTES:
                        yield Block(tuple(chunks), *last, tuple(skipped))
                        chunks, skipped, weight = [], [], 0
        except UserError as error:
            is_of_system = getattr(error.__cause__, "errno", None) is not None or hub.is_hub(file.path)
            if recipe.on_error == "stop" or is_of_system:  # a disk or network may work again: nothing is left out
                raise
            skipped.append(Skipped(file.where, str(error)))
            last = Place(number + 1), 0
    if last is not None and (chunks or skipped):
        yield Block(tuple(chunks), *last, tuple(skipped))


def _read(file: SourceFile, stored: Stored, recipe: Recipe, start: Place) -> Iterator[_Read]:
    if file.format == "parquet":
        return _read_cells(file, stored, recipe.text_key, start.offset)
    content = _Content(file, stored, start.offset)
    if file.format == "jsonl":
        return _read_lines(file, content, start.line)
    if recipe.separator:
        separator = text.with_line_feeds(recipe.separator.encode("utf-8", "surrogateescape"))
        return _read_separated(file, content, separator)
    return _read_slices(file, content, begins=start.offset <= file.start)


class _Content:
    """A buffer over a file; `offset` is the position of the next byte."""

    def __init__(self, file: SourceFile, stored: Stored, offset: int) -> None:
        self._file, self._stored = file, stored
        self._content: Readable = open_content(file, stored)
        self._stop = file.start + file.num_bytes if file.is_seekable and file.num_bytes is not None else None
        self._data, self._ended = b"", False
        self.offset = 0
        wanted = max(file.start, offset)
        if file.is_seekable:
            stored.seek(wanted)
            self.offset = wanted
        while self.offset < wanted and self.look(1):
            self.take(min(len(self._data), wanted - self.offset))
        if self.offset < wanted:
            raise UserError(f"{file.where} is shorter than what was read of it before; --restart begins anew")
        if self.offset == 0 and self.look(len(text.BYTE_ORDER_MARK)).startswith(text.BYTE_ORDER_MARK):
            self.take(len(text.BYTE_ORDER_MARK))

    def look(self, size: int) -> bytes:
        """Returns at least the next `size` bytes without taking them; fewer only at the end."""
        parts, there = [self._data], len(self._data)
        while there < size and not self._ended:
            parts.append(self._more(self.offset + there))
            there += len(parts[-1])
        if len(parts) > 1:
            self._data = b"".join(parts)
        return self._data

    def take(self, size: int) -> bytes:
        """Takes the next `size` bytes, which `look` has returned."""
        taken, self._data = self._data[:size], self._data[size:]
        self.offset += size
        return taken

    def take_records(self, *ends: bytes) -> bytes:
        """Takes the next complete records, ended by one of `ends` or the file: all that fit into a block, or one larger
        record."""
        searched = BLOCK_BYTES
        data = self.look(searched + 1)
        last = max(_after(end, data.rfind(end, 0, searched)) for end in ends)
        while last < 0 and len(data) > searched:
            if searched >= MAX_RECORD_BYTES:
                raise UserError(
                    f"{self._file.where} has a record of more than {units.size(MAX_RECORD_BYTES)} at byte "
                    f"{self.offset}; cut it into several"
                )
            before, searched = searched, 2 * searched
            data = self.look(searched + 1)
            last = max(_after(end, data.find(end, max(0, before - len(end) + 1), searched)) for end in ends)
        last += data[last - 1 : last + 1] == b"\r\n"  # the LF belongs to the separator that ends with the CR
        return self.take(last if last >= 0 else len(data))

    def read(self, chunk: Chunk, size: int, line: int = 0) -> _Read:
        """Returns the chunk made of the last `size` bytes taken."""
        read_bytes = self._stored.tell() if self._file.compression else self.offset - self._file.start
        return _Read(chunk, size, self.offset, read_bytes, line)

    def _more(self, position: int) -> bytes:
        wanted = _READ_BYTES if self._stop is None else min(_READ_BYTES, self._stop - position)
        found = self._content.read(wanted) if wanted > 0 else b""
        self._ended = not found
        if not found and wanted > 0 and self._stop is not None:
            raise UserError(f"{self._file.where} became shorter while it was read; start again")
        return found


def _after(end: bytes, place: int) -> int:
    """The position after `end`; -1 if its place is -1, not found."""
    return place + len(end) if place >= 0 else place


def _read_slices(file: SourceFile, content: _Content, *, begins: bool) -> Iterator[_Read]:
    while begins or content.look(1):
        data = content.look(text.SLICE_BYTES + 1)
        ends = len(data) <= text.SLICE_BYTES
        found = content.take(len(data) if ends else text.cut(data))
        yield content.read(Chunk("text", (found,), file.where, file.side, begins, ends), len(found))
        begins = False


def _read_separated(file: SourceFile, content: _Content, separator: bytes) -> Iterator[_Read]:
    while content.look(1):
        # The files of one set may come from several systems.
        found = content.take_records(*{separator.replace(b"\n", end) for end in (b"\n", b"\r\n", b"\r")})
        *documents, rest = text.with_line_feeds(found).split(separator)
        if rest and not rest.isspace():
            documents.append(rest)
        yield content.read(Chunk("text", tuple(documents), file.where, file.side), len(found))


def _read_lines(file: SourceFile, content: _Content, line: int) -> Iterator[_Read]:
    """line: number of lines before the first."""
    while content.look(1):
        found = content.take_records(b"\n")
        lines = tuple(found.split(b"\n"))
        chunk = Chunk("json", lines, file.where, file.side, first_line=line + 1)
        line += len(lines) - 1
        yield content.read(chunk, len(found), line)


def _read_cells(file: SourceFile, stored: Stored, column: str, start: int) -> Iterator[_Read]:
    """Reads a Parquet file's column from row `start` on."""
    import pyarrow.parquet  # type: ignore[import-untyped]  # slow to import; needed only by the process that reads

    try:
        # Without these sizes Arrow reads a row group's complete column, often hundreds of MB.
        parquet = pyarrow.parquet.ParquetFile(
            stored, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        _require_text(file, parquet.schema_arrow, column)
        row = 0
        for group in range(parquet.num_row_groups):
            num_rows = parquet.metadata.row_group(group).num_rows
            if row + num_rows > start:
                for cells in _cells(parquet, group, column, max(0, start - row)):
                    start = max(start, row) + len(cells)
                    done = (file.num_bytes or 0) * start // max(parquet.metadata.num_rows, 1)
                    yield _Read(Chunk("record", cells, file.where, file.side), sum(map(len, cells)), start, done)
            row += num_rows
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
    found = kind = schema.field(column).type
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    if not any(test(kind) for test in tests):
        raise UserError(f"{file.where}: column {column!r} is of {found}, not of text; give --text-key another column")


def _cells(parquet: Any, group: int, column: str, skipped: int) -> Iterator[tuple[bytes, ...]]:
    """Yields a row group's cells as UTF-8 in chunks of about a block, without the first `skipped`; null is empty."""
    # An encrypted column raises here; if asked for its size first, Arrow would abort the process.
    next(parquet.iter_batches(1, row_groups=[group], columns=[column], use_threads=False), None)
    metadata = parquet.metadata
    names = [parquet.schema.column(i).path for i in range(metadata.num_columns)]
    sizes = metadata.row_group(group)
    size = sizes.column(names.index(column)).total_uncompressed_size if column in names else 0
    batch_rows = min(max(1, BLOCK_BYTES * sizes.num_rows // max(size, 1)), 1 << 16)
    for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=[column], use_threads=False):
        cells: list[bytes] = []
        num_bytes = 0
        for cell in _as_bytes(batch.column(0))[skipped:]:
            if cells and num_bytes + len(cell) > BLOCK_BYTES:
                yield tuple(cells)
                cells, num_bytes = [], 0
            cells.append(cell)
            num_bytes += len(cell)
        if cells:
            yield tuple(cells)
        skipped = max(0, skipped - len(batch))


def _as_bytes(column: Any) -> list[bytes]:
    import pyarrow

    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return [cell or b"" for cell in column.cast(pyarrow.large_binary()).to_pylist()]


def documents(block: Block, recipe: Recipe, skipped: list[Skipped] | None = None) -> Iterator[Document]:
    """Yields a block's documents, including empty ones. Raises UserError, naming file and line, if a JSONL line cannot
    be read or has no string under the key; with --on-error skip it is left out, and added to `skipped`."""
    left_out = [] if skipped is None else skipped
    for chunk in block.chunks:
        is_plain = chunk.kind == "text"
        decode = text.plain_text if is_plain else text.record_text
        for content in _json_texts(chunk, recipe, left_out) if chunk.kind == "json" else chunk.documents:
            is_empty = not (content.strip() if is_plain and recipe.separator else content)
            decoded = [] if is_empty else [decode(part) for part in text.slices(content)]
            num_replaced = sum(count for _, count in decoded)
            yield Document(tuple(part for part, _ in decoded), num_replaced, chunk.begins, chunk.ends, chunk.side)


def _json_texts(chunk: Chunk, recipe: Recipe, skipped: list[Skipped]) -> Iterator[bytes]:
    for number, content in enumerate(chunk.documents, chunk.first_line):
        line = content.decode("utf-8", "surrogateescape")
        if not line or line.isspace():
            continue
        try:
            found = _string_under(recipe.text_key, line, f"{chunk.where} line {number}")
        except UserError as error:
            if recipe.on_error == "stop":
                raise
            skipped.append(Skipped(chunk.where, str(error)))
        else:
            yield (found or "").encode("utf-8", "surrogatepass")


def _string_under(key: str, line: str, place: str) -> str | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{place} can not be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{place} is {_TYPES.get(type(record), 'null')}, not an object with a key {key!r}")
    if key not in record:
        keys = list(record)
        there = ", ".join(keys[:_SHOWN_KEYS]) + (", ..." if len(keys) > _SHOWN_KEYS else "")
        raise UserError(f"{place} has no key {key!r}{nearest(key, keys)}; it has {there or 'none'}: give --text-key")
    value = record[key]
    if value is not None and not isinstance(value, str):
        raise UserError(f"{place} has {_TYPES[type(value)]} under {key!r}, not a string; give --text-key another key")
    return value
