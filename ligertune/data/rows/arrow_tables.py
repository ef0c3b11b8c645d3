"""Tables of Arrow in parquet files, arrow files and hub data sets: read batch by batch, as plain Python values.

A value is what its logical type says, not how the container stores it: JSON is parsed (the type `arrow.json`, the
feature Json of `datasets`), a map is an object, a timestamp, date or time is ISO 8601 text, a decimal or duration is a
number, a UUID is text, and a category is its value. Binary stays bytes, and a ClassLabel its id.

A struct has the fields of all rows, and those that a row does not have are null. A null field of a struct is
therefore left out; what is written as JSON keeps its nulls.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ligertune.data.rows.data_files import MAX_PASSED, CompressionError, DataFile, Record, n_bytes_of
from ligertune.errors import message_of

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_ONCE = 1000  # rows that are Python values at the same time
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # the mark before a message, and 0 as its length
_JSON_TYPE = "arrow.json"

Converter = Callable[[Any], Any]


def read_parquet(file: DataFile) -> Iterator[Record]:
    """Yield the records of a parquet file."""
    from pyarrow import parquet

    with _errors_of(file, "parquet"):
        content = parquet.ParquetFile(_source(file, memory_map=False))
        stored = sum(content.metadata.row_group(i).total_byte_size for i in range(content.metadata.num_row_groups))
        # so few that a batch has at most 128 MiB (MAX_PASSED / 8) by the file's own sizes: rows may hold images
        rows_at_once = max(1, min(ROWS_AT_ONCE, MAX_PASSED // 8 * content.metadata.num_rows // max(stored, 1)))
        rows = TableRows(content.schema_arrow, file)
        for batch in content.iter_batches(rows_at_once):
            yield from _records(rows, batch, file)
            file.row_share = file.line / max(content.metadata.num_rows, 1)


def read_arrow(file: DataFile) -> Iterator[Record]:
    """Yield the records of an arrow file, in Arrow's file format or its stream format."""
    with _errors_of(file, "arrow"):
        source = _source(file, memory_map=True)
        reader, batches = _arrow_batches(source, file)
        rows = TableRows(reader.schema, file)
        for batch in batches:
            batch.validate(full=True)  # offsets of a damaged file may point anywhere
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield from _records(rows, batch.slice(start, ROWS_AT_ONCE), file)
            file.row_share = source.tell() / max(source.size(), 1)
        file.row_share = 1.0


def _arrow_batches(source: Any, file: DataFile) -> tuple[Any, Iterator[pyarrow.RecordBatch]]:
    from pyarrow import ipc

    if source.read(6) == b"ARROW1":
        reader = ipc.open_file(source)
        return reader, (reader.get_batch(number) for number in range(reader.num_record_batches))
    # A stream that is cut between two batches reads like a whole one but for its end mark, which all writers write.
    source.seek(max(source.size() - len(_END_OF_STREAM), 0))
    if source.read() != _END_OF_STREAM and source.size():
        source.seek(0)
        ipc.open_stream(source)  # raises the better error for what is no arrow file at all
        raise file.error("the arrow file is cut off: its end is missing")
    source.seek(0)
    reader = ipc.open_stream(source)
    return reader, iter(reader)


def arrow_schema(file: DataFile) -> pyarrow.Schema:
    """Return the schema of a parquet or arrow file."""
    from pyarrow import parquet

    if file.path.name.lower().removesuffix(file.path.suffix.lower() * file.is_compressed).endswith(".parquet"):
        with _errors_of(file, "parquet"):
            return parquet.read_schema(_source(file, memory_map=False))
    with _errors_of(file, "arrow"):
        return _arrow_batches(_source(file, memory_map=True), file)[0].schema


def _source(file: DataFile, *, memory_map: bool) -> Any:
    """Return what pyarrow reads; a compressed file is decompressed, because both formats are read from their end."""
    import pyarrow

    if not file.is_compressed:
        return pyarrow.memory_map(str(file.path)) if memory_map else str(file.path)
    with file.open() as stream:
        decompressed = stream.read(MAX_PASSED + 1)
    file.row_share = 0.0
    if len(decompressed) > MAX_PASSED:
        raise file.error(f"more than {MAX_PASSED:,} bytes when decompressed", "Decompress it on disk.")
    return pyarrow.BufferReader(decompressed)


@contextmanager
def _errors_of(file: DataFile, kind: str) -> Iterator[None]:
    """Raise UserError for what pyarrow cannot read."""
    import pyarrow

    try:
        yield
    except (gzip.BadGzipFile, CompressionError):
        raise
    # ValueError: also text that is not UTF-8, and dates that Python does not have
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise file.error(f"not a valid {kind} file: {message_of(error).rstrip('.')}") from error


