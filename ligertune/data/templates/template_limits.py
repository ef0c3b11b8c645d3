"""Limits of chat templates: time, sizes of values, and the size of a result before it is computed.

A chat template is a program that comes with a model. Each string, list and mapping that it makes is measured, so that
the next operation's input is bounded; operations whose result can be larger than their operands together are checked
before they run. So no operation takes long, and the time is checked between them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from jinja2.utils import Namespace

MAX_SECONDS = 5  # of one rendering; usual ones take less than a millisecond
MAX_CHARACTERS = 2**25  # of one string; a record has at most data.max_record_bytes, 16 MiB by default
MAX_TOTAL = 2**28  # characters of all strings of a rendering
# Characters of the rendered text: a template adds instructions and marks to what it is given, and JSON writes one
# character as up to 12. Each is tokenized, which takes a second for a million.
MAX_ADDED = 2**18
_MAX_GROWTH = 16
_MAX_ITEMS = 10**6  # of a list or mapping, with those inside it
_MAX_BITS = 10**5  # of an integer
_MAX_STEPS = 2_000_000  # loop iterations, calls and filters of a rendering
_STEPS_PER_CHECK = 64  # of the time
LONG = 256  # characters; shorter strings are not counted, so that usual renderings are as fast as without limits
_NUMBER = 20  # characters of a usual number
# a width that is an argument: "%*d", "{:{width}}"
_WIDTH_ARGUMENT = re.compile(r"%[-+ #0]*[0-9.]*\*|:[^{}]*\{")


class TemplateLimitError(Exception):
    """A template does more than it may. The message completes "The chat template ...": "runs for more than 5 s"."""


def _too_long() -> TemplateLimitError:
    return TemplateLimitError(f"makes a text of more than {MAX_CHARACTERS:,} characters")


class Budget:
    """Time and characters that are left to a rendering. Renderings of several threads at once share it."""

    __slots__ = ("characters", "end", "steps")

    def __init__(self) -> None:
        self.begin()

    def begin(self, n_characters: int = MAX_TOTAL) -> None:
        """Begin a rendering, or the compilation of a template."""
        self.end = time.monotonic() + MAX_SECONDS
        self.characters = n_characters
        self.steps = 0

    def step(self) -> None:
        """Count a loop iteration, call or filter."""
        self.steps = steps = self.steps + 1
        if steps % _STEPS_PER_CHECK == 0 and (steps > _MAX_STEPS or time.monotonic() > self.end):
            raise TemplateLimitError(f"runs for more than {MAX_SECONDS} s or {_MAX_STEPS:,} steps")

    def take(self, n_characters: int) -> None:
        """Count the characters of a string."""
        if n_characters > LONG:
            self.characters -= n_characters
            if n_characters > MAX_CHARACTERS or self.characters < 0:
                raise _too_long()

    def measured(self, value: Any) -> Any:
        """Return the value, after counting its characters and items."""
        if isinstance(value, str | bytes):
            self.take(len(value))
        elif isinstance(value, list | tuple | dict | set | Namespace):
            self.take(n_characters(value))
        return value


budget = Budget()


def add(left: Any, right: Any) -> Any:
    """Compute `+`, the most frequent operation of chat templates."""
    result = left + right
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return budget.measured(result)  # each operand is measured, so the sum needs little memory
    if isinstance(result, str | bytes) and len(result) > LONG:
        budget.take(len(result))
    return result


def n_characters(value: Any) -> int:
    """Return the characters in a list or mapping, counting an item once for each place that it has."""
    n_items = length = 0
    left = [value]
    while left:
        item = left.pop()
        n_items += 1
        if isinstance(item, str | bytes):
            length += len(item)
        elif isinstance(item, dict):
            left += item
            left += item.values()
        elif isinstance(item, list | tuple | set):
            left += item
        elif isinstance(item, Namespace):
            left.append(object.__getattribute__(item, "_Namespace__attrs"))
        if n_items > _MAX_ITEMS or length > MAX_CHARACTERS:
            raise TemplateLimitError(f"makes a list of more than {_MAX_ITEMS:,} items or {MAX_CHARACTERS:,} characters")
    return length


def longest_text(given: dict[str, Any], length: int) -> int:
    """Return how long a text may be for what is given. Raises TemplateLimitError if `length` is longer."""
    n_given = n_characters(given)
    most = MAX_ADDED + _MAX_GROWTH * n_given
    if length > most:
        raise TemplateLimitError(f"makes at least {length:,} characters of text from {n_given:,} of messages and tools")
    return most


def check_product(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitError if the result of `*` or `**` would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise TemplateLimitError(f"makes a number of more than {_MAX_BITS:,} bits")
    elif hasattr(left, "__len__") or hasattr(right, "__len__"):
        budget.take(_size(left) * _size(right))


def check_method(name: str, owner: Any, arguments: Sequence[Any]) -> None:
    """Raise TemplateLimitError if a method of a string or number would return too long a text."""
    if name in _METHODS:
        _check(_METHODS[name], (owner, *arguments), {})


def check_filter(name: str, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Raise TemplateLimitError if a filter would return too long a text."""
    if name in _FILTERS:
        _check(_FILTERS[name], arguments, options)


