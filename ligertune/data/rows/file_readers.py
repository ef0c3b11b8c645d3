"""Readers of data files: json, jsonl, csv, tsv, parquet, arrow and txt, each also compressed, record by record.

Each record has its source, `file:line`, so that every error can name it. In a parquet or arrow file the line is the
number of the row, from 1. A record of more bytes than `max_bytes` has no columns, and its row is dropped.

JSON has four layouts, told apart by the content: a list of records; one record per line; records one after another,
each over several lines; and one object that has the list of records under one of its keys.

`datasets` (5.2) and pyarrow (26) make columns of one type: they add nulls for keys that a record lacks, turn the text
"1" into the number 1 if another record has a number there, and know no line of a record. pyarrow refuses a content that
is a text in one turn and a list in the next. Reading lines here takes as long as `json.loads` of each; a list of 105 MB
takes 6 MiB of memory, and 215 MiB with `json.load`.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import BufferedIOBase, StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from ligertune.data.rows.arrow_tables import read_arrow, read_parquet
from ligertune.data.rows.data_files import CHUNK, COMPRESSED, MAX_PASSED, CompressionError, DataFile, Record
from ligertune.data.shapes.column_names import ANSWER_NAMES, PROMPT_NAMES
from ligertune.data.shapes.turn_lists import ROLE_KEYS
from ligertune.errors import UserError, plural

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_SIGN = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_LONGEST_SIGN = 16  # characters of a JSON value that is neither string, list nor object, or of an escape
# keys that one record has, and lists that are part of one: an object with them does not hold other records
_RECORD_KEYS = {
    *PROMPT_NAMES, *ANSWER_NAMES, "messages", "conversations", "conversation", "dialogue", "dialog", "chosen",
    "rejected", "text", "thread",
}  # fmt: skip
_LISTS_IN_RECORDS = {"tools", "functions", "available_tools", "tool_calls", "history", "images", "chat", "turns"}
_SNIFFED = 1 << 16  # bytes of a csv file by which its delimiter is found
_DELIMITERS = (",", ";", "\t")
_SIGNATURES = {
    b"\x1f\x8b": "gzip (.gz)", b"\x28\xb5\x2f\xfd": "Zstandard (.zst)", b"PAR1": "parquet", b"ARROW1": "arrow",
    b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz",
}  # fmt: skip
_DOCUMENT = 1 << 20  # bytes of a text file that make one record; it ends at the next line break


def _read_json(file: DataFile) -> Iterator[Record]:
    """Read records in any of the four layouts. The content decides, not whether the name is .json or .jsonl."""
    layout, key = _json_layout(file)
    file.line = 0
    file.unparsed = 0.0
    file.row_share = 0.0
    with file.open() as stream:
        if layout == "lines":
            yield from _read_json_lines(file, stream)
        elif layout == "list":
            yield from _read_list(_JsonText(file, stream))
        elif key is None:
            yield from _read_objects(_JsonText(file, stream))
        else:
            yield from _read_member(_JsonText(file, stream), key)


def _json_layout(file: DataFile) -> tuple[str, str | None]:
    """Return the layout, "list", "lines" or "objects", and the key of the list of records in a single object."""
    with file.open() as stream:
        first = _next_line(stream, file).removeprefix(codecs.BOM_UTF8).lstrip()
        following = _next_line(stream, file) if first.endswith(b"\n") else b""
    if first.startswith(b"["):
        return "list", None
    if not first.startswith(b"{"):
        return "lines", None
    is_whole, rest = _parse_line(first)
    if is_whole and (following or rest):
        return "objects" if rest.startswith("{") else "lines", None
    is_too_long = len(first) > file.max_bytes and not first.endswith(b"\n")
    if not (is_whole or is_too_long or _is_beginning(first)):
        return "lines", None
    is_jsonl = file_type(file.path) == ".jsonl" and (is_too_long or _parse_line(following)[0])
    return _layout_of_objects(file, may_be_lines=is_jsonl, is_one_line=is_whole or is_too_long)


def _layout_of_objects(file: DataFile, *, may_be_lines: bool, is_one_line: bool) -> tuple[str, str | None]:
    """Return the layout of a file that begins with an object, and the key of its list of records.

    may_be_lines: the next line is a record, so that the error of the parser of lines is better than that of the object.
    """
    try:
        with file.open() as stream:
            key = _records_key(_JsonText(file, stream))
    except UserError:
        if not may_be_lines:
            raise
        return "lines", None
    if is_one_line and key is None:
        return "lines", None
    return "objects", key


def _next_line(stream: BufferedIOBase, file: DataFile) -> bytes:
    """Return the next line that is not blank, or its first `max_bytes` + 1 bytes."""
    while content := stream.readline(file.max_bytes + 1):
        if content.removeprefix(codecs.BOM_UTF8).strip():
            return content
    return b""


def _parse_line(line: bytes) -> tuple[bool, str]:
    """Return whether a line begins with a whole JSON object, and the text after it."""
    try:
        text = line.decode().strip()
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False, ""
    return isinstance(value, dict), text[end:].strip()


def _is_beginning(line: bytes) -> bool:
    """Return whether a line is the beginning of JSON that goes on in the next line: nothing in it is wrong."""
    text = line.decode("utf-8", "replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except (ValueError, RecursionError):
        return False
    return True


def _records_key(text: _JsonText) -> str | None:
    """Return the key of the list of records in a file that is one object; None if the object is itself a record."""
    text.next_character()
    firsts: dict[str, Any] = {}  # the first item of each list
    for key in _members(text):
        firsts[key] = None
        if text.next_character() != "[" or text.first_in_list() != "{":
            text.value()
            continue
        for number, (value, _, _) in enumerate(_elements(text)):
            if number == 0:
                firsts[key] = value
    lists = [key for key, first in firsts.items() if isinstance(first, dict) and key not in _LISTS_IN_RECORDS]
    is_record = any(key in _RECORD_KEYS for key in firsts) or any(_is_turn(firsts[key]) for key in lists)
    if is_record or not lists or text.next_character():
        return None
    if len(lists) > 1:
        raise text.file.error(
            f"one object with several lists of records: {', '.join(lists)}", "Write each to a separate file.", line=1
        )
    return lists[0]


def _is_turn(value: dict[str, Any]) -> bool:
    return any(isinstance(value.get(key), str) for key in ROLE_KEYS)


def _read_json_lines(file: DataFile, stream: BufferedIOBase) -> Iterator[Record]:
    n_blank = 0
    for line, n_bytes in file.lines(stream):
        n_blank = file.passed(n_blank + n_bytes) if line.isspace() else 0
        if n_bytes > file.max_bytes:
            yield file.record({}, file.line, n_bytes)
        elif not n_blank:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
                raise file.error(f"not JSON: {_json_error(error)}") from error
            yield _record(value, file, file.line, n_bytes)


class _JsonText:
    """The text of a JSON file from `at` on, decoded chunk by chunk. `file.line` is the line of `at`."""

    def __init__(self, file: DataFile, stream: BufferedIOBase) -> None:
        self.file = file
        self._stream = stream
        self._text = ""
        self._at = 0
        self._ended = False
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
        self._text = rest + text
        self._at = 0

    def _advance(self, place: int) -> None:
        self.file.line += self._text.count("\n", self._at, place)
        self._at = place

    def next_character(self, *, skip: int = 0) -> str:
        """Skip `skip` characters and white space, and return the next character; "" at the end of the file."""
        self._advance(self._at + skip)
        n_blank = 0
        while True:
            start = self._at
            self._advance(_end_of_space(self._text, self._at))
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            n_blank = self.file.passed(n_blank + self._at - start)
            self._read_more()

    def first_in_list(self) -> str:
        """Return the first character in the list that begins here, without advancing; "" at the end of the file."""
        while True:
            at = _end_of_space(self._text, self._at + len("["))
            if at < len(self._text) or self._ended:
                return self._text[at : at + 1]
            self._read_more()

    def value(self) -> tuple[Any, int]:
        """Parse the JSON value that begins here; return it and its length, without it if it is too large."""
        start = self._at
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
                # A number near the end of the text may go on in what is not read yet: "0." is read as 0.
                may_go_on = self._text[self._at] not in '"[{' and end + _LONGEST_SIGN > len(self._text)
                if self._ended or not may_go_on:
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
        depth = 0
        in_string = False
        n_bytes = 0
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


def _end_of_space(text: str, start: int) -> int:
    """Return the end of the white space of JSON at `start`."""
    space = _JSON_SPACE.match(text, start)
    assert space is not None  # the pattern also matches an empty text
    return space.end()


def _read_list(text: _JsonText) -> Iterator[Record]:
    """Read a JSON list element by element, so that each record has its line."""
    text.next_character()
    for value, n_bytes, line in _elements(text):
        yield _record(value, text.file, line, n_bytes)
    if text.next_character():
        raise text.file.error("there is text after the end of the list", "Write one record per line, or one list.")


def _read_objects(text: _JsonText) -> Iterator[Record]:
    """Read objects that follow each other."""
    while text.next_character():
        line = text.file.line
        value, n_bytes = text.value()
        yield _record(value, text.file, line, n_bytes)


def _read_member(text: _JsonText, key: str) -> Iterator[Record]:
    """Read the list under `key` of an object."""
    text.next_character()
    for found in _members(text):
        if found != key:
            text.value()
            continue
        for value, n_bytes, line in _elements(text):
            yield _record(value, text.file, line, n_bytes)


def _elements(text: _JsonText) -> Iterator[tuple[Any, int, int]]:
    """Yield (value, bytes, line) of each element of the list that begins here."""
    file = text.file
    skip = len("[")
    while (following := text.next_character(skip=skip)) != "]":
        if not following:
            raise file.error("the list is not closed: the file is cut off")
        line = file.line
        value, n_bytes = text.value()
        yield value, n_bytes, line
        following = text.next_character()
        if following not in (",", "]", ""):
            raise file.error("not JSON: no comma between two records")
        skip = int(following == ",")
    text.next_character(skip=len("]"))


def _members(text: _JsonText) -> Iterator[str]:
    """Yield the key of each member of the object that begins here. The caller reads the value before the next one."""
    file = text.file
    following = text.next_character(skip=len("{"))
    while following != "}":
        if not following:
            raise file.error("the object is not closed: the file is cut off")
        key, _ = text.value() if following == '"' else ("", 0)
        if following != '"' or text.next_character() != ":":
            raise file.error("not JSON: expecting a name and a colon")
        text.next_character(skip=len(":"))
        yield key
        following = text.next_character()
        if following not in (",", "}", ""):
            raise file.error("not JSON: no comma between two members of the object")
        if following == ",":
            following = text.next_character(skip=1)
    text.next_character(skip=len("}"))


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
    if isinstance(value.get("data"), list) and isinstance(value.get("columns"), list):
        raise file.error(
            "a table of pandas with orient='split', whose rows have no names",
            "Write it with to_json(orient='records', lines=True).",
            line=line,
        )
    return file.record(value, line, n_bytes)


def _read_csv(file: DataFile) -> Iterator[Record]:
    csv.field_size_limit(file.max_bytes)  # the default, 131,072 characters, is less than one long conversation
    delimiter = "\t" if file_type(file.path) == ".tsv" else _delimiter(file)
    with file.open() as stream:
        rows = csv.reader(_csv_lines(file, stream), strict=True, delimiter=delimiter)
        line = 1
        try:
            header = next(rows, [])
            _check_header(header, file)
            line = rows.line_num + 1  # a quoted field may span lines: the source of a row is its first line
            for row in rows:
                if row and len(row) != len(header):
                    raise file.error(f"{plural(len(row), 'field')}, but the header has {len(header)}", line=line)
                if row:
                    yield file.record(dict(zip(header, row, strict=True)), line, sum(map(len, row)))
                line = rows.line_num + 1
        except csv.Error as error:
            too_large = "field limit" in str(error)  # most likely a quote that is not closed: name the row's first line
            raise file.error(f"not CSV: {error}", line=line if too_large else rows.line_num) from error


def _check_header(header: Sequence[str], file: DataFile) -> None:
    if header and header[0].lstrip().startswith(("{", "[")):
        raise file.error("the header is JSON", "Name the file .jsonl.")
    if len(set(header)) < len(header):
        double = next(name for name in header if header.count(name) > 1)
        raise file.error(f"two columns have the name `{double}`", "Rename one.")


def _delimiter(file: DataFile) -> str:
    """Return the delimiter that divides the header and the first rows into equally many fields, the most of them."""
    content = file.first_bytes(_SNIFFED).decode("utf-8", "replace")
    found = [((False, 1), _DELIMITERS[0])]
    for delimiter in _DELIMITERS:
        with contextlib.suppress(csv.Error):
            rows = [row for row in islice(csv.reader(StringIO(content, newline=""), delimiter=delimiter), 20) if row]
            widths = {len(row) for row in rows[:-1] or rows}  # the last one may be cut off
            found += [((len(widths) == 1, len(row)), delimiter) for row in rows[:1] if len(row) > 1]
    return max(found, key=lambda each: each[0])[1]


def _csv_lines(file: DataFile, stream: BufferedIOBase) -> Iterator[str]:
    for line, n_bytes in file.lines(stream):
        if n_bytes > file.max_bytes:  # where its row ends is not known
            raise file.error(f"a line of {n_bytes:,} bytes", "Raise data.max_record_bytes, or remove the row.")
        yield line


def _read_text(file: DataFile) -> Iterator[Record]:
    """Read the file as one document in the column `text`, or as one for about every 2**20 characters."""
    pieces = []
    length = 0
    begin = 1
    with file.open() as stream:
        for line, n_bytes in file.lines(stream):
            pieces.append(line.replace("\r\n", "\n"))  # as Windows ends lines; a model would learn to write both
            length += n_bytes
            if length >= min(_DOCUMENT, file.max_bytes) or n_bytes > file.max_bytes:
                yield file.record({"text": "".join(pieces)}, begin, length)
                pieces = []
                length = 0
                begin = file.line + 1
    if pieces:
        yield file.record({"text": "".join(pieces)}, begin, length)


_READERS: dict[str, Callable[[DataFile], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_text,
    ".md": _read_text,
}
READABLE = tuple(_READERS)
FILE_TYPES = f"{', '.join(READABLE)}, each also with {' or '.join(COMPRESSED)} appended"


def file_type(path: Path) -> str:
    """Return the ending of a file's name without that of a compression: ".jsonl" for a.jsonl.gz."""
    name = path.name.lower()
    return Path(Path(name).stem if name.endswith(COMPRESSED) else name).suffix


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
        if reader not in (read_parquet, read_arrow):
            _check_is_text(file)
        yield from reader(file)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise file.error(f"not a valid gzip file: {error}") from error
    except EOFError as error:
        raise file.error("the gzip file is cut off: its end is missing") from error
    except CompressionError as error:
        raise file.error(str(error)) from error
    except OSError as error:
        raise UserError(f"{file.name} cannot be read: {error.strerror or error}.") from error


def _check_is_text(file: DataFile) -> None:
    """Raise UserError for a file of another type than its name says."""
    content = file.first_bytes(CHUNK)  # so many, because a short compressed file that is cut off ends here
    for signature, kind in _SIGNATURES.items():
        if content.startswith(signature):
            raise file.error(f"the content is {kind}, and the name says {file_type(file.path)}", "Rename the file.")
