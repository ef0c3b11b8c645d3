"""Readers of data files: json, jsonl, csv, parquet, arrow and txt, each also compressed, record by record.

Each record has its source, `file:line`, so that every error can name it. In parquet and Arrow files the line is the
number of the row, from 1. A record of more bytes than `max_bytes` has no columns, and its row is dropped.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ligertune.data.rows.arrow_files import read_arrow, read_parquet
from ligertune.data.rows.data_files import CHUNK, MAX_PASSED, DataFile, Record, file_type
from ligertune.errors import UserError

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_SIGN = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_LONGEST_SIGN = 16  # characters of a JSON value that is neither string, list nor object, or of an escape
_LONGEST_BEGIN = 1 << 16  # bytes in which an object of a whole data set names its list of records
_DOCUMENT = 1 << 20  # bytes of a text file that make one record; it ends at the next line break


# Keys of an object that holds a whole data set: its list of objects are the records.
_RECORD_KEYS = ("data", "rows", "records", "examples", "instances", "items", "samples", "train")


def _read_json(file: DataFile) -> Iterator[Record]:
    """Read the records of a JSON file; the content decides how, not whether the name is .json or .jsonl.

    It holds a list of objects, one object per line, objects over several lines, or one object with a list of records.
    """
    layout = _json_layout(file)
    file.line = 0
    with file.open() as stream:
        if layout == "lines":
            yield from _read_json_lines(file, stream)
        else:
            text = _JsonText(file, stream)
            yield from _read_list(text) if layout == "list" else _read_objects(text)


def _json_layout(file: DataFile) -> Literal["list", "lines", "objects"]:
    """Return how records are laid out, from the first line that is not empty and whether another follows."""
    with file.open() as stream:
        lines = ((line, n_bytes) for line, n_bytes in file.lines(stream) if n_bytes > file.max_bytes or line.strip())
        line, n_bytes = next(lines, ("", 0))
        if line.lstrip().startswith("["):
            return "list"
        if not line:  # no line, or one that is too long to parse
            return "objects" if n_bytes and _starts_as_data_set(file) else "lines"
        try:
            first = json.loads(line)
        except json.JSONDecodeError as error:
            return "objects" if line.lstrip().startswith("{") and error.pos >= len(line.rstrip()) else "lines"
        except (ValueError, RecursionError):  # reading the line raises it again
            return "lines"
        holds_records = isinstance(first, dict) and any(_are_records(first.get(key)) for key in _RECORD_KEYS)
        return "objects" if holds_records and next(lines, None) is None else "lines"


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _starts_as_data_set(file: DataFile) -> bool:
    """Return whether a first line of more than `max_bytes` begins as an object that holds a list of records."""
    with file.open() as stream:
        begin = stream.read(_LONGEST_BEGIN)
    return re.search(rb'"(?:%s)"\s*:\s*\[\s*\{' % "|".join(_RECORD_KEYS).encode(), begin) is not None


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

    def character_after_bracket(self) -> str:
        """Return the first character in the list that begins here, without advancing; "" at the end of the file."""
        while not (following := self._text[self._at + 1 :].lstrip(" \t\n\r")[:1]) and not self._ended:
            self._read_more()
        return following

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
    text.next_character()
    yield from _elements(text)
    if text.next_character():
        raise text.file.error("there is text after the end of the list")


def _elements(text: _JsonText) -> Iterator[Record]:
    """Read the elements of the list that begins here, and its end."""
    file, skip = text.file, len("[")
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
    text.next_character(skip=len("]"))


def _read_objects(text: _JsonText) -> Iterator[Record]:
    """Read objects over several lines. The first may be a whole data set, with its records in a list."""
    file = text.file
    text.next_character()
    found = yield from _read_first_object(text)
    while text.next_character():
        if found:
            raise file.error(f"there is text after the end of the object whose `{found}` holds the records")
        line = file.line
        value, n_bytes = text.value()
        yield _record(value, file, line, n_bytes)


def _read_first_object(text: _JsonText) -> Generator[Record, None, str]:
    """Read an object key by key. Return the key whose list held its records; "" if the object is a record itself."""
    file, begin, skip = text.file, text.file.line, len("{")
    row: dict[str, Any] = {}
    size, found = 0, ""
    while (following := text.next_character(skip=skip)) != "}":
        key, n_bytes = text.value() if following == '"' else (None, 0)
        if key is None or text.next_character() != ":":
            raise file.error("not JSON: an object is cut off or has no key here")
        holds_records = text.next_character(skip=len(":")) == "[" and key in _RECORD_KEYS and not found
        if holds_records and text.character_after_bracket() == "{":
            yield from _elements(text)
            found = key
        else:
            row[key], of_value = text.value()
            size += n_bytes + of_value
        following = text.next_character()
        if following not in (",", "}"):
            raise file.error("not JSON: an object is cut off or has no comma between two keys")
        skip = int(following == ",")
    text.next_character(skip=len("}"))
    if not found:
        yield _record(row, file, begin, size)
    return found


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
    delimiter = "\t" if file.type == ".tsv" else _csv_delimiter(file)
    file.line = 0
    with file.open() as stream:
        rows, line = csv.reader(_csv_lines(file, stream), strict=True, delimiter=delimiter), 1
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


def _csv_delimiter(file: DataFile) -> str:
    """Return the delimiter that gives the header most columns: a comma, a semicolon (many spreadsheets), or a tab."""
    counts = {}
    with file.open() as stream:
        header = next((line for line, _ in file.lines(stream)), "")
    for delimiter in (",", ";", "\t"):
        try:
            counts[delimiter] = len(next(csv.reader([header], delimiter=delimiter), []))
        except csv.Error:
            counts[delimiter] = 1
    return max(counts, key=counts.get)


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


READERS: dict[str, Callable[[DataFile], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
}
FILE_TYPES = f"{', '.join(READERS)}, each also with .gz or .zst appended"


def reader_of(path: Path) -> Callable[[DataFile], Iterator[Record]] | None:
    """Return the reader for files of this type, or None for unknown types."""
    return READERS.get(file_type(path))


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
        if file.compression == "zstd" and error.errno is None:  # of pyarrow, not of the system
            raise file.error(f"not a valid zstd file: {str(error).rstrip('.')}") from error
        raise UserError(f"{file.name} cannot be read: {error.strerror or error}.") from error