def _records(rows: TableRows, batch: pyarrow.RecordBatch, file: DataFile) -> Iterator[Record]:
    for row in rows.of(batch):
        file.line += 1
        yield file.record(row, file.line, n_bytes_of(row))


class TableRows:
    """Converts batches and tables of one schema to rows. `file` is the one whose line stands in errors, if any."""

    def __init__(self, schema: pyarrow.Schema, file: DataFile | None = None) -> None:
        features = _features(schema)
        self._file = file
        self._names = schema.names
        self._converters = [_of_field(field, features.get(field.name)) for field in schema]
        if len(set(self._names)) < len(self._names):
            double = next(name for name in self._names if self._names.count(name) > 1)
            raise ValueError(f"two columns have the name `{double}`")

    def of(self, batch: pyarrow.RecordBatch | pyarrow.Table) -> Iterator[dict[str, Any]]:
        """Yield the rows of a batch."""
        columns = [self._values(*column) for column in zip(self._names, batch.columns, self._converters, strict=True)]
        for values in zip(*columns, strict=True):
            yield dict(zip(self._names, values, strict=True))

    def _values(self, name: str, column: Any, convert: Converter | None) -> list[Any]:
        values = column.to_pylist()
        if convert is None:
            return values
        converted = []
        try:
            for value in values:
                converted.append(None if value is None else convert(value))
        except (ValueError, RecursionError) as error:
            what = f"the column `{name}` holds a value that is not JSON: {str(error).partition(';')[0]}"
            if self._file is None:
                raise ValueError(what) from error
            raise self._file.error(what, line=self._file.line + len(converted) + 1) from error
        return converted


def _features(schema: pyarrow.Schema) -> dict[str, Any]:
    """Return the features that `datasets` writes into a schema, as JSON: a column of JSON may be stored as text."""
    try:
        return dict(json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (LookupError, ValueError, TypeError, RecursionError):
        return {}


def _of_field(field: pyarrow.Field, feature: Any) -> Converter | None:
    """Return the converter of a field's values that are not null, or None if they are plain already."""
    unknown = (field.metadata or {}).get(b"ARROW:extension:name", b"")  # a type that this pyarrow does not have
    if unknown.decode("utf-8", "replace") == _JSON_TYPE:
        return json.loads
    return _converter(field.type, feature)


def _converter(kind: pyarrow.DataType, feature: Any = None) -> Converter | None:
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        if kind.extension_name == _JSON_TYPE:
            return json.loads
        return str if kind.extension_name == "arrow.uuid" else _converter(kind.storage_type)
    if isinstance(feature, dict) and feature.get("_type") == "Json" and _is_text(kind):
        return json.loads
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _converter(kind.value_type, feature)
    if types.is_struct(kind):
        return _of_struct(kind, feature)
    if types.is_map(kind):
        return _of_map(kind)
    if hasattr(kind, "value_field"):  # lists of any kind
        inner = _of_field(kind.value_field, _item_feature(feature))
        return None if inner is None else _of_list(inner)
    return _of_scalar(kind)


def _is_text(kind: pyarrow.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _item_feature(feature: Any) -> Any:
    """Return the feature of a list's items, in any of the forms in which `datasets` has written it."""
    if isinstance(feature, list):
        return feature[0] if feature else None
    return feature.get("feature") if isinstance(feature, dict) else None


def _of_struct(kind: pyarrow.StructType, feature: Any) -> Converter:
    features = feature if isinstance(feature, dict) else {}
    if features.get("_type") == "Sequence":  # of structs: stored as a struct of lists
        inner = features.get("feature")
        features = {name: [of_item] for name, of_item in inner.items()} if isinstance(inner, dict) else {}
    fields = [kind.field(number) for number in range(kind.num_fields)]
    of_fields = {field.name: _of_field(field, features.get(field.name)) for field in fields}
    converters = {name: convert for name, convert in of_fields.items() if convert is not None}

    def convert_struct(struct: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in struct.items() if value is not None}
        for name, convert in converters.items():
            if name in kept:
                kept[name] = convert(kept[name])
        return kept

    return convert_struct


def _of_list(inner: Converter) -> Converter:
    return lambda items: [None if item is None else inner(item) for item in items]


def _of_map(kind: pyarrow.MapType) -> Converter:
    inner = _of_field(kind.item_field, None) or (lambda value: value)

    def convert_map(pairs: Any) -> dict[str, Any]:
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        return {str(key): None if value is None else inner(value) for key, value in pairs}

    return convert_map


def _of_scalar(kind: pyarrow.DataType) -> Converter | None:
    from pyarrow import types

    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return lambda value: value.isoformat()
    if types.is_decimal(kind):
        return lambda value: int(value) if value == value.to_integral_value() and kind.scale <= 0 else float(value)
    if types.is_duration(kind):
        return timedelta.total_seconds
    return float if types.is_float16(kind) else None
