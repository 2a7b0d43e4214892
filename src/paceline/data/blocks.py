"""From files to blocks of bytes, cheaply and in order, and from a block to texts, on whatever process.

Blocks are a pure function of the files and the place where reading begins, and where one ends does not depend on where
reading began: from `next` of a resumable block come the blocks that followed it. Memory is that of a few blocks,
however long a file, a line or a document is; but a cell of a Parquet file is in memory whole, as Arrow hands it out.
"""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.base.errors import UserError, nearest
from paceline.data import corpora, jsonl
from paceline.data.corpora import BYTE_ORDER_MARK, STANDARD_INPUT, Readable, SourceFile, Sources, Stored

BLOCK_BYTES = 1 << 20  # 25 ms of encoding on a core: enough to be worth sending to a process
LINE_BYTES = 1 << 22  # a longer line of JSON is parsed as it is read
_CHUNK_COST_BYTES = 256  # what a chunk weighs in memory beside its content: a million files may be of one byte
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What tells where the documents of a file are; sent to workers."""

    text_key: str = "text"
    separator: str = ""
    """Of the documents of a text file; empty: a file is a document."""


@dataclass(frozen=True)
class Place:
    """Between two documents, or two pieces of one. The first is before all."""

    file: int = 0
    offset: int = 0
    """Bytes of the file without its compression; of Parquet: rows."""
    line: int = 0
    """JSONL: lines before."""
    digest: str = ""
    """Standard input: sha256 of the bytes before, which are asked for again."""


@dataclass(frozen=True)
class Chunk:
    """What one file gives to a block.

    `kind` says what the content is: a "piece" of a plain file's document, or of a "record"; whole "documents" with
    separators; whole "lines" of JSONL; whole "cells", one after the other, of which `sizes` are the bytes.
    """

    kind: Literal["piece", "record", "documents", "lines", "cells"]
    content: bytes
    where: str
    side: str | None
    begins: bool = True
    ends: bool = True
    first_line: int = 1
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """About BLOCK_BYTES of documents, in order, of one file or many.

    `file` is the last file's place among the sources and `read_bytes` how many of its stored bytes are read. `next` is
    where reading goes on; only where the block is not resumable, in the middle of a long record, reading can not.
    """

    chunks: tuple[Chunk, ...]
    file: int
    next: Place
    resumable: bool
    read_bytes: int


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one. `side` is its file's; `num_replaced` counts what became U+FFFD."""

    text: str
    begins: bool
    ends: bool
    num_replaced: int
    side: str | None


@dataclass(frozen=True)
class Texts:
    """Of a block. `num_empty` counts documents without text, and null values; they are not among the texts."""

    texts: tuple[Text, ...]
    num_empty: int


@dataclass(frozen=True)
class _Read:
    """A chunk and what is known after it."""

    chunk: Chunk
    offset: int
    read_bytes: int
    line: int = 0
    resumable: bool = True
    digest: str = ""


def read_blocks(sources: Sources, options: ReadOptions, start: Place = Place()) -> Iterator[Block]:
    """Yields the blocks from a place on; `start` is the beginning, or `next` of a resumable block.

    Raises UserError, naming the file, for one that can not be read, is damaged or has become shorter, for a Parquet
    file without the column, and for standard input that is not what it was.
    """
    chunks: list[Chunk] = []
    weight = 0
    last = None
    for number in range(start.file, len(sources.files)):
        here = start if number == start.file else Place(number)
        for read in _read_file(sources.files[number], options, here):
            chunks.append(read.chunk)
            weight += len(read.chunk.content) + _CHUNK_COST_BYTES
            place = Place(number, read.offset, read.line, read.digest)
            last = Block((), number, place, read.resumable, read.read_bytes)
            if weight >= BLOCK_BYTES:
                yield replace(last, chunks=tuple(chunks))
                chunks, weight = [], 0
    if last is not None and chunks:
        yield replace(last, chunks=tuple(chunks))


