"""UserError, shown without a traceback, and the text of messages: commands, escapes, counts and sizes."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from functools import partial

# Optional packages and the versions that work, as in the extras of pyproject.toml. Messages name the packages: the
# extras are known to pip in a clone of the repository only, because ligertune is not on PyPI.
OPTIONAL = {
    "bitsandbytes": ">=0.45",
    "deepspeed": ">=0.16",
    "lm-eval": ">=0.4.13",
    "gguf": ">=0.19",
    "matplotlib": ">=3.8",
    "pillow": ">=10.0",
    "torchao": ">=0.14",
    "triton": ">=3.6",
}


class UserError(Exception):
    """An error for the user: one clear sentence instead of a traceback.

    message: the place, what was found and what is expected. hint: what to write instead.
    exit_code: 2 if the input is wrong, 1 if the run failed (NaN loss, out of memory).
    """

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[Callable[[], UserError], tuple[()]]:
        # the default pickling between processes drops keyword-only arguments
        return (partial(type(self), self.message, hint=self.hint, exit_code=self.exit_code), ())


def pip_install(package: str) -> str:
    """Return the command that installs a package: "pip install 'torchao>=0.14'"."""
    return f"pip install {shlex.quote(package + OPTIONAL.get(package, ''))}"


def message_of(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type: libraries raise some without a message."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic in the Rust code of a library, which is no Exception, into a UserError: tokenizers has some."""
    try:
        yield
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise UserError(
            f"The tokenizer failed on a text: {str(problem).strip()[:200]}.",
            hint="Use the tokenizer of the model's publisher.",
        ) from None


# Characters that a terminal obeys or that change the direction of text, and signs for them. A file of anyone can hold
# them: as the name of a tensor, as a label, as an answer that a model gives.
_SIGNS = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
_OBEYED = (*range(0x80, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
_ONE_LINE = _SIGNS | {code: f"\u27e8U+{code:04X}\u27e9" for code in _OBEYED}
_LINES = {code: sign for code, sign in _ONE_LINE.items() if chr(code) not in "\n\t"}


def printable(text: str, *, one_line: bool = False) -> str:
    """Return text with its control characters as signs: "\u241b[31m". Everything that is printed passes through here.

    Line breaks and tabs stay, except with one_line. Surrogates, which no stream can encode, are signs, too.
    """
    return text if text.isprintable() else text.translate(_ONE_LINE if one_line else _LINES)


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return "1 row" or "2 rows". nouns: the plural, if it is not the noun with an s."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def format_rate(per_second: float) -> str:
    """Return a rate with three digits or more: "12,345", "57.1", "0.86"."""
    # 99.95 is rounded to 100: from there on three digits are a whole number
    return f"{per_second:,.0f}" if per_second >= 99.95 else f"{per_second:#.3g}".rstrip(".")


def format_count(number: float) -> str:
    """Shorten a number to three digits: 12345678 -> 12.3M, 6400 -> 6.40k."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * scale:  # 999,960 is rounded to 1.00M
            return f"{format_rate(number / scale)}{unit}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_bytes(n_bytes: float) -> str:
    """Return bytes in GiB, MiB or KiB: "1.50 GiB"."""
    if n_bytes < 2**20 / 10 and n_bytes:  # in MiB it would be rounded to 0.0 or 0.1
        return f"{n_bytes / 2**10:.1f} KiB"
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
