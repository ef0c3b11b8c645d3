"""Output of `ligertune data`: examples, counts, lengths and batches, as text and as an HTML page; a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup
from rich.rule import Rule
from rich.text import Text

from ligertune.cli.render.console import OUTPUT, sentence, table, text
from ligertune.errors import plural, printable

if TYPE_CHECKING:
    from ligertune.data.preview import PreviewExample

BAR = 40  # characters of the histogram's longest bar
# zero-width spaces, joiners and marks, which a reader of the data would not see
INVISIBLE = [*range(0x200B, 0x2010), *range(0x2060, 0x2070), 0xFEFF]
JOINER = 0x200D  # joins emoji, which stay readable
VISIBLE = {code: f"\u27e8U+{code:04X}\u27e9" for code in INVISIBLE if code != JOINER}
# size of the page's histogram in SVG units, without its labels
WIDTH = 720
HEIGHT = 180


def data_preview(summary: dict[str, Any], previews: Sequence[PreviewExample]) -> None:
    """Print the examples, then the statistics of all data. summary: from `preview_summary`."""
    colour = OUTPUT.console.is_terminal
    if previews:
        marks = "Trained: green; every second token is underlined; control tokens are reversed."
        marks = marks if colour else "Trained: [[between double brackets]]."
        # a text with a label has one such token, the last
        text(f"{marks} The label in each heading is learned there." if summary["labels"] else marks)
    for shown in previews:
        answer = f", {shown.answer}" if shown.answer else ""
        head = (
            f"{shown.number}: {shown.source}{answer}, {plural(shown.tokens, 'token')}, {shown.trained_tokens} trained"
        )
        head = printable(head, one_line=True)
        OUTPUT.console.print(Rule(Text(head), align="left") if colour else Text(f"--- {head} ---"))
        OUTPUT.console.print(_marked(shown, colour=colour))
    table("Data", account_rows(summary))
    table(f"Tokens per {_sequence(summary)}", histogram_rows(summary["lengths"]))
    table("In training", training_rows(summary["outlook"]))
    for note in report_notes(summary):
        sentence(f"note: {note}", indent="  ")


def _marked(shown: PreviewExample, *, colour: bool) -> Text:
    """Return the text with trained tokens marked, by colours or by brackets."""
    if not colour:  # pipes and files cannot show colours
        spans = ((visible_text(span), trained) for span, trained in shown.spans)
        return Text("".join(f"[[{span}]]" if trained else span for span, trained in spans))
    tokens = Text()
    for index, piece in enumerate(shown.pieces):
        style = "green" if piece.trained else "dim"
        style += (" underline" if index % 2 else "") + (" reverse" if piece.special else "")
        tokens.append(visible_text(piece.text), style=style)
    return tokens


def account_rows(summary: dict[str, Any], *, with_counts: bool = True) -> list[tuple[str, str]]:
    """Return (name, value) rows about data sets and tokens; with_counts: also about dropped and repaired rows."""
    report = summary["report"]
    lengths = summary["lengths"]
    rows = _data_sets(report)
    if labels := summary["labels"]:
        noun = "number" if labels["problem_type"] == "regression" else "label"
        size = plural(labels["num_labels"], noun)
        rows.append(("labels", f"{labels['problem_type']} with {size}: {labels['inferred_from']}"))
    if summary["streamed"]:
        rows.append(("streamed", "only the first examples were read; all counts below are theirs"))
    else:
        held_out = f", and {summary['eval_examples']} for evaluation" if summary["eval_examples"] else ""
        overlength = f"{report['overlength']} ({_percent(report['overlength'] / max(report['rows_read'], 1))})"
        what = "pairs" if summary["sequences_per_example"] == 2 else "examples"
        rows.append((what, f"{_of_rows(report)}{held_out}"))
        rows += _reasons("dropped", report) + _reasons("repaired", report) if with_counts else []
        trained = f"{report['trained_tokens']:,} trained ({_percent(report['trained_share'])})"
        rows.append(("tokens", f"{report['tokens']:,}, {trained}"))
        rows += _answers(summary)
        rows.append(("too long", f"{overlength}, {report['truncated']} truncated"))
    if summary["images"]:
        rows.append(("images", str(summary["images"])))
    percentiles = ", ".join(f"p{p} {lengths[f'p{p}']}" for p in (50, 90, 95, 99))
    rows.append(
        (f"{_sequence(summary)} length", f"mean {lengths['mean']}, {percentiles}, longest {lengths['max']} tokens")
    )
    evaluation = summary["eval_report"]
    of_evaluation = _data_sets(evaluation) + (_reasons("dropped", evaluation) if with_counts else [])
    return rows + [(f"eval {name}", value) for name, value in of_evaluation]


def _answers(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row for the chosen and the rejected answers of pairs, or for each label."""
    rows = []
    for name, part in summary["answers"].items():
        count = plural(part["examples"], "answer")
        tokens = part["tokens"]
        rows.append((name, f"{count}, {tokens} tokens with the prompts, {part['trained_tokens']} trained"))
    return rows


def _sequence(summary: dict[str, Any]) -> str:
    return "example" if summary["sequences_per_example"] == 1 else "sequence"


def _of_rows(report: dict[str, Any]) -> str:
    """Return "2 of 3 rows", or "5 from 3 rows" if a row gives several examples."""
    examples = report["examples"]
    word = "from" if examples > report["rows_read"] else "of"
    return f"{examples} {word} {plural(report['rows_read'], 'row')}"


