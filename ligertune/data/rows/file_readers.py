"""Readers of data files: json, jsonl, csv, parquet and txt, each also gzip-compressed, record by record.

Each record has its source, `file:line`, so that every error can name it. In a parquet file the line is the number of
the row, from 1. A record of more bytes than `max_bytes` has no columns, and its row is dropped.
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
from pathlib import Path
from typing import Any, BinaryIO

from ligertune.data.rows.data_files import CHUNK, MAX_PASSED, DataFile, Record, n_bytes_of
from ligertune.errors import UserError

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_SIGN = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_LONGEST_SIGN = 16  # characters of a JSON value that is neither string, list nor object, or of an escape
_DOCUMENT = 1 << 20  # bytes of a text file that make one record; it ends at the next line break


def _read_json(file: DataFile) -> Iterator[Record]:
    """Read a list of objects or one object per line. The content decides, not whether the name is .json or .jsonl."""
    with file.open() as stream:
        first = b""
        while not first and (content := stream.read(CHUNK)):
            first = content.removeprefix(codecs.BOM_UTF8).lstrip()
        stream.seek(0)
        yield from _read_list(_JsonText(file, stream)) if first.startswith(b"[") else _read_json_lines(file, stream)


def _read_json_lines(file: DataFile, stream: BinaryIO) -> Iterator[Record]:
    for line, n_bytes in file.lines(stream):
        if n_bytes > file.max_bytes:
            yield file.record({}, file.line, n_bytes)
        elif not line.isspace():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
                raise file.error(f"not JSON: {_json_error(error)}") from error
            yield _record(value, file, file.line, n_bytes)


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
        content = self._stream.read(max(CHUNK, len(rest)))
        self._ended = not content
        try:
            text = self._decoder.decode(content, self._ended)
        except UnicodeDecodeError as error:
            again = DataFile(self.file.path, MAX_PASSED)
            with again.open() as stream:  # reading by lines raises the error with its line and offset
                deque(again.lines(stream), maxlen=0)
            raise self.file.error("not UTF-8") from error
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

    def value(self) -> tuple[Any, int]:
        """Parse the JSON value that begins here; return it and its length, without it if it is too large."""
        start = self._at
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                break
            except (ValueError, RecursionError) as error:
                if self._ended or not self._may_be_cut_off(error):
                    line = self.file.line + self._text.count("\n", self._at, getattr(error, "pos", self._at))
                    raise self.file.error(f"not JSON: {_json_error(error)}", line=line) from error
            if len(self._text) - self._at > self.file.max_bytes:
                return {}, self._pass_value()
            self._read_more()
            start = self._at
        n_bytes = end - start
        if n_bytes > self.file.max_bytes // 4:  # a character has up to four bytes
            n_bytes = len(self._text[start:end].encode("utf-8", "surrogatepass"))
        self._advance(end)
        self.file.unparsed = (len(self._text) - end) / self._decoded
        return value, n_bytes

    def _may_be_cut_off(self, error: Exception) -> bool:
        """Report whether an error may be due to a value that goes on in the text that is not read yet."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _LONGEST_SIGN

    def _pass_value(self) -> int:
        """Read to the end of the object, list or string that begins here; return about its number of bytes."""
        depth, in_string, n_bytes = 0, False, 0
        while True:
            for sign in _JSON_SIGN.finditer(self._text, self._at):
                if sign[0] == '"':
                    in_string = not in_string
                elif not in_string and len(sign[0]) == 1:
                    depth += 1 if sign[0] in "{[" else -1
                if depth <= 0 and not in_string:
                    n_bytes += sign.end() - self._at
                    self._advance(sign.end())
                    return n_bytes
            if self._ended:
                raise self.file.error("not JSON: a record has no end")
            end = len(self._text) - self._text.endswith("\\")  # whose escaped character is not read yet
            n_bytes = self.file.passed(n_bytes + end - self._at)
            self._advance(end)
            self._read_more()


def _read_list(text: _JsonText) -> Iterator[Record]:
    """Read a JSON list element by element, so that each record has its line."""
    file, skip = text.file, len("[")
    text.next_character()
    while (following := text.next_character(skip=skip)) != "]":
        if not following:
            raise file.error("the list is not closed: the file is cut off")
        line = file.line
        value, n_bytes = text.value()
        yield _record(value, file, line, n_bytes)
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


