"""Data files, read record by record in little memory: json, jsonl, csv, parquet and txt, each also packed by gzip.

A record knows its place, `file:line`, so that every complaint can name it. Lines end at "\\n" only: a U+2028 inside a
JSON string splits nothing. In a parquet file the place is the number of the row, from 1.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ligertune.errors import UserError

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_CHUNK = 1 << 20  # bytes of a JSON list that are looked at together
_DOCUMENT = 1 << 20  # characters after which a text file goes on as another document, at the end of a line


class Record(NamedTuple):
    """One row as it stands in its source, and where that is."""

    row: dict[str, Any]
    source: str


class DataFile:
    """A file while it is read: `line` is the line that was reached, `share` how much of its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = display_path(path)
        self.line = 0
        self.size = max(path.stat().st_size, 1)
        self._raw: BinaryIO | None = None
        self._row_share = 0.0
        self.ahead = 0.0  # the part of what was read that was not looked at yet

    @property
    def share(self) -> float:
        if self._raw is None or self._raw.closed:
            return self._row_share
        return self._raw.tell() / self.size * (1 - self.ahead)

    def records(self) -> Iterator[Record]:
        """The records, by the file's ending; an ending `.gz` is unpacked on the way."""
        reader = reader_of(self.path)
        if reader is None:
            raise UserError(f"{self.where}: not a kind of data file that is known.", hint=f"Known: {FILE_TYPES}.")
        try:
            yield from reader(self)
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise self.flaw(f"not a sound gzip file: {error}") from error
            raise UserError(f"{self.where} cannot be read: {error.strerror or error}.") from error
        except EOFError as error:
            raise self.flaw("the gzip file is cut off: its end is missing") from error
        except zlib.error as error:
            raise self.flaw(f"not a sound gzip file: {error}") from error

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The unpacked bytes."""
        with self.path.open("rb") as raw:
            self._raw = raw
            if self.path.name.lower().endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield unpacked
            else:
                yield raw
            self._row_share = 1.0

    def lines(self, stream: BinaryIO) -> Iterator[str]:
        """Its lines as text, each with its "\\n"; without the byte order mark that some editors put first."""
        offset = 0
        for content in stream:
            self.line += 1
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                raise self.encoding_flaw(content[error.start], offset + error.start, content) from error
            yield text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(content)

    def reached(self, share: float) -> None:
        """For readers that do not go through `opened`."""
        self._row_share = share

    def flaw(self, what: str, hint: str = "", *, line: int | None = None) -> UserError:
        """A complaint of the line that was reached, or of another."""
        number = self.line if line is None else line
        return UserError(f"{self.where}:{max(number, 1)}: {what}.", hint=hint)

    def encoding_flaw(self, byte: int, offset: int, content: bytes, *, line: int | None = None) -> UserError:
        """A complaint of a byte that is not UTF-8, with a guess at what it is."""
        wide = offset < 2 and content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        guess = "UTF-16" if wide else "Windows-1252 or Latin-1"
        return self.flaw(
            f"byte 0x{byte:02x} at offset {offset} is not UTF-8",
            f"Save the file as UTF-8; it looks like {guess}.",
            line=line,
        )


def read_file(path: Path) -> Iterator[Record]:
    """The records of one file."""
    return DataFile(path).records()


def display_path(path: Path) -> str:
    """The path as a person here would write it: relative, if the file lies below the current folder."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _read_json(file: DataFile) -> Iterator[Record]:
    """A list of objects, or one object a line, whichever of the two names the file bears."""
    with file.opened() as stream:
        first = _first_bytes(stream)
    with file.opened() as stream:
        yield from (_read_list if first.startswith(b"[") else _read_lines)(file, stream)


