"""Write rows of test data as JSON lines, and damage files."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