def _check(bound: Callable[..., int], arguments: Sequence[Any], options: dict[str, Any]) -> None:
    try:
        size = bound(*arguments, **options)
    except (TypeError, AttributeError):  # wrong arguments: the operation itself raises its error
        return
    if size > MAX_CHARACTERS:
        raise _too_long()


def _size(value: Any) -> int:
    """Return the length of a text or list, or a number, which may be a width or a count."""
    if isinstance(value, int | float):
        return int(min(abs(value), 2**63))  # infinity is no int
    return len(value) if hasattr(value, "__len__") else 1


def _width(text: Any, width: Any = 80, *more: Any) -> int:
    return _size(text) + _size(width)


def _replaced(text: Any, old: Any, new: Any = "", *more: Any) -> int:
    return _size(text) + text.count(old) * _size(new)


def _joined(items: Any, separator: Any = "", *more: Any) -> int:
    return n_characters(items) + len(items) * (_NUMBER + _size(separator))


def _formatted(text: Any, *values: Any) -> int:
    """Bound a format, of `%` or `format`: each field writes all values, or has the largest width."""
    fields = text.count("%") + text.count("{")
    flat = [item for value in values for item in (value.values() if isinstance(value, dict) else
            value if isinstance(value, tuple) else [value])]  # fmt: skip
    shown = sum(_NUMBER if isinstance(value, int | float) else _size(value) for value in flat)
    # ten digits are beyond the limit, and `int` takes quadratic time in the digits
    widths = sum(int(width[:10]) for width in re.findall(r"\d+", text))
    if _WIDTH_ARGUMENT.search(text):
        widths += sum(_size(value) for value in flat if isinstance(value, int))
    return len(text) + fields * (shown + widths)


# methods of strings and numbers: bounds from (object, arguments)
_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _width),
    "expandtabs": lambda text, size=8: _size(text) * _size(size),
    "replace": _replaced,
    "translate": lambda text, table: _size(text) + _size(text) * n_characters(table),
    "format": _formatted,
    "format_map": _formatted,
    "join": lambda separator, items: _joined(items, separator),
}
# filters: bounds from (value, arguments)
_FILTERS: dict[str, Callable[..., int]] = {
    "center": _width,
    "batch": _width,
    "slice": _width,
    # at most 335 digits (MAX_CHARACTERS / 10**5): jinja2 computes 10**precision
    "round": lambda number, precision=0, *more: _size(precision) * 10**5,
    "title": lambda text: 8 * _size(text),  # slow: 0.4 s for a million characters
    "indent": lambda text, width=4, *more: _size(text) + (str(text).count("\n") + 1) * _size(width),
    "tojson": lambda value, *more, indent=0, **others: _size(indent or 0) * 10**5,
    "replace": lambda text, old, new, *more: _replaced(str(text), old, new),
    "format": _formatted,
    "join": _joined,
    # of texts or lists: never, because each step copies what is summed so far
    "sum": lambda items, attribute=None, start=0: 0 if isinstance(start, int | float) else 2**63,
}
