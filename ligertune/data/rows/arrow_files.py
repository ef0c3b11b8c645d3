"""Parquet and Arrow files, and Arrow's logical types as the Python values that JSON would hold.

The same rows give the same examples in any container, so values become what JSON holds: `Json` columns of `datasets`
are parsed, dictionaries and string views become texts, maps become objects, times become ISO 8601. A struct column has
the same fields in every row. A field that is null there is left out: Arrow cannot tell it from one that the row lacks.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import gzip
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ligertune.data.rows.data_files import MAX_PASSED, DataFile, Record, n_bytes_of

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 1000  # rows that are Python objects at a time
_EXTENSION = b"ARROW:extension:name"  # metadata of a field whose type this pyarrow does not know
_JSON = "arrow.json"

Convert = Callable[[Any], Any]


def plain_rows(table: pyarrow.RecordBatch | pyarrow.Table) -> list[dict[str, Any]]:
    """Return the rows as Python values. Raises ValueError for a Json column that holds no JSON."""
    if len(set(table.schema.names)) < len(table.schema.names):
        raise ValueError("two columns have the same name")
    columns = [_plain_column(field, table.column(i)) for i, field in enumerate(table.schema)]
    return [dict(zip(table.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _plain_column(field: pyarrow.Field, column: pyarrow.Array | pyarrow.ChunkedArray) -> list[Any]:
    convert, values = _converter_of_field(field), column.to_pylist()
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _converter_of_field(field: pyarrow.Field) -> Convert | None:
    if (field.metadata or {}).get(_EXTENSION) == _JSON.encode():
        return json.loads
    return _converter(field.type)


def _converter(kind: pyarrow.DataType) -> Convert | None:
    """Return the function for values of a type that are not null; None for those that stay as they are."""
    from pyarrow import types

    if getattr(kind, "extension_name", None) == _JSON:
        return json.loads
    if hasattr(kind, "storage_type"):
        return _converter(kind.storage_type)
    if types.is_struct(kind):
        return _of_struct({field.name: _converter_of_field(field) for field in kind})
    if types.is_map(kind):
        return _of_map(_converter(kind.item_type))
    if types.is_dictionary(kind):
        return _converter(kind.value_type)
    if hasattr(kind, "value_field"):  # lists of any layout
        return _of_list(_converter_of_field(kind.value_field))
    if types.is_decimal(kind):
        return _of_decimal
    if types.is_temporal(kind):
        return _of_time
    return float if types.is_float16(kind) else None


def _of_struct(converters: dict[str, Convert | None]) -> Convert:
    def convert(row: dict[str, Any]) -> dict[str, Any]:
        present = ((name, value) for name, value in row.items() if value is not None)
        return {name: value if (inner := converters[name]) is None else inner(value) for name, value in present}

    return convert


def _of_list(inner: Convert | None) -> Convert | None:
    if inner is None:
        return None
    return lambda values: [None if value is None else inner(value) for value in values]


def _of_map(inner: Convert | None) -> Convert:
    def convert(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        return {str(key): value if inner is None or value is None else inner(value) for key, value in pairs}

    return convert


def _of_decimal(number: decimal.Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _of_time(value: Any) -> str | float:
    """Return a date or time in ISO 8601, and a duration in seconds."""
    return value.total_seconds() if isinstance(value, datetime.timedelta) else value.isoformat()


# ---- files


def read_parquet(file: DataFile) -> Iterator[Record]:
    """Yield the records of a parquet file; the line of a record is the number of its row."""
    from pyarrow import parquet

    with _explained(file, "parquet"):
        content = parquet.ParquetFile(_source(file))
        groups = (content.metadata.row_group(i) for i in range(content.metadata.num_row_groups))
        stored, n_rows = sum(group.total_byte_size for group in groups), content.metadata.num_rows
        rows_at_once = max(1, min(ROWS_AT_ONCE, MAX_PASSED // 8 * n_rows // max(stored, 1)))
        for batch in content.iter_batches(rows_at_once):
            yield from _records(file, batch)
            file.row_share = file.line / max(n_rows, 1)


def read_arrow(file: DataFile) -> Iterator[Record]:
    """Yield the records of an Arrow file, stream (`save_to_disk` of `datasets`) or Feather file of version 2."""
    with _explained(file, "Arrow"):
        batches, total = _record_batches(file)
        for number, batch in enumerate(batches, start=1):
            batch.validate(full=True)  # a damaged file may hold offsets outside its memory
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield from _records(file, batch.slice(start, ROWS_AT_ONCE))
            file.row_share = number / (total or number + 1)


def _record_batches(file: DataFile) -> tuple[Iterator[pyarrow.RecordBatch], int]:
    """Return the record batches of a file, and their number; 0 if it is unknown."""
    import pyarrow

    reader = _ipc_reader(file)
    if isinstance(reader, pyarrow.ipc.RecordBatchFileReader):
        return (reader.get_batch(i) for i in range(reader.num_record_batches)), reader.num_record_batches
    return iter(reader), 0


def _ipc_reader(file: DataFile) -> pyarrow.ipc.RecordBatchFileReader | pyarrow.ipc.RecordBatchStreamReader:
    import pyarrow

    source = _source(file)
    opened = pyarrow.memory_map(source) if isinstance(source, str) else source
    try:
        return pyarrow.ipc.open_file(opened)
    except pyarrow.ArrowInvalid:
        opened.seek(0)
        return pyarrow.ipc.open_stream(opened)


def arrow_schema(file: DataFile) -> pyarrow.Schema:
    """Return the columns of a parquet or Arrow file. Raises UserError if it is damaged."""
    from pyarrow import parquet

    with _explained(file, "parquet or Arrow"):
        return parquet.read_schema(_source(file)) if file.type == ".parquet" else _ipc_reader(file).schema


def _source(file: DataFile) -> Any:
    """Return the path of a file; of a compressed one its content, because it is not read from begin to end."""
    import pyarrow

    if not file.compression:
        return str(file.path)
    with file.open() as stream:
        content = stream.read(MAX_PASSED + 1)
    if len(content) > MAX_PASSED:
        raise file.error(f"more than {MAX_PASSED:,} bytes when decompressed", "Decompress it first.")
    file.row_share = 0.0
    return pyarrow.BufferReader(content)


def _records(file: DataFile, batch: pyarrow.RecordBatch) -> Iterator[Record]:
    for row in plain_rows(batch):
        file.line += 1
        yield file.record(row, file.line, n_bytes_of(row))


@contextlib.contextmanager
def _explained(file: DataFile, kind: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into a UserError."""
    import pyarrow

    try:
        yield
    except gzip.BadGzipFile:  # read_records explains it
        raise
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, RecursionError, OverflowError) as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise file.error(f"not a valid {kind} file: {reason}") from error
