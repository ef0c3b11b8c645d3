"""Data file readers: json, jsonl, csv, parquet and txt, each also gzip-compressed, record by record in little memory.

Each record has its source, `file:line`, so that every error can name it. Lines end at "\\n" only: a U+2028 inside a
JSON string does not end one. In a parquet file the line is the number of the row, from 1.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ligertune.errors import UserError

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_CHUNK = 1 << 20  # bytes of a JSON list that are decoded at once
_DOCUMENT = 1 << 20  # characters of a text file that make one record; it ends at the next line break


class Record(NamedTuple):
    """One row as the data set has it, and its `file:line`."""

    row: dict[str, Any]
    source: str


class DataFile:
    """A data file while it is read: its current line, and the share of its bytes that was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = display_path(path)
        self.line = 0
        self.size = max(path.stat().st_size, 1)
        self.unparsed = 0.0  # share of the decoded text that is not parsed yet
        self.row_share = 0.0  # of formats that are read by rows, not by bytes
        self._raw: BinaryIO | None = None

    @property
    def share(self) -> float:
        """The share of the file that was read, from 0 to 1."""
        if self._raw is None or self._raw.closed:
            return self.row_share
        return self._raw.tell() / self.size * (1 - self.unparsed)

    def records(self) -> Iterator[Record]:
        """Yield the records. The ending of the file's name selects the reader.

        Raises UserError with the line for a file that cannot be read or parsed.
        """
        reader = reader_of(self.path)
        if reader is None:
            raise UserError(f"{self.name}: this kind of data file is unknown.", hint=f"Known: {FILE_TYPES}.")
        try:
            yield from reader(self)
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.error(f"not a valid gzip file: {error}") from error
        except EOFError as error:
            raise self.error("the gzip file is cut off: its end is missing") from error
        except OSError as error:
            raise UserError(f"{self.name} cannot be read: {error.strerror or error}.") from error

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file as bytes, decompressed."""
        with self.path.open("rb") as raw:
            self._raw = raw
            if self.path.name.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as decompressed:
                    yield decompressed
            else:
                yield raw
            self.row_share = 1.0

    def lines(self, stream: BinaryIO) -> Iterator[str]:
        """Yield the lines as text, each with its "\\n", without a byte order mark before the first."""
        offset = 0
        for content in stream:
            self.line += 1
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                is_utf16 = offset == 0 and content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                raise self.error(
                    f"byte 0x{content[error.start]:02x} at offset {offset + error.start} is not UTF-8",
                    f"Save the file as UTF-8; it looks like {'UTF-16' if is_utf16 else 'Windows-1252 or Latin-1'}.",
                ) from error
            yield text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(content)

    def error(self, what: str, hint: str = "", *, line: int | None = None) -> UserError:
        """Return an error at `line`, or at the current line."""
        return UserError(f"{self.name}:{max(self.line if line is None else line, 1)}: {what}.", hint=hint)


def display_path(path: Path) -> str:
    """Return the path relative to the current folder if the file is below it, else as it is."""
    found, here = path.resolve(), Path.cwd()
    return str(found.relative_to(here) if found.is_relative_to(here) else path)


def _read_json(file: DataFile) -> Iterator[Record]:
    """Read a list of objects or one object per line. The content decides, not whether the name is .json or .jsonl."""
    with file.open() as stream:
        first = b""
        while not first and (content := stream.read(_CHUNK)):
            first = content.removeprefix(codecs.BOM_UTF8).lstrip()
        stream.seek(0)
        yield from _read_list(_JsonText(file, stream)) if first.startswith(b"[") else _read_json_lines(file, stream)


def _read_json_lines(file: DataFile, stream: BinaryIO) -> Iterator[Record]:
    for line in file.lines(stream):
        if not line.isspace():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
                raise file.error(f"not JSON: {_json_error(error)}") from error
            yield _record(value, file, file.line)


class _JsonText:
    """The text of a JSON file from `at` on, decoded chunk by chunk. `file.line` is the line of `at`."""

    def __init__(self, file: DataFile, stream: BinaryIO) -> None:
        self.file, self._stream = file, stream
        self._text, self._at, self._ended = "", 0, False
        self._decoded = 0  # characters
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        file.line = 1

    def _read_more(self) -> None:
        """Decode at least as much again as is unparsed, so that parsing a long value again costs linear time."""
        rest = self._text[self._at :]
        content = self._stream.read(max(_CHUNK, len(rest)))
        self._ended = not content
        try:
            text = self._decoder.decode(content, self._ended)
        except UnicodeDecodeError:
            with self.file.open() as stream:  # reading by lines raises the error with its line and offset
                self.file.line = 0
                deque(self.file.lines(stream), maxlen=0)
            raise
        self._decoded += len(text)
        self._text, self._at = rest + text, 0

    def _advance(self, place: int) -> None:
        self.file.line += self._text.count("\n", self._at, place)
        self._at = place

    def next_character(self, *, skip: int = 0) -> str:
        """Skip `skip` characters and white space, and return the next character; "" at the end of the file."""
        self._advance(self._at + skip)
        while True:
            self._advance(_JSON_SPACE.match(self._text, self._at).end())
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read_more()

    def value(self) -> Any:
        """Parse the JSON value that begins here."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                break
            except (ValueError, RecursionError) as error:
                if self._ended or not isinstance(error, json.JSONDecodeError):
                    line = self.file.line + self._text.count("\n", self._at, getattr(error, "pos", self._at))
                    raise self.file.error(f"not JSON: {_json_error(error)}", line=line) from error
            self._read_more()
        self._advance(end)
        self.file.unparsed = (len(self._text) - end) / self._decoded
        return value


