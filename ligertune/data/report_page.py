"""The data report as one HTML page: nothing is fetched from elsewhere, and what the data says is text, never markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from ligertune.data.preview import visible_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .15rem 1rem .15rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } th { font-weight: 600; color: #555; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f7f7f7; border-radius: 6px; padding: .8rem; }
pre i { font-style: normal; color: #777; } pre b { font-weight: 400; background: #c9f2cf; color: #063; }
pre .s { border: 1px solid; border-radius: 4px; font-size: .85em; padding: 0 .15em; }
figcaption, .d { color: #666; font-size: .9em; } svg { max-width: 100%; height: auto; } rect { fill: #4a7dbd; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre { background: #222; } pre b { background: #143d1f; color: #b6f0c2; }
  th { color: #aaa; } pre i, figcaption, .d { color: #999; } svg text { fill: #ccc; }
}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser would fetch nothing even if it were told to
_CHART = (720, 180)  # pixels of the histogram, without its labels


def data_page(summary: dict[str, Any], *, title: str) -> str:
    """A whole document from `preview.summary`."""
    report, lengths, outlook = summary["report"], summary["lengths"], summary["outlook"]
    parts = [
        f"<h1>{_text(title)}</h1>",
        _about(summary),
        *([f"<h2>In training</h2>{_outlook(outlook)}"] if outlook else []),
        f"<h2>Tokens of an example</h2>{_histogram(lengths)}",
        *_reasons("Dropped rows", report["dropped"], report["first_dropped"], report["rows_read"]),
        *_reasons("Repaired rows", report["repaired"], report["first_repaired"], report["rows_read"]),
    ]
    if summary["eval_report"]:
        held = summary["eval_report"]
        parts += _reasons(
            "Dropped rows of the evaluation sets", held["dropped"], held["first_dropped"], held["rows_read"]
        )
    if summary["examples"]:
        key = "<b>trained</b> <i>not trained</i> <b class=s>control token, trained</b> <i class=s>control token</i>"
        parts += ["<h2>Examples</h2>", f"<pre>{key}</pre>", *map(_example, summary["examples"])]
    body = "\n".join(parts)
    return (
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return escape(visible_text(str(value)))


def _about(summary: dict[str, Any]) -> str:
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
        rows += [
            ("examples", f"{report['examples']:,}, and {summary['eval_examples']:,} to evaluate on"),
            (
                "tokens",
                f"{report['tokens']:,}, of which {report['trained_tokens']:,} are trained "
                f"({report['trained_share']:.1%})",
            ),
            ("too long", f"{report['overlength']:,}, of which {report['truncated']:,} were cut"),
        ]
    rows += [("note", note) for note in report["notes"]]
    rows.append(("fingerprint", summary["fingerprint"][:16]))
    return _table(rows)


def _outlook(outlook: dict[str, Any]) -> str:
    kind = "packed" if outlook["packed"] else "padding-free" if outlook["padding_free"] else "padded"
    fills = [
        ("packed", outlook["fill_packed"]),
        ("padded, in groups of one length", outlook["fill_grouped"]),
        ("padded, shuffled", outlook["fill_shuffled"]),
        ("padded to max_length", outlook["fill_to_max_length"]),
    ]
    rows = [
        ("rows of an epoch", f"{outlook['rows']:,}, {kind}: {outlook['fill']:.1%} of the slots are tokens"),
        ("a step", f"{outlook['rows_per_step']:,} rows, about {outlook['tokens_per_step']:,.0f} tokens"),
        ("the run", f"{outlook['steps']:,} steps, about {outlook['tokens']:,} tokens"),
        ("slots that are tokens", "; ".join(f"{name} {share:.1%}" for name, share in fills)),
    ]
    return _table(rows)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _histogram(lengths: dict[str, Any]) -> str:
    width, height = _CHART
    counts, edges = lengths["counts"], lengths["edges"]
    each, most = width / len(counts), max(counts)
    last = [edge - 1 for edge in (*edges[1:], edges[-1] + (edges[1] - edges[0] if len(edges) > 1 else 1))]
    bars = "".join(
        f'<rect x="{i * each:.1f}" y="{height * (1 - count / most):.1f}" width="{each - 1:.1f}" '
        f'height="{height * count / most:.1f}"><title>{first} to {end} tokens: {count:,}</title></rect>'
        for i, (count, first, end) in enumerate(zip(counts, edges, last, strict=True))
    )
    label = f'<text y="{height + 16}" font-size="12"'
    caption = (
        f"mean {lengths['mean']}, half have at most {lengths['p50']}, 90 % {lengths['p90']}, 95 % {lengths['p95']}, "
        f"99 % {lengths['p99']}, longest {lengths['max']}"
    )
    return (
        f'<figure><svg viewBox="0 0 {width} {height + 20}" width="{width}" role="img">{bars}'
        f'{label}>{edges[0]}</text>{label} x="{width}" text-anchor="end">{last[-1]}</text></svg>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _reasons(title: str, counts: dict[str, int], first: dict[str, str], rows: int) -> list[str]:
    if not counts:
        return []
    lines = "".join(
        f"<tr><td class=n>{count:,}</td><td class=n>{count / max(rows, 1):.2%}</td><td>{_text(reason)}</td>"
        f"<td>{_text(first[reason])}</td></tr>"
        for reason, count in counts.items()
    )
    head = "<tr><th>rows</th><th>share</th><th>why</th><th>the first</th></tr>"
    return [f"<h2>{_text(title)}</h2><table>{head}{lines}</table>"]


def _example(example: dict[str, Any]) -> str:
    runs = groupby(example["pieces"], key=lambda piece: (piece["trained"], piece["special"]))
    pieces = "".join(_run("".join(piece["text"] for piece in run), *kind) for kind, run in runs)
    head = f"{example['tokens']} tokens, {example['trained_tokens']} trained"
    return f"<h3>{_text(example['source'])} <span class=d>{_text(head)}</span></h3><pre>{pieces}</pre>"


def _run(text: str, trained: bool, special: bool) -> str:
    tag = "b" if trained else "i"
    return f"<{tag}{' class=s' if special else ''}>{_text(text)}</{tag}>"
