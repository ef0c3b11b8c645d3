"""Write the same rows into every kind of container that data comes in."""

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
from pyarrow import feather, ipc, parquet

Rows = list[dict]


def _json_text(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else value


def _write_csv(path: Path, rows: Rows, delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows({name: _json_text(value) for name, value in row.items()} for row in rows)
    return path


def _write_text(path: Path, text: str) -> Path:
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, compresslevel=1)
    if path.suffix == ".zst":
        content = pyarrow.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)
    return path


def _lines(rows: Rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _pretty(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _parquet(path: Path, table: pyarrow.Table) -> Path:
    parquet.write_table(table, path)
    return path


def _ipc(path: Path, table: pyarrow.Table, *, stream: bool = False) -> Path:
    with (ipc.new_stream if stream else ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table)
    return path


def _feather(path: Path, table: pyarrow.Table) -> Path:
    feather.write_feather(table, path)
    return path


def _large(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return a type with large strings and large lists, as polars writes them."""
    if pyarrow.types.is_string(kind):
        return pyarrow.large_string()
    if pyarrow.types.is_list(kind):
        return pyarrow.large_list(_large(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([(field.name, _large(field.type)) for field in kind])
    return kind


def _polars_like(path: Path, table: pyarrow.Table) -> Path:
    schema = pyarrow.schema([(field.name, _large(field.type)) for field in table.schema])
    return _parquet(path, table.cast(schema))


def _dictionary_coded(path: Path, table: pyarrow.Table) -> Path:
    for number, field in enumerate(table.schema):
        if pyarrow.types.is_string(field.type):
            table = table.set_column(number, field.name, table[field.name].dictionary_encode())
    return _parquet(path, table)


def json_dataset(rows: Rows) -> datasets.Dataset:
    """Return the rows as `datasets` holds them: with its feature Json where objects have different keys."""
    return datasets.Dataset.from_list(rows, on_mixed_types="use_json")


def _to_parquet(folder: Path, rows: Rows) -> Path:
    json_dataset(rows).to_parquet(folder / "d.parquet")
    return folder / "d.parquet"


def _save_to_disk(folder: Path, rows: Rows) -> Path:
    json_dataset(rows).save_to_disk(folder / "saved")
    return folder / "saved"


def _save_dict_to_disk(folder: Path, rows: Rows) -> Path:
    parts = {"test": json_dataset(rows[:1]), "train": json_dataset(rows)}
    datasets.DatasetDict(parts).save_to_disk(folder / "saved")
    return folder / "saved"


def _hub_layout(folder: Path, rows: Rows) -> Path:
    (folder / "data").mkdir()
    json_dataset(rows).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    json_dataset(rows[:1]).to_parquet(folder / "data" / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text("A data set.")
    return folder


# Each writes the rows below a folder and returns the path that a recipe names.
JSON_CONTAINERS: dict[str, Callable[[Path, Rows], Path]] = {
    "jsonl": lambda at, rows: _write_text(at / "d.jsonl", _lines(rows)),
    "jsonl.gz": lambda at, rows: _write_text(at / "d.jsonl.gz", _lines(rows)),
    "jsonl.zst": lambda at, rows: _write_text(at / "d.jsonl.zst", _lines(rows)),
    "json list": lambda at, rows: _write_text(at / "d.json", json.dumps(rows)),
    "json object": lambda at, rows: _write_text(at / "d.json", _pretty({"version": "1.0", "data": rows})),
    "json object in a line": lambda at, rows: _write_text(at / "d.json", json.dumps({"data": rows, "version": 1})),
    "json objects": lambda at, rows: _write_text(at / "d.json.zst", "\n".join(map(_pretty, rows))),
}
CSV_CONTAINERS: dict[str, Callable[[Path, Rows], Path]] = {
    "csv": lambda at, rows: _write_csv(at / "d.csv", rows),
    "csv with semicolons": lambda at, rows: _write_csv(at / "d.csv", rows, ";"),
    "csv with tabs": lambda at, rows: _write_csv(at / "d.csv", rows, "\t"),
    "tsv": lambda at, rows: _write_csv(at / "d.tsv", rows, "\t"),
}
# `datasets` stores objects with different keys as JSON
DATASETS_CONTAINERS: dict[str, Callable[[Path, Rows], Path]] = {
    "parquet of datasets": _to_parquet,
    "save_to_disk": _save_to_disk,
    "save_to_disk of a dict": _save_dict_to_disk,
    "hub layout": _hub_layout,
}
# pyarrow stores objects with different keys as structs, which have the keys of all
STRUCT_CONTAINERS: dict[str, Callable[[Path, pyarrow.Table], Path]] = {
    "parquet": lambda at, table: _parquet(at / "d.parquet", table),
    "parquet of polars": lambda at, table: _polars_like(at / "d.parquet", table),
    "parquet with dictionaries": lambda at, table: _dictionary_coded(at / "d.parquet", table),
    "arrow file": lambda at, table: _ipc(at / "d.arrow", table),
    "arrow stream": lambda at, table: _ipc(at / "d.arrow", table, stream=True),
    "feather": lambda at, table: _feather(at / "d.feather", table),
}
