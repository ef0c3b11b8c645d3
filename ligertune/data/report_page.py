"""HTML page of `ligertune data --out`: one self-contained file, rendered from report_page.html.j2."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup

from ligertune.data.preview import visible_text

_WIDTH, _HEIGHT = 720, 180  # pixels of the histogram, without its labels


def data_page(summary: dict[str, Any], *, title: str) -> str:
    """Render the whole document from `preview_summary`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ligertune.data", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    return environment.get_template("report_page.html.j2").render(
        title=title,
        about=_about(summary),
        training=_training(summary["outlook"]) if summary["outlook"] else None,
        report=summary["report"],
        eval_report=summary["eval_report"],
        examples=[{**example, "runs": _runs(example["pieces"])} for example in summary["examples"]],
        width=_WIDTH,
        height=_HEIGHT,
        **_histogram(summary["lengths"]),
    )


def _visible(value: object) -> object:
    # what a macro returned is markup, made of values that have gone through here already
    return value if isinstance(value, Markup) else visible_text(str(value))


def _about(summary: dict[str, Any]) -> list[tuple[str, str]]:
    report = summary["report"]
    rows = [
        (
            part["path"],
            f"{part['examples']:,} examples of {part['rows_read']:,} rows, {part['format']}, "
            f"template {part['template']}" + (", from the cache" if part["cached"] else ""),
        )
        for part in report["sets"]
    ]
    if not summary["streamed"]:
        trained = f"{report['trained_tokens']:,} are trained ({report['trained_share']:.1%})"
        rows += [
            ("examples", f"{report['examples']:,}, and {summary['eval_examples']:,} to evaluate on"),
            ("tokens", f"{report['tokens']:,}, of which {trained}"),
            ("too long", f"{report['overlength']:,}, of which {report['truncated']:,} were cut"),
        ]
    rows += [("note", note) for note in report["notes"]]
    return [*rows, ("fingerprint", summary["fingerprint"][:16])]


def _training(outlook: dict[str, Any]) -> list[tuple[str, str]]:
    kind = "packed" if outlook["packed"] else "padding-free" if outlook["padding_free"] else "padded"
    fills = {
        "packed": outlook["fill_packed"],
        "padded, in groups of one length": outlook["fill_grouped"],
        "padded, shuffled": outlook["fill_shuffled"],
        "padded to max_length": outlook["fill_to_max_length"],
    }
    return [
        ("rows of an epoch", f"{outlook['rows']:,}, {kind}: {outlook['fill']:.1%} of the slots are tokens"),
        ("a step", f"{outlook['rows_per_step']:,} rows, about {outlook['tokens_per_step']:,.0f} tokens"),
        ("the run", f"{outlook['steps']:,} steps, about {outlook['tokens']:,} tokens"),
        ("slots that are tokens", "; ".join(f"{name} {share:.1%}" for name, share in fills.items())),
    ]


def _histogram(lengths: dict[str, Any]) -> dict[str, Any]:
    """Return the bars in pixels, their labels and the caption."""
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
    caption = (
        f"mean {lengths['mean']}, half have at most {lengths['p50']}, 90 % {lengths['p90']}, 95 % {lengths['p95']}, "
        f"99 % {lengths['p99']}, longest {lengths['max']}"
    )
    return {"bars": bars, "shortest": edges[0], "longest": edges[-1] + bin_width - 1, "caption": caption}


def _runs(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring pieces of the same kind, so that the page has one element per run."""
    runs = groupby(pieces, key=lambda piece: (piece["trained"], piece["special"]))
    return [
        {"text": "".join(piece["text"] for piece in run), "trained": trained, "special": special}
        for (trained, special), run in runs
    ]
