"""Where records come from: files, folders, globs and the hub, read into `Record`s.

A record knows its place, `file:line`, so that every complaint can name it. Lines end at "\\n" only: a U+2028 inside a
JSON string splits nothing. In a parquet file and on the hub the place is the number of the row, from 1.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.recipe.schema import DatasetSpec

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Record(NamedTuple):
    """One row as it stands in its source, and where that is."""

    row: dict[str, Any]
    source: str


def read_records(spec: DatasetSpec) -> list[Record]:
    """The first `max_samples` records of a data set, in the order of the source, columns renamed as `columns` says."""
    files = find_files(spec.path)
    if files and (spec.name is not None or spec.split != "train"):
        raise UserError(
            f"{spec.path} is on this machine: `name` and `split` choose among the parts of a data set on the hub.",
            hint="Leave them out and name the file you want in `path`.",
        )
    stream = chain.from_iterable(map(read_file, files)) if files else _read_hub(spec)
    records = list(islice(stream, spec.max_samples))
    if not records:
        raise UserError(f"{spec.path} holds no records.")
    return _renamed(records, spec) if spec.columns else records


def find_files(path: str) -> list[Path]:
    """The data files that `path` names, sorted; none if it can only be the id of a data set on the hub."""
    place = Path(path).expanduser()
    if place.is_dir():
        return _files_in(place)
    if place.is_file():
        return [place]
    if glob.has_magic(path):
        found = sorted(Path(name) for name in glob.glob(str(place), recursive=True) if os.path.isfile(name))
        if not found:
            raise UserError(f"No file matches {path}.")
        return found
    if _HUB_ID.fullmatch(path) and _reader(place) is None:
        return []
    raise UserError(f"No such file or folder: {path}.")


def read_file(path: Path) -> Iterator[Record]:
    """The records of one file, by its ending; an ending `.gz` is unpacked first."""
    reader = _reader(path)
    where = shown_path(path)
    if reader is None:
        raise UserError(f"{where}: not a kind of data file that is known.", hint=f"Known: {_KNOWN}.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}.") from error
    if path.name.lower().endswith(".gz"):
        content = _unpacked(content, where)
    return reader(content, where)


def _files_in(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.is_file() and _reader(file) is not None)
    if not files:
        raise UserError(f"{folder}: the folder holds no data file.", hint=f"Known: {_KNOWN}.")
    kinds = sorted({_ending(file) for file in files})
    if len(kinds) > 1:
        raise UserError(
            f"{folder}: the folder holds files of several kinds ({', '.join(kinds)}).",
            hint=f"Choose one, for instance with {folder / ('*' + kinds[0])}.",
        )
    return files


def shown_path(path: Path) -> str:
    """The path as a person here would write it: relative, if the file lies below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _unpacked(content: bytes, where: str) -> bytes:
    try:
        return gzip.decompress(content)
    except EOFError as error:
        raise UserError(f"{where}: the gzip file is cut off: its end is missing.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{where}: not a sound gzip file: {error}.") from error


def _decoded(content: bytes, where: str) -> str:
    """UTF-8 text, without the byte order mark that some editors put first."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}:{line}: byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8.",
            hint="Save the file as UTF-8.",
        ) from error


def _read_json(content: bytes, where: str) -> Iterator[Record]:
    """A list of objects, or one object a line, whichever of the two names the file bears."""
    text = _decoded(content, where)
    start = _JSON_SPACE.match(text).end()
    return _read_list(text, start + 1, where) if text.startswith("[", start) else _read_lines(text, where)


def _read_lines(text: str, where: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line and not line.isspace():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
                raise UserError(f"{where}:{number}: not JSON: {_flaw(error)}.") from error
            yield _record(value, f"{where}:{number}")


def _read_list(text: str, at: int, where: str) -> Iterator[Record]:
    """The elements of a JSON list, decoded one by one so that each has its line."""
    scan, space = json.JSONDecoder().raw_decode, _JSON_SPACE.match
    line, counted = 1, 0
    while True:
        at = space(text, at).end()
        line, counted = line + text.count("\n", counted, at), at
        if text.startswith("]", at):
            break
        if at == len(text):
            raise UserError(f"{where}:{line}: the list is not closed: the file is cut off.")
        try:
            value, end = scan(text, at)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}:{error.lineno}: not JSON: {_flaw(error)}.") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}:{line}: not JSON: {_flaw(error)}.") from error
        yield _record(value, f"{where}:{line}")
        at = space(text, end).end()
        if text.startswith(",", at):
            at += 1
        elif at < len(text) and text[at] != "]":
            line += text.count("\n", counted, at)
            raise UserError(f"{where}:{line}: not JSON: no comma between two records.")
    at = space(text, at + 1).end()
    if at < len(text):
        line += text.count("\n", counted, at)
        raise UserError(f"{where}:{line}: there is text behind the end of the list.")


def _flaw(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[0].lower()}{error.msg[1:]} (column {error.colno})"
    return str(error).partition(";")[0].lower()


def _record(value: Any, source: str) -> Record:
    if not isinstance(value, dict):
        raise UserError(
            f"{source}: expected an object with named columns, found {_kind_of(value)}.",
            hint='A record looks like {"instruction": "...", "output": "..."}.',
        )
    return Record(value, source)


def _kind_of(value: Any) -> str:
    names = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "null")


def _read_csv(content: bytes, where: str) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is less than one long conversation
    rows = csv.reader(io.StringIO(_decoded(content, where), newline=""), strict=True)
    try:
        header = next(rows, [])
        line = rows.line_num + 1  # a quoted field may span lines: a row is named by its first
        for row in rows:
            if row and len(row) != len(header):
                raise UserError(f"{where}:{line}: {len(row)} fields, but the header has {len(header)}.")
            if row:
                yield Record(dict(zip(header, row, strict=True)), f"{where}:{line}")
            line = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{where}:{rows.line_num}: not CSV: {error}.") from error


def _read_parquet(content: bytes, where: str) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches(1000):
            for row in batch.to_pylist():
                number += 1
                yield Record(row, f"{where}:{number}")
    except pyarrow.ArrowException as error:
        raise UserError(f"{where}: not a sound parquet file: {error}.") from error


def _read_hub(spec: DatasetSpec) -> Iterator[Record]:
    import datasets

    try:
        rows = datasets.load_dataset(spec.path, spec.name, split=spec.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(
            f"{spec.path} is neither a file or folder here nor a data set that the hub gives: {reason}.",
            hint="Check the path, the network, `name` and `split`.",
        ) from error
    for number, row in enumerate(rows, start=1):
        yield Record(row, f"{spec.path}:{spec.split}:{number}")


def _renamed(records: list[Record], spec: DatasetSpec) -> list[Record]:
    found = {column for record in records for column in record.row}
    for theirs in spec.columns.values():
        if theirs not in found:
            raise UserError(
                f"{spec.path} has no column `{theirs}` (data.datasets[].columns); it has {', '.join(sorted(found))}."
            )
    theirs_of = dict(spec.columns)

    def rename(row: dict[str, Any]) -> dict[str, Any]:
        kept = {column: value for column, value in row.items() if column not in theirs_of.values()}
        return kept | {ours: row[theirs] for ours, theirs in theirs_of.items() if theirs in row}

    return [Record(rename(record.row), record.source) for record in records]


_READERS: dict[str, Callable[[bytes, str], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
_KNOWN = f"{', '.join(_READERS)}, each also with .gz behind it"


def _ending(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _reader(path: Path) -> Callable[[bytes, str], Iterator[Record]] | None:
    return _READERS.get(_ending(path))