def _first_bytes(stream: BinaryIO) -> bytes:
    """Some of the file from its first character on that is no white space."""
    content = stream.read(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip()
    while not content and (more := stream.read(_CHUNK)):
        content = more.lstrip()
    return content


def _read_lines(file: DataFile, stream: BinaryIO) -> Iterator[Record]:
    for line in file.lines(stream):
        if not line.isspace():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
                raise file.flaw(f"not JSON: {_flaw(error)}") from error
            yield _record(value, file, file.line)


class _Text:
    """The text of a file from some place on, decoded as far as it was needed."""

    def __init__(self, file: DataFile, stream: BinaryIO) -> None:
        self.file, self.stream = file, stream
        self.text, self.at, self.ended = "", 0, False
        self._line, self._counted = 1, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._bytes, self._newlines, self._characters = 0, 0, 0

    @property
    def line(self) -> int:
        """The line of the place that was reached."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        self.file.line = self._line
        return self._line

    def line_of(self, place: int) -> int:
        """The line of a place further on."""
        return self.line + self.text.count("\n", self.at, place)

    def more(self) -> None:
        """Reads on, at least twice as much as is still to be looked at; what lies behind is forgotten."""
        _ = self.line
        rest = self.text[self.at :]
        content = self.stream.read(max(_CHUNK, len(rest)))
        self._bytes, self._newlines = self._bytes + len(content), self._newlines + content.count(b"\n")
        self.ended = not content
        try:
            text = self._decoder.decode(content, self.ended)
        except UnicodeDecodeError as error:
            offset = self._bytes - len(error.object) + error.start
            line = self._newlines - error.object.count(b"\n", error.start) + 1
            raise self.file.encoding_flaw(error.object[error.start], offset, error.object, line=line) from error
        self._characters += len(text)
        self.text, self.at, self._counted = rest + text, 0, 0

    def skip_space(self) -> str:
        """Goes to the next character that is no white space; "" at the end."""
        while True:
            self.at = _JSON_SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def value(self) -> Any:
        """The JSON value that begins here; goes behind it."""
        while True:
            try:
                value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
                self.file.ahead = (len(self.text) - self.at) / self._characters
                return value
            except (ValueError, RecursionError) as error:
                if self.ended or not isinstance(error, json.JSONDecodeError):
                    place = error.pos if isinstance(error, json.JSONDecodeError) else self.at
                    raise self.file.flaw(f"not JSON: {_flaw(error)}", line=self.line_of(place)) from error
            self.more()


def _read_list(file: DataFile, stream: BinaryIO) -> Iterator[Record]:
    """The elements of a JSON list, decoded one by one so that each has its line."""
    text = _Text(file, stream)
    text.skip_space()
    text.at += 1  # the bracket
    while (following := text.skip_space()) != "]":
        if not following:
            raise file.flaw("the list is not closed: the file is cut off", line=text.line)
        line = text.line
        yield _record(text.value(), file, line)
        following = text.skip_space()
        if following == ",":
            text.at += 1
        elif following not in ("]", ""):
            raise file.flaw("not JSON: no comma between two records", line=text.line)
    text.at += 1
    if text.skip_space():
        raise file.flaw("there is text behind the end of the list", line=text.line)


def _flaw(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[0].lower()}{error.msg[1:]} (column {error.colno})"
    return str(error).partition(";")[0].lower()


def _record(value: Any, file: DataFile, line: int) -> Record:
    if not isinstance(value, dict):
        raise file.flaw(
            f"expected an object with named columns, found {_kind_of(value)}",
            'A record looks like {"instruction": "...", "output": "..."}.',
            line=line,
        )
    return Record(value, f"{file.where}:{line}")


def _kind_of(value: Any) -> str:
    names = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "null")


def _read_csv(file: DataFile) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is less than one long conversation
    with file.opened() as stream:
        rows = csv.reader(file.lines(stream), strict=True)
        try:
            header = next(rows, [])
            line = rows.line_num + 1  # a quoted field may span lines: a row is named by its first
            for row in rows:
                if row and len(row) != len(header):
                    raise file.flaw(f"{len(row)} fields, but the header has {len(header)}", line=line)
                if row:
                    yield Record(dict(zip(header, row, strict=True)), f"{file.where}:{line}")
                line = rows.line_num + 1
        except csv.Error as error:
            raise file.flaw(f"not CSV: {error}", line=rows.line_num) from error


def _read_text(file: DataFile) -> Iterator[Record]:
    """The whole file as one document in the column `text`, or one after each 2**20 characters or so."""
    pieces, length, begin = [], 0, 1
    with file.opened() as stream:
        for line in file.lines(stream):
            pieces.append(line)
            length += len(line)
            if length >= _DOCUMENT:
                yield Record({"text": "".join(pieces)}, f"{file.where}:{begin}")
                pieces, length, begin = [], 0, file.line + 1
    if pieces:
        yield Record({"text": "".join(pieces)}, f"{file.where}:{begin}")


def _read_parquet(file: DataFile) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        if file.path.name.lower().endswith(".gz"):  # parquet is read from its end: it must be unpacked as a whole
            with file.opened() as stream:
                source = pyarrow.BufferReader(stream.read())
        else:
            source = str(file.path)
        content = parquet.ParquetFile(source)
        total = max(content.metadata.num_rows, 1)
        for batch in content.iter_batches(1000):
            for row in batch.to_pylist():
                file.line += 1
                yield Record(row, f"{file.where}:{file.line}")
            file.reached(file.line / total)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, gzip.BadGzipFile):
            raise
        raise file.flaw(f"not a sound parquet file: {str(error).partition(chr(10))[0].rstrip('.')}") from error


_READERS: dict[str, Callable[[DataFile], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".txt": _read_text,
}
FILE_TYPES = f"{', '.join(_READERS)}, each also with .gz behind it"


def file_type(path: Path) -> str:
    """The kind of a file by its name: ".jsonl" of a.jsonl.gz."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def reader_of(path: Path) -> Callable[[DataFile], Iterator[Record]] | None:
    """What reads files of this kind."""
    return _READERS.get(file_type(path))
