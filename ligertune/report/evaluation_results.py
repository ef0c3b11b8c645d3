"""Results of `ligertune eval` on the page of their run: they are read from its folder, and replaced in the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ligertune.errors import plural
from ligertune.files.storage import mask_secrets, read_object, write_text
from ligertune.report.svg_chart import render_template

EVALUATIONS = "evaluations"  # folder in output_dir, with a JSON file for each evaluation
PAGE = "report.html"
_BEGIN = "<!-- evaluations -->"
_END = "<!-- end of evaluations -->"
_SETUP = "<h2>Setup</h2>"  # pages of earlier versions have no place for evaluations
_SHOWN = 20  # newest results on a page
_MOST_ROWS = 200  # of a result: tasks with many subtasks have some hundred


def evaluation_section(run: Path) -> Markup:
    """Return the part of a run's page with the results in its folder `evaluations`, the newest first."""
    files = sorted((run / EVALUATIONS).glob("*.json"), reverse=True)[:_SHOWN]
    results = [found for file in files if (found := _result(file)) is not None]
    return Markup(f"{_BEGIN}{render_template('ligertune.report', 'evaluations.html.j2', results=results)}{_END}")


def update_page(run: Path) -> None:
    """Write the results into report.html of a run. A run without a page gets none."""
    path = run / PAGE
    if not path.is_file():
        return
    page = path.read_text(encoding="utf-8", errors="replace")
    section = mask_secrets(evaluation_section(run))
    before, begin, rest = page.partition(_BEGIN)
    if begin:
        write_text(path, f"{before}{section}{rest.partition(_END)[2]}")
        return
    before, setup, rest = page.partition(_SETUP)
    write_text(path, f"{before}{section}{setup}{rest}")


def _result(file: Path) -> dict[str, Any] | None:
    """Return what the page shows of a result; None for a file that is damaged or of something else."""
    found = read_object(file)
    metrics = (found or {}).get("metrics")
    if found is None or not isinstance(metrics, dict):
        return None
    rows = [(str(name), *_numbers(values)) for name, values in metrics.items() if isinstance(values, dict)][:_MOST_ROWS]
    data = found.get("data")
    examples = found.get("examples")
    return {
        "data": ", ".join(map(str, data)) if isinstance(data, list) else "",
        "examples": plural(examples, "example") if type(examples) is int else "",
        "ended": str(found.get("ended", ""))[:16].replace("T", " "),
        "rows": rows,
        "has_base": any(base for _, base, _, _ in rows),
    }


def _numbers(values: dict[str, Any]) -> tuple[str, str, str]:
    """Return (base, model, difference) as texts."""
    difference = estimate_words(values.get("difference"), sign=True)
    return estimate_words(values.get("base")), estimate_words(values), difference


def estimate_words(estimate: Any, *, sign: bool = False) -> str:
    """Return a number and its standard error, "2.0153 ± 0.0321"; an empty text for None.

    estimate: {"value", "stderr"} of a JSON file. sign: also write the plus of a difference.
    """
    if not isinstance(estimate, dict):
        return ""
    value = estimate.get("value")
    error = estimate.get("stderr")
    if not isinstance(value, int | float):
        return "not finite"
    words = f"{value:{'+' if sign else ''}.4f}" if abs(value) < 1e6 else f"{value:.4e}"
    return words if not isinstance(error, int | float) else f"{words} ± {error:.4f}"
