"""metrics.jsonl: one line a logged step, readable while the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path


class MetricsFile:
    """Appends lines. Opened for a resumed run, it first drops the lines after the step that is resumed from."""

    def __init__(self, path: Path, *, resumed_from: int, enabled: bool) -> None:
        self._path, self.enabled = path, enabled
        if enabled:
            kept = [line for line in read_metrics(path) if line["step"] <= resumed_from] if resumed_from else []
            aside = path.with_suffix(".partial")
            aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(aside, path)

    def lines(self) -> list[dict]:
        """What it holds by now."""
        return read_metrics(self._path)

    def write(self, line: dict) -> None:
        """Append one line; each reaches the file at once."""
        if self.enabled:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict]:
    """All whole lines; a last line cut off by a kill is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").split("\n"):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