def _read_file(file: SourceFile, options: ReadOptions, start: Place) -> Iterator[_Read]:
    with corpora.open_stored(file) as stored:
        if file.format == "parquet":
            yield from _read_cells(file, stored, options.text_key, start.offset)
            return
        window = _Window(file, stored, start)
        if file.format == "jsonl":
            yield from _read_lines(file, window, options.text_key, start.line)
        elif options.separator:
            yield from _read_documents(file, window, options.separator.encode())
        else:
            yield from _read_pieces(file, window, begins=start.offset <= file.start)


class _Window:
    """The next bytes of a file, looked at before they are taken. `offset` is where they begin."""

    def __init__(self, file: SourceFile, stored: Stored, start: Place) -> None:
        self._file, self._stored = file, stored
        self._content: Readable = corpora.open_content(file, stored)
        self._hash = hashlib.sha256() if file.path == STANDARD_INPUT else None
        self._stop = file.start + file.num_bytes if file.is_seekable and file.num_bytes is not None else None
        self._data, self._ended = b"", False
        self.offset = 0
        wanted = max(file.start, start.offset)
        if file.is_seekable:
            stored.seek(wanted)
            self.offset = wanted
        else:
            self._pass_to(wanted, start.digest)
        if self.offset == 0 and self.look(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
            self.take(len(BYTE_ORDER_MARK))

    @property
    def read_bytes(self) -> int:
        """How much of what is stored stands for the bytes taken."""
        return self._stored.tell() if self._file.compression else self.offset - self._file.start

    @property
    def digest(self) -> str:
        """Of all bytes taken, where the file is standard input."""
        return self._hash.hexdigest() if self._hash else ""

    def look(self, size: int) -> bytes:
        """At least the next `size` bytes; fewer at the end, and only there."""
        parts, there = [self._data], len(self._data)
        while there < size and not self._ended:
            parts.append(self._read(self.offset + there))
            there += len(parts[-1])
        if len(parts) > 1:
            self._data = b"".join(parts)
        return self._data

    def take(self, size: int) -> bytes:
        """The next `size` bytes, of those looked at."""
        taken, self._data = self._data[:size], self._data[size:]
        self.offset += size
        if self._hash:
            self._hash.update(taken)
        return taken

    def _read(self, position: int) -> bytes:
        wanted = _READ_BYTES if self._stop is None else min(_READ_BYTES, self._stop - position)
        found = self._content.read(wanted) if wanted > 0 else b""
        self._ended = not found
        if not found and wanted > 0 and self._stop is not None:
            raise UserError(f"{self._file.where} became shorter while it was read; start again")
        return found

    def _pass_to(self, offset: int, digest: str) -> None:
        while self.offset < offset and self.look(1):
            self.take(min(len(self._data), offset - self.offset))
        if self.offset < offset or self.digest != (digest if offset else self.digest):
            raise UserError(
                f"{self._file.where} does not begin with the {offset} bytes that were read before; give the same "
                f"again, or --restart to begin anew"
            )


def _after(window: _Window, chunk: Chunk, *, line: int = 0, resumable: bool = True) -> _Read:
    return _Read(chunk, window.offset, window.read_bytes, line, resumable, window.digest)


def _read_pieces(file: SourceFile, window: _Window, *, begins: bool) -> Iterator[_Read]:
    """A file that is one document."""
    while begins or window.look(1):
        data = window.look(corpora.PIECE_BYTES + 1)
        ends = len(data) <= corpora.PIECE_BYTES
        content = window.take(len(data) if ends else corpora.cut(data))
        yield _after(window, Chunk("piece", content, file.where, file.side, begins, ends))
        begins = False


def _read_documents(file: SourceFile, window: _Window, separator: bytes) -> Iterator[_Read]:
    while window.look(1):
        data = window.look(BLOCK_BYTES)
        last = data.rfind(separator, 0, BLOCK_BYTES)
        if last < 0 and len(data) >= BLOCK_BYTES:
            yield from _read_long_document(file, window, separator)
            continue
        content = window.take(last + len(separator) if last >= 0 else len(data))
        yield _after(window, Chunk("documents", content, file.where, file.side))


def _read_long_document(file: SourceFile, window: _Window, separator: bytes) -> Iterator[_Read]:
    begins, ends = True, False
    while not ends:
        data = window.look(corpora.PIECE_BYTES + len(separator))
        size, passed = data.find(separator, 0, corpora.PIECE_BYTES + len(separator)), len(separator)
        ends = size >= 0 or len(data) <= corpora.PIECE_BYTES
        if size < 0:
            size, passed = len(data) if ends else corpora.cut(data), 0
        content = window.take(size)
        window.take(passed)
        yield _after(window, Chunk("piece", content, file.where, file.side, begins, ends), resumable=ends)
        begins = False


def _read_lines(file: SourceFile, window: _Window, key: str, line: int) -> Iterator[_Read]:
    """`line`: lines before the first."""
    while window.look(1):
        size = _whole_lines(window)
        if size:
            chunk = Chunk("lines", window.take(size), file.where, file.side, first_line=line + 1)
            line += chunk.content.count(b"\n")
            yield _after(window, chunk, line=line)
            continue
        line += 1
        long_line = jsonl.LongLine(_line(window), key, f"{file.where} line {line}")
        for content, begins, ends in _pieces_of(text.encode("utf-8", "surrogatepass") for text in long_line.text()):
            chunk = Chunk("record", content, file.where, file.side, begins, ends)
            yield _after(window, chunk, line=line, resumable=ends)


def _whole_lines(window: _Window) -> int:
    """The size of the next lines, all that fit into a block or one that does not; 0 where it is a long one."""
    for size in (BLOCK_BYTES, LINE_BYTES):
        data = window.look(size)
        if end := data.rfind(b"\n", 0, size) + 1 if size == BLOCK_BYTES else data.find(b"\n", 0, size) + 1:
            return end
        if len(data) < size:
            return len(data)
    return 0


def _line(window: _Window) -> Iterator[str]:
    """The next line in parts; bytes that are not UTF-8 are lone surrogates."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    end = 0
    while not end and (data := window.look(1)):
        end = data.find(b"\n", 0, _READ_BYTES) + 1
        yield decoder.decode(window.take(end or min(len(data), _READ_BYTES)))
    yield decoder.decode(b"", final=True)


def _pieces_of(parts: Iterable[bytes]) -> Iterator[tuple[bytes, bool, bool]]:
    """One document that comes in parts: (piece, whether it begins the document, whether it ends it)."""
    kept, begins = b"", True
    for part in parts:
        kept += part
        while len(kept) > corpora.PIECE_BYTES:
            end = corpora.cut(kept)
            yield kept[:end], begins, False
            kept, begins = kept[end:], False
    yield kept, begins, True


def _read_cells(file: SourceFile, stored: Stored, column: str, start: int) -> Iterator[_Read]:
    """The cells of a Parquet file's column from a row on."""
    import pyarrow.parquet  # type: ignore[import-untyped]  # slow to import, and needed by the process that reads only

    try:
        # Without the sizes given here Arrow reads a row group's column, often hundreds of MB, at once.
        parquet = pyarrow.parquet.ParquetFile(
            stored, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        number = _column(file, parquet.schema_arrow, column)
        first = 0  # row of the row group
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if first + rows > start:
                yield from _read_row_group(file, parquet, group, number, first, start)
            first += rows
    except (pyarrow.ArrowException, OSError) as error:
        if not isinstance(error, pyarrow.ArrowException) and type(error) is not OSError:
            raise  # the system's, or the hub's
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file.where} can not be read as Parquet: {reason}; is it damaged or cut short?") from error


def _column(file: SourceFile, schema: Any, column: str) -> str:
    """The column's name. Raises UserError where there is none, or no text in it."""
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
    return column


def _read_row_group(file: SourceFile, parquet: Any, group: int, column: str, row: int, start: int) -> Iterator[_Read]:
    """`row` is the row group's first."""
    metadata = parquet.metadata
    # An encrypted column raises here; asked for its size first, Arrow would end the process.
    next(parquet.iter_batches(1, row_groups=[group], columns=[column], use_threads=False), None)
    names = [parquet.schema.column(i).path for i in range(metadata.num_columns)]
    sizes = metadata.row_group(group)
    size = sizes.column(names.index(column)).total_uncompressed_size if column in names else 0
    batch_rows = min(max(1, BLOCK_BYTES * sizes.num_rows // max(size, 1)), 1 << 16)
    for batch in parquet.iter_batches(batch_rows, row_groups=[group], columns=[column], use_threads=False):
        offsets, content = _bytes_of(batch.column(0))
        at, num_rows = max(0, min(start - row, len(offsets) - 1)), len(offsets) - 1
        while at < num_rows:
            end = max(at + 1, int(np.searchsorted(offsets, offsets[at] + BLOCK_BYTES, "right")) - 1)
            done = (file.num_bytes or 0) * (row + end) // max(metadata.num_rows, 1)
            cells = content[offsets[at] : offsets[end]]
            if len(cells) <= BLOCK_BYTES:
                sizes_here = tuple(np.diff(offsets[at : end + 1]).tolist())
                chunk = Chunk("cells", bytes(cells), file.where, file.side, sizes=sizes_here)
                yield _Read(chunk, row + end, done)
            else:
                for piece, begins, ends in _pieces_of(_parts(cells)):
                    chunk = Chunk("record", piece, file.where, file.side, begins, ends)
                    yield _Read(chunk, row + end, done, resumable=ends)
            at = end
        row += num_rows


def _parts(cell: memoryview) -> Iterator[bytes]:
    return (bytes(cell[at : at + BLOCK_BYTES]) for at in range(0, len(cell), BLOCK_BYTES))


def _bytes_of(column: Any) -> tuple[npt.NDArray[np.int64], memoryview]:
    """The cells of an Arrow array as UTF-8, one after the other, and where each begins, (rows + 1,); null is empty."""
    import pyarrow

    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(pyarrow.large_binary())
    if column.null_count:
        column = column.fill_null(b"")
    _, offsets, content = column.buffers()
    begins = np.frombuffer(offsets, np.int64) if offsets else np.zeros(1, np.int64)
    return begins[column.offset : column.offset + len(column) + 1], memoryview(content or b"")


def texts(block: Block, options: ReadOptions) -> Texts:
    """Returns the texts of a block, none longer than a piece.

    Raises UserError, naming file and line, for a line of JSONL that can not be read, or has no string under the key.
    """
    found: list[Text] = []
    num_empty = 0
    for chunk in block.chunks:
        for document in _documents(chunk, options):
            last = len(document) - 1
            for i, (text, num_replaced) in enumerate(document):
                begins, ends = chunk.begins and i == 0, chunk.ends and i == last
                found.append(Text(text, begins, ends, num_replaced, chunk.side))
            num_empty += not document
    return Texts(tuple(found), num_empty)


_Pieces = list[tuple[str, int]]  # of a document: text, and in how many places it is U+FFFD instead; empty: no text


def _documents(chunk: Chunk, options: ReadOptions) -> Iterator[_Pieces]:
    if chunk.kind == "piece":
        yield [corpora.text_of(chunk.content)] if chunk.content else []
    elif chunk.kind == "record":
        yield [_decode(chunk.content)] if chunk.content else []
    elif chunk.kind == "documents":
        *whole, rest = chunk.content.split(options.separator.encode())
        for content in whole if not rest or rest.isspace() else [*whole, rest]:
            yield [corpora.text_of(piece) for piece in corpora.pieces(content)] if content.strip() else []
    elif chunk.kind == "cells":
        ends = [*accumulate(chunk.sizes)]
        for size, end in zip(chunk.sizes, ends, strict=True):
            yield [_decode(piece) for piece in corpora.pieces(chunk.content[end - size : end])] if size else []
    else:
        for text in jsonl.records(chunk.content, options.text_key, chunk.where, chunk.first_line):
            yield _in_pieces(text or "")


def _in_pieces(text: str) -> _Pieces:
    if 4 * len(text) <= corpora.PIECE_BYTES:  # no character is more than 4 bytes
        return [jsonl.clean(text)] if text else []
    return [_decode(piece) for piece in corpora.pieces(text.encode("utf-8", "surrogatepass"))]


def _decode(content: bytes) -> tuple[str, int]:
    """Returns a record's text, and in how many places it is U+FFFD for half a surrogate pair or what is not UTF-8."""
    try:
        return jsonl.clean(content.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return corpora.decode(content)
