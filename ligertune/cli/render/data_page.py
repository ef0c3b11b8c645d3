"""HTML page of `ligertune data --out`: one self-contained file, rendered from data_page.html.j2."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup

from ligertune.cli.render.data_report import account_rows, report_notes, training_rows
from ligertune.data.preview import visible_text

_WIDTH, _HEIGHT = 720, 180  # pixels of the histogram, without its labels


def data_page(summary: dict[str, Any], *, title: str) -> str:
    """Render the whole document from `preview_summary`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ligertune.cli.render", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    return environment.get_template("data_page.html.j2").render(
        title=title,
        about=[
            *account_rows(summary, with_counts=False),
            *(("note", note) for note in report_notes(summary["report"])),
        ],
        training=training_rows(summary["outlook"]) if summary["outlook"] else None,
        report=summary["report"],
        eval_report=summary["eval_report"],
        examples=[{**example, "runs": _runs(example["pieces"])} for example in summary["examples"]],
        width=_WIDTH,
        height=_HEIGHT,
        **_histogram(summary["lengths"]),
    )


def _visible(value: Any) -> Any:
    # markup comes from a macro, whose values were made visible before
    return value if isinstance(value, Markup) else visible_text(str(value))


def _histogram(lengths: dict[str, Any]) -> dict[str, Any]:
    """Return the bars in pixels and the labels of the axis."""
    counts, edges = lengths["counts"], lengths["edges"]
    width, most = _WIDTH / len(counts), max(counts)
    bin_width = edges[1] - edges[0] if len(edges) > 1 else 1
    bars = [
        {
            "x": f"{i * width:.1f}",
            "y": f"{_HEIGHT * (1 - count / most):.1f}",
            "width": f"{width - 1:.1f}",
            "height": f"{_HEIGHT * count / most:.1f}",
            "title": f"{first} to {first + bin_width - 1} tokens: {count:,}",
        }
        for i, (count, first) in enumerate(zip(counts, edges, strict=True))
    ]
    return {"bars": bars, "shortest": edges[0], "longest": edges[-1] + bin_width - 1}


def _runs(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring pieces of the same kind, so that the page has one element per run."""
    runs = groupby(pieces, key=lambda piece: (piece["trained"], piece["special"]))
    return [
        {"text": "".join(piece["text"] for piece in run), "trained": trained, "special": special}
        for (trained, special), run in runs
    ]
