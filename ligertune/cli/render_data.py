"""How `ligertune data` looks: examples with what is trained marked, then what became of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.rule import Rule
from rich.text import Text

from ligertune.cli.render import OUTPUT, table, text

if TYPE_CHECKING:
    from ligertune.data.prepare import DataReport, PreparedData
    from ligertune.data.preview import PreviewExample


def data_preview(prepared: PreparedData, previews: Sequence[PreviewExample]) -> None:
    """The examples, then the account of all of them."""
    colour = OUTPUT.console.is_terminal
    if previews:
        text("Trained: green; every second token is underlined." if colour else "Trained: [[between double brackets]].")
    for number, shown in enumerate(previews, start=1):
        head = f"{number}: {shown.source}, {shown.tokens} tokens, {shown.trained_tokens} trained"
        OUTPUT.console.print(Rule(Text(head), align="left") if colour else Text(f"--- {head} ---"))
        OUTPUT.console.print(_coloured(shown) if colour else _bracketed(shown))
    table("Data", _account(prepared))
    for note in _notes(prepared):
        text(f"  note: {note}")


def _coloured(shown: PreviewExample) -> Text:
    tokens = Text()
    for index, (piece, trained) in enumerate(shown.pieces):
        tokens.append(piece, style=("green" if trained else "dim") + (" underline" if index % 2 else ""))
    return tokens


def _bracketed(shown: PreviewExample) -> Text:
    return Text("".join(f"[[{span}]]" if trained else span for span, trained in shown.spans))


def _account(prepared: PreparedData) -> list[tuple[str, str]]:
    from ligertune.data.preview import LengthStatistics

    report, lengths = prepared.report, LengthStatistics.of(prepared.train.lengths)
    rows = _sets(report)
    rows.append(("examples", f"{report.examples} of {report.rows_read} rows" + _held_out(prepared)))
    rows += _dropped(report)
    rows += [
        ("tokens", f"{report.tokens}, {report.trained_tokens} trained ({report.trained_share:.1%})"),
        (
            "tokens each",
            f"mean {lengths.mean}, half have at most {lengths.p50}, 90 % {lengths.p90}, 95 % {lengths.p95}, "
            f"99 % {lengths.p99}, longest {lengths.max}",
        ),
        ("too long", f"{report.overlength} ({report.overlength / report.rows_read:.1%}), {report.truncated} truncated"),
        ("fingerprint", prepared.train.fingerprint[:16]),
    ]
    if prepared.eval_report:
        rows += [
            (f"eval {name}", value) for name, value in _sets(prepared.eval_report) + _dropped(prepared.eval_report)
        ]
    return rows


def _sets(report: DataReport) -> list[tuple[str, str]]:
    return [
        ("data set", f"{part.path}: {part.examples} of {part.rows_read} rows, {part.format}, template {part.template}")
        for part in report.sets
    ]


def _held_out(prepared: PreparedData) -> str:
    if prepared.eval is None:
        return ""
    return f", and {len(prepared.eval)} to evaluate on"


def _dropped(report: DataReport) -> list[tuple[str, str]]:
    return [
        ("dropped", f"{count} {reason}, first {report.first_dropped[reason]}")
        for reason, count in report.dropped.items()
    ]


def _notes(prepared: PreparedData) -> list[str]:
    report = prepared.report
    notes = list(report.notes)
    if report.straddling:
        notes.append(
            f"{report.straddling} tokens begin in the prompt and reach into the answer (line breaks, mostly): "
            "they are not trained."
        )
    return notes
