"""Marks: places of files in the texts of a row, until the tokens of the files are known."""

from __future__ import annotations

import re
from typing import Any

# A mark is the file's number in its row between two noncharacters of Unicode, which no exchanged text contains.
_SIGN = "\ufdd4"
MARK = re.compile(f"{_SIGN}(\\d+){_SIGN}")


def mark_of(number: int) -> str:
    """Return the mark of the file with this number."""
    return f"{_SIGN}{number}{_SIGN}"


def has_sign(text: str) -> bool:
    """Return whether a text could be taken for one with marks."""
    return _SIGN in text


def marked_parts(text: str, part_type: str) -> list[dict[str, Any]]:
    """Split a text with marks into the parts that chat templates read: files, and the texts between them."""
    parts: list[dict[str, Any]] = []
    for place, piece in enumerate(MARK.split(text)):  # texts, and at odd places the numbers of the marks between them
        parts.append({"type": part_type} if place % 2 else {"type": "text", "text": piece})
    return [part for part in parts if part.get("text") != ""] or parts[-1:]