def _record(value: Any, file: DataFile, line: int, n_bytes: int) -> Record:
    if not isinstance(value, dict):
        names = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list"}
        raise file.error(
            f"expected an object with named columns, found {names.get(type(value), 'null')}",
            'A record looks like {"instruction": "...", "output": "..."}.',
            line=line,
        )
    return file.record(value, line, n_bytes)


def _read_csv(file: DataFile) -> Iterator[Record]:
    csv.field_size_limit(file.max_bytes)  # the default, 131,072 characters, is less than one long conversation
    with file.open() as stream:
        rows, line = csv.reader(_csv_lines(file, stream), strict=True), 1
        try:
            header = next(rows, [])
            line = rows.line_num + 1  # a quoted field may span lines: the source of a row is its first line
            for row in rows:
                if row and len(row) != len(header):
                    raise file.error(f"{len(row)} fields, but the header has {len(header)}", line=line)
                if row:
                    yield file.record(dict(zip(header, row, strict=True)), line, sum(map(len, row)))
                line = rows.line_num + 1
        except csv.Error as error:
            too_large = "field limit" in str(error)  # most likely a quote that is not closed: name the row's first line
            raise file.error(f"not CSV: {error}", line=line if too_large else rows.line_num) from error


def _csv_lines(file: DataFile, stream: BinaryIO) -> Iterator[str]:
    for line, n_bytes in file.lines(stream):
        if n_bytes > file.max_bytes:  # where its row ends is not known
            raise file.error(f"a line of {n_bytes:,} bytes", "Raise data.max_record_bytes, or remove the row.")
        yield line


def _read_text(file: DataFile) -> Iterator[Record]:
    """Read the file as one document in the column `text`, or as one for about every 2**20 characters."""
    pieces, length, begin = [], 0, 1
    with file.open() as stream:
        for line, n_bytes in file.lines(stream):
            pieces.append(line)
            length += n_bytes
            if length >= min(_DOCUMENT, file.max_bytes) or n_bytes > file.max_bytes:
                yield file.record({"text": "".join(pieces)}, begin, length)
                pieces, length, begin = [], 0, file.line + 1
    if pieces:
        yield file.record({"text": "".join(pieces)}, begin, length)


def _read_parquet(file: DataFile) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        source = str(file.path)
        if source.lower().endswith(".gz"):
            with file.open() as stream:  # a parquet file is read from its end, so all of it is decompressed first
                decompressed = stream.read(MAX_PASSED + 1)
            if len(decompressed) > MAX_PASSED:
                raise file.error(f"more than {MAX_PASSED:,} bytes when decompressed", "Decompress it: gunzip FILE.")
            source = pyarrow.BufferReader(decompressed)
            file.row_share = 0.0
        content = parquet.ParquetFile(source)
        stored = sum(content.metadata.row_group(i).total_byte_size for i in range(content.metadata.num_row_groups))
        rows_at_once = max(1, min(1000, MAX_PASSED // 8 * content.metadata.num_rows // max(stored, 1)))
        for batch in content.iter_batches(rows_at_once):
            for row in batch.to_pylist():
                file.line += 1
                yield file.record(row, file.line, n_bytes_of(row))
            file.row_share = file.line / max(content.metadata.num_rows, 1)
    except gzip.BadGzipFile:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
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


def read_records(file: DataFile) -> Iterator[Record]:
    """Yield the records. The ending of the file's name selects the reader.

    Raises UserError with the line for a file that cannot be read or parsed.
    """
    reader = reader_of(file.path)
    if reader is None:
        raise UserError(f"{file.name}: this kind of data file is unknown.", hint=f"Known: {FILE_TYPES}.")
    try:
        yield from reader(file)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise file.error(f"not a valid gzip file: {error}") from error
    except EOFError as error:
        raise file.error("the gzip file is cut off: its end is missing") from error
    except OSError as error:
        raise UserError(f"{file.name} cannot be read: {error.strerror or error}.") from error
