"""Data files: a file while it is read, its lines in bounded memory, and its records with their `file:line`.

Lines end at "\\n" only: a U+2028 inside a JSON string does not end one. A line of more bytes than `max_bytes` is passed
over, so that neither a line of 100 MB nor a small file that decompresses to one fills the memory.
"""

from __future__ import annotations

import codecs
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ligertune.errors import UserError

MAX_RECORD_BYTES = 2**24  # default of data.max_record_bytes
MAX_PASSED = 2**30  # bytes of a record that are read to find its end; compressed, they can be a small file
CHUNK = 1 << 20  # bytes that are read at once
COMPRESSED = (".gz", ".zst")


class CompressionError(Exception):
    """A compressed file that is damaged or cut off."""


class Record(NamedTuple):
    """One row as the data set has it, and its `file:line`. Without its columns if it is too large: then its bytes."""

    row: dict[str, Any]
    source: str
    too_large: int = 0


class DataFile:
    """A data file while it is read: its current line, and the share of its bytes that was read."""

    def __init__(self, path: Path, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.name = display_path(path)
        self.line = 0
        self.size = max(path.stat().st_size, 1)
        self.unparsed = 0.0  # share of the decoded text that is not parsed yet
        self.row_share = 0.0  # of formats that are read by rows, not by bytes
        self._raw: io.BufferedReader | None = None

    @property
    def share(self) -> float:
        """The share of the file that was read, from 0 to 1."""
        if self._raw is None or self._raw.closed:
            return self.row_share
        return self._raw.tell() / self.size * (1 - self.unparsed)

    @property
    def is_compressed(self) -> bool:
        """Whether the name says that the file is compressed."""
        return self.path.suffix.lower() in COMPRESSED

    @contextmanager
    def open(self) -> Iterator[io.BufferedIOBase]:
        """Open the file as bytes, decompressed."""
        with self.path.open("rb") as raw:
            self._raw = raw
            kind = self.path.suffix.lower()
            if kind == ".gz":
                with gzip.GzipFile(fileobj=raw) as unzipped:
                    yield unzipped
            elif kind == ".zst":
                with _zstandard(raw) as decompressed:
                    yield decompressed
            else:
                yield raw
            self.row_share = 1.0

    def first_bytes(self, count: int) -> bytes:
        """Return the first bytes, decompressed, without a byte order mark. Nothing counts as read."""
        with self.open() as stream:
            content = stream.read(count)
        self.row_share = 0.0
        return content.removeprefix(codecs.BOM_UTF8)

    def lines(self, stream: io.BufferedIOBase) -> Iterator[tuple[str, int]]:
        """Yield (text of a line with its "\\n", bytes), without a byte order mark before the first.

        The text of a line of more than `max_bytes` is empty.
        """
        offset = 0
        while content := stream.readline(self.max_bytes + 1):
            self.line += 1
            if len(content) > self.max_bytes:
                n_bytes = len(content) + (0 if content.endswith(b"\n") else self._pass_line(stream))
                yield "", n_bytes
                offset += n_bytes
                continue
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                is_utf16 = offset == 0 and content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                raise self.error(
                    f"byte 0x{content[error.start]:02x} at offset {offset + error.start} is not UTF-8",
                    f"Save the file as UTF-8; it looks like {'UTF-16' if is_utf16 else 'Windows-1252 or Latin-1'}.",
                ) from error
            yield text.removeprefix("\ufeff") if offset == 0 else text, len(content)
            offset += len(content)

    def _pass_line(self, stream: io.BufferedIOBase) -> int:
        """Read to the end of the line; return the number of bytes."""
        n_bytes = 0
        while content := stream.readline(CHUNK):
            n_bytes = self.passed(n_bytes + len(content))
            if content.endswith(b"\n"):
                break
        return n_bytes

    def passed(self, n_bytes: int) -> int:
        """Return `n_bytes` of a record that is passed over. Raises UserError where its end is not worth looking for."""
        if n_bytes > MAX_PASSED:
            raise self.error(f"a record of more than {MAX_PASSED:,} bytes", "The file holds no records, or is damaged.")
        return n_bytes

    def record(self, row: dict[str, Any], line: int, n_bytes: int) -> Record:
        """Return the record of this line."""
        too_large = n_bytes if n_bytes > self.max_bytes else 0
        return Record({} if too_large else row, f"{self.name}:{line}", too_large)

    def error(self, what: str, hint: str = "", *, line: int | None = None) -> UserError:
        """Return an error at `line`, or at the current line."""
        return UserError(f"{self.name}:{max(self.line if line is None else line, 1)}: {what}.", hint=hint)


@contextmanager
def _zstandard(raw: BinaryIO) -> Iterator[io.BufferedReader]:
    """Decompress a Zstandard file with pyarrow, in bounded memory. Raises CompressionError while it is read."""
    import pyarrow

    # pyarrow's own stream has no readline
    try:
        with io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), CHUNK) as decompressed:
            yield decompressed
    except OSError as error:
        if error.errno:  # of the disk
            raise
        is_cut = "Truncated" in str(error)
        reason = "the zst file is cut off: its end is missing" if is_cut else f"not a valid zst file: {error}"
        raise CompressionError(reason) from error


def display_path(path: Path) -> str:
    """Return the path relative to the current folder if the file is below it, else as it is."""
    found = path.resolve()
    here = Path.cwd()
    return str(found.relative_to(here) if found.is_relative_to(here) else path)


def n_bytes_of(value: Any) -> int:
    """Return the characters and bytes that a row of columns holds."""
    if isinstance(value, str | bytes):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(n_bytes_of, inner))