def _data_sets(report: dict[str, Any] | None) -> list[tuple[str, str]]:
    rows = []
    for part in (report or {"sets": ()})["sets"]:
        used = f"{part['path']}: {_of_rows(part)}"
        cached = ", from the cache" if part["cached"] else ""
        rows.append(("data set", f"{used}, {part['format']}, template {part['template']}{cached}"))
        if part["columns"]:
            rows.append(("columns", ", ".join(f"{name} → {ours}" for ours, name in part["columns"].items())))
        if part["unread"]:
            rows.append(("not read", ", ".join(part["unread"])))
    return rows


def _reasons(name: str, report: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return one row per reason for which rows were dropped or repaired, with the place of the first such row."""
    counts, first = ((report or {}).get(key, {}) for key in (name, f"first_{name}"))
    return [(name, f"{count} {reason}, first {first[reason]}") for reason, count in counts.items()]


def histogram_rows(lengths: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row per bin: its lengths, a bar and a count. Consecutive empty bins are one row."""
    counts = lengths["counts"]
    edges = lengths["edges"]
    most = max(counts)
    ends = [*(first - 1 for first in edges[1:]), lengths["max"]]
    rows = []
    bins = zip(edges, ends, counts, strict=True)
    for _, run in groupby(enumerate(bins), key=lambda item: item[0] if item[1][2] else "empty"):
        members = [values for _, values in run]
        first = members[0][0]
        last = members[-1][1]
        count = members[0][2]
        bar = "█" * round(BAR * count / most)
        rows.append((f"{first} to {last}" if last > first else str(first), f"{bar} {count}".strip()))
    return rows


def training_rows(outlook: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) rows about an epoch, a step and the run."""
    kind = "packed" if outlook["packed"] else "padding-free" if outlook["padding_free"] else "padded"
    fills = {
        "packed": "fill_packed",
        "padded, grouped by length": "fill_grouped",
        "padded, shuffled": "fill_shuffled",
        "padded to max_length": "fill_to_max_length",
    }
    return [
        ("rows per epoch", f"{outlook['rows']}, {kind}; {_percent(1 - outlook['fill'])} padding"),
        ("padding if", "; ".join(f"{way}: {_percent(1 - outlook[key])}" for way, key in fills.items())),
        (
            "per step",
            f"{plural(outlook['rows_per_step'], 'row')} over {plural(outlook['processes'], 'process', 'processes')}, "
            f"about {outlook['tokens_per_step']:,.0f} tokens",
        ),
        (
            "whole run",
            f"{plural(outlook['steps'], 'step')} ({_epoch_in_steps(outlook['steps_per_epoch'])}), about "
            f"{outlook['tokens']:,} tokens, {outlook['trained_tokens']:,} of them trained",
        ),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _epoch_in_steps(steps: float) -> str:
    if steps < 1:
        return "more than one epoch per step"
    return f"an epoch takes about {plural(round(steps), 'step')}"


def report_notes(summary: dict[str, Any]) -> list[str]:
    """Return the remarks on the data. summary: from `preview_summary`."""
    report = summary["report"]
    notes = [note for part in (report, summary["eval_report"]) if part for note in part["notes"]]
    if report["straddling"]:
        notes.append(
            f"not trained: {plural(report['straddling'], 'token')} at the boundary of prompt and answer, with text of "
            "both (mostly line breaks)."
        )
    if report["literal"]:
        count = plural(report["literal"], "row")
        notes.append(f"{count} with text that looks like a control token: it is tokenized as ordinary text.")
    outlook = summary["outlook"]
    if outlook["few_steps"] and not summary["streamed"]:
        notes.append(
            f"The whole run has only {plural(outlook['steps'], 'optimizer step')}. `ligertune plan` names the keys "
            "that give more."
        )
    return notes


def data_page(summary: dict[str, Any], *, title: str) -> str:
    """Render data_page.html.j2, one self-contained file, from `preview_summary`."""
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
        about=[*account_rows(summary, with_counts=False), *(("note", note) for note in report_notes(summary))],
        training=training_rows(summary["outlook"]),
        report=summary["report"],
        eval_report=summary["eval_report"],
        sequence=_sequence(summary),
        examples=[{**example, "runs": _runs(example["pieces"])} for example in summary["examples"]],
        width=WIDTH,
        height=HEIGHT,
        **_bars(summary["lengths"]),
    )


def visible_text(content: str) -> str:
    """Replace invisible characters by signs, too: here people look for what is wrong with their data."""
    return printable(content.translate(VISIBLE))


def _visible(value: Any) -> Any:
    # markup comes from a macro, whose values were made visible before
    return value if isinstance(value, Markup) else visible_text(str(value))


def _bars(lengths: dict[str, Any]) -> dict[str, Any]:
    """Return the bars in SVG units and the labels of the axis."""
    counts = lengths["counts"]
    edges = lengths["edges"]
    width = WIDTH / len(counts)
    most = max(counts)
    bin_width = edges[1] - edges[0] if len(edges) > 1 else 1
    bars = [
        {
            "x": f"{i * width:.1f}",
            "y": f"{HEIGHT * (1 - count / most):.1f}",
            "width": f"{width - 1:.1f}",
            "height": f"{HEIGHT * count / most:.1f}",
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
