"""The text of a Parquet file's row groups."""

from collections.abc import Iterator
from typing import Any

from paceline.base.errors import UserError, nearest
from paceline.data.sources import SourceFile, Stored

_CELL_BYTES = 1 << 20  # decoded at once
_READ_BYTES = 1 << 20


def cells(file: SourceFile, stored: Stored, column: str, start: int, stop: int | None) -> Iterator[bytes]:
    """Yields a column's cells of the row groups in the bytes start..stop-1, as UTF-8; null is empty. Group i of n
    counts as beginning at i/n of the file, which needs no look into it."""
    import pyarrow.parquet  # type: ignore[import-untyped]  # slow to import

    try:
        # Without these sizes Arrow reads a row group's complete column, often hundreds of MB.
        parquet = pyarrow.parquet.ParquetFile(
            stored, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
        _require_text(file, parquet.schema_arrow, column)
        for group in range(parquet.num_row_groups):
            begin = file.size * group // parquet.num_row_groups
            if start <= begin and (stop is None or begin < stop):
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
    found = kind = schema.field(column).type
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    if not any(test(kind) for test in tests):
        raise UserError(f"{file.where}: column {column!r} is of {found}, not of text; give --text-key another column")


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