def _read_list(text: _JsonText) -> Iterator[Record]:
    """Read a JSON list element by element, so that each record has its line."""
    file, skip = text.file, len("[")
    text.next_character()
    while (following := text.next_character(skip=skip)) != "]":
        if not following:
            raise file.error("the list is not closed: the file is cut off")
        line = file.line
        yield _record(text.value(), file, line)
        following = text.next_character()
        if following not in (",", "]", ""):
            raise file.error("not JSON: no comma between two records")
        skip = int(following == ",")
    if text.next_character(skip=len("]")):
        raise file.error("there is text after the end of the list")


def _json_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[0].lower()}{error.msg[1:]} (column {error.colno})"
    return str(error).partition(";")[0].lower()


def _record(value: Any, file: DataFile, line: int) -> Record:
    if not isinstance(value, dict):
        names = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list"}
        raise file.error(
            f"expected an object with named columns, found {names.get(type(value), 'null')}",
            'A record looks like {"instruction": "...", "output": "..."}.',
            line=line,
        )
    return Record(value, f"{file.name}:{line}")


def _read_csv(file: DataFile) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is less than one long conversation
    with file.open() as stream:
        rows = csv.reader(file.lines(stream), strict=True)
        try:
            header = next(rows, [])
            line = rows.line_num + 1  # a quoted field may span lines: the source of a row is its first line
            for row in rows:
                if row and len(row) != len(header):
                    raise file.error(f"{len(row)} fields, but the header has {len(header)}", line=line)
                if row:
                    yield Record(dict(zip(header, row, strict=True)), f"{file.name}:{line}")
                line = rows.line_num + 1
        except csv.Error as error:
            raise file.error(f"not CSV: {error}", line=rows.line_num) from error


def _read_text(file: DataFile) -> Iterator[Record]:
    """Read the file as one document in the column `text`, or as one for about every 2**20 characters."""
    pieces, length, begin = [], 0, 1
    with file.open() as stream:
        for line in file.lines(stream):
            pieces.append(line)
            length += len(line)
            if length >= _DOCUMENT:
                yield Record({"text": "".join(pieces)}, f"{file.name}:{begin}")
                pieces, length, begin = [], 0, file.line + 1
    if pieces:
        yield Record({"text": "".join(pieces)}, f"{file.name}:{begin}")


def _read_parquet(file: DataFile) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        source = str(file.path)
        if source.lower().endswith(".gz"):
            with file.open() as stream:  # a parquet file is read from its end, so all of it is decompressed first
                source = pyarrow.BufferReader(stream.read())
            file.row_share = 0.0
        content = parquet.ParquetFile(source)
        for batch in content.iter_batches(1000):
            for row in batch.to_pylist():
                file.line += 1
                yield Record(row, f"{file.name}:{file.line}")
            file.row_share = file.line / max(content.metadata.num_rows, 1)
    except gzip.BadGzipFile:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise file.error(f"not a valid parquet file: {str(error).partition(chr(10))[0].rstrip('.')}") from error


_READERS: dict[str, Callable[[DataFile], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".txt": _read_text,
}
FILE_TYPES = f"{', '.join(_READERS)}, each also with .gz appended"


def file_type(path: Path) -> str:
    """Return the ending of a file's name without .gz: ".jsonl" for a.jsonl.gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def reader_of(path: Path) -> Callable[[DataFile], Iterator[Record]] | None:
    """Return the reader for files of this type, or None for unknown types."""
    return _READERS.get(file_type(path))
