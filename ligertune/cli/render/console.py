"""Terminal output: text, tables, live lines and JSON. With `--json`, stdout holds the JSON report and nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from textwrap import TextWrapper
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from ligertune.errors import UserError, printable
from ligertune.files.hub import hub_notes as notes_of_hub
from ligertune.files.storage import finite
from ligertune.launcher.signals import leave_closed_terminal

# what json.dumps leaves as it is, and `printable` does not: escaped as JSON does it
_OBEYED = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class _Output:
    """The console for human-readable output: stdout, or stderr with `--json`."""

    def __init__(self) -> None:
        self.go_to(stderr=False)

    def go_to(self, *, stderr: bool) -> None:
        stream = sys.stderr if stderr else sys.stdout
        # a file has no width, and rich would assume a window of 80 columns
        width = None if stream.isatty() or "COLUMNS" in os.environ else 160
        self.console = Console(stderr=stderr, highlight=False, soft_wrap=True, width=width)


OUTPUT = _Output()


def people_on_stderr(json_wanted: bool) -> None:
    """Send human-readable output to stderr if the command prints a JSON report."""
    OUTPUT.go_to(stderr=json_wanted)


def text(message: str = "") -> None:
    """Print a line, without interpreting markup. A terminal that is gone does not stop the command."""
    _print_line(Text(printable(message)))


def _print_line(line: Text) -> None:
    try:
        OUTPUT.console.print(line)
    except OSError as problem:
        if problem.errno != errno.EIO:
            raise
        leave_closed_terminal()


def sentence(message: str, *, indent: str = "") -> None:
    """Print a text that may be longer than a line: on a terminal it breaks between words. indent: before each line."""
    _print_line(Text(_wrapped(OUTPUT.console, indent + message, later=2 * indent)))


def _wrapped(console: Console, message: str, later: str = "") -> str:
    """Return a text with line breaks between words; a word that is longer than the line stays whole.

    A file or pipe gets one line, as `grep` wants it. later: begins all lines but the first.
    """
    if not console.is_terminal:
        return message
    wrap = TextWrapper(console.width, subsequent_indent=later, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(wrap(line) for line in message.splitlines())


def note(message: str) -> None:
    """Print a line about the output to stderr, so that stdout holds the output only."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(_wrapped(console, printable(message)), style="dim"))


def hub_notes() -> None:
    """Print to stderr that models and data sets came from the cache, if the hub did not answer."""
    for words in notes_of_hub():
        note(words)


def document(content: str) -> None:
    """Print YAML or text to stdout, without wrapping its lines."""
    piece(content if content.endswith("\n") else content + "\n")


def piece(content: str) -> None:
    """Print a part of a text to stdout at once: what a model has generated so far."""
    # not through rich, which would wrap long lines
    sys.stdout.write(printable(content))
    sys.stdout.flush()


def json_report(content: dict[str, Any] | list[Any]) -> None:
    """Print the machine-readable report to stdout. A number that is not finite is null."""
    written = json.dumps(finite(content), indent=1, default=str, ensure_ascii=False)
    document(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", written))


def error(problem: UserError) -> None:
    """Print an error to stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    line = Text(_wrapped(console, f"Error: {printable(str(problem))}"))
    line.stylize("bold red", 0, len("Error:"))
    console.print(line)


class _PrintableRecord(logging.LogRecord):
    """A log message of a library."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def escape_libraries() -> None:
    """Escape what libraries print themselves: log messages, warnings, and the traceback of an unexpected exception."""
    logging.setLogRecordFactory(_PrintableRecord)
    sys.excepthook = _print_traceback
    if warnings.formatwarning is not _format_warning:
        warnings.formatwarning = _format_warning


_library_format = warnings.formatwarning


def _format_warning(*args: Any, **kwargs: Any) -> str:
    return printable(_library_format(*args, **kwargs))


def _print_traceback(kind: type[BaseException], found: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(kind, found, trace))))


def table(title: str, rows: Iterable[Sequence[str]]) -> None:
    """Print a table of names and values."""
    grid = Table(show_header=False, box=None, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(_cell(name), _cell(value))
    _print_grid(title, grid)


def columns(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]], *, texts: bool = False) -> None:
    """Print a table with a header. The first column is left-aligned, the others right-aligned; rows may be shorter.

    texts: all columns hold texts, and are left-aligned.
    """
    grid = Table(box=None, pad_edge=False)
    for i, name in enumerate(header):
        grid.add_column(_cell(name), justify="right" if i and not texts else "left", overflow="fold")
    for row in rows:
        grid.add_row(*map(_cell, row))
    _print_grid(title, grid)


def _cell(value: Any) -> Text:
    return Text(printable(str(value), one_line=True))


def _print_grid(title: str, grid: Table) -> None:
    """Print a table without the blanks that fill its last column, and a title that may be wider than the table."""
    _print_line(Text(printable(title), style="bold"))
    for segments in OUTPUT.console.render_lines(grid, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        _print_line(line)


def status(words: str) -> Status:
    """Show a live line on a terminal, and nothing elsewhere."""
    return OUTPUT.console.status(_cell(words))


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a live line on a terminal, and print a plain line elsewhere."""
    if not OUTPUT.console.is_terminal:
        text(what)
    with status(what):
        yield
