"""How `ligertune data` looks: examples with what is trained marked, then what became of the rows and of the tokens.
And the bar that shows how far the preparing of data is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.text import Text

from ligertune.cli.render.console import OUTPUT, table, text

if TYPE_CHECKING:
    from ligertune.data.preview import Piece, PreviewExample

_BAR = 40  # characters of the histogram's longest bar


class Preparing:
    """A bar for each data set that is prepared; on a terminal only, and none for what the cache holds."""

    def __init__(self, *, enabled: bool = True) -> None:
        shown = enabled and OUTPUT.console.is_terminal
        columns = (
            TextColumn("preparing {task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rows]:,} rows"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=OUTPUT.console, transient=True, disable=not shown)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Preparing:
        self._progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.__exit__(*exc)

    def show(self, path: str, rows: int, share: float) -> None:
        """`share` of a data set is done, so many rows."""
        if path not in self._tasks:
            self._tasks[path] = self._progress.add_task(path, total=1.0, rows=0)
        self._progress.update(self._tasks[path], completed=share, rows=rows)


def data_preview(everything: dict[str, Any], previews: Sequence[PreviewExample]) -> None:
    """The examples, then the account of all of them. everything: `preview.summary`."""
    colour = OUTPUT.console.is_terminal
    if previews:
        marks = "Trained: green; every second token is underlined; control tokens are reversed."
        text(marks if colour else "Trained: [[between double brackets]].")
    for number, shown in enumerate(previews, start=1):
        head = f"{number}: {shown.source}, {shown.tokens} tokens, {shown.trained_tokens} trained"
        OUTPUT.console.print(Rule(Text(head), align="left") if colour else Text(f"--- {head} ---"))
        OUTPUT.console.print(_coloured(shown) if colour else _bracketed(shown))
    table("Data", account_rows(everything))
    table("Tokens of an example", _histogram(everything["lengths"]))
    if everything["outlook"]:
        table("In training", training_rows(everything["outlook"]))
    for note in report_notes(everything["report"]):
        text(f"  note: {note}")


def _coloured(shown: PreviewExample) -> Text:
    from ligertune.data.preview import visible_text

    tokens = Text()
    for index, piece in enumerate(shown.pieces):
        tokens.append(visible_text(piece.text), style=_style(piece, underlined=index % 2 == 1))
    return tokens


def _style(piece: Piece, *, underlined: bool) -> str:
    colour = "green" if piece.trained else "dim"
    return colour + (" underline" if underlined else "") + (" reverse" if piece.special else "")


def _bracketed(shown: PreviewExample) -> Text:
    from ligertune.data.preview import visible_text

    return Text(
        "".join(f"[[{visible_text(span)}]]" if trained else visible_text(span) for span, trained in shown.spans)
    )


def account_rows(everything: dict[str, Any], *, with_counts: bool = True) -> list[tuple[str, str]]:
    """Return (name, value) rows about data sets and tokens; `with_counts` also about dropped and repaired rows."""
    report, lengths = everything["report"], everything["lengths"]
    rows = _sets(report)
    if everything["streamed"]:
        rows.append(("streamed", "only the first examples were looked at: what follows is of them"))
    else:
        held_out = f", and {everything['eval_examples']} to evaluate on" if everything["eval_examples"] else ""
        overlength = f"{report['overlength']} ({report['overlength'] / max(report['rows_read'], 1):.1%})"
        rows.append(("examples", f"{report['examples']} of {report['rows_read']} rows{held_out}"))
        if with_counts:
            rows += _counts("dropped", report["dropped"], report["first_dropped"])
            rows += _counts("repaired", report["repaired"], report["first_repaired"])
        rows += [
            (
                "tokens",
                f"{report['tokens']}, {report['trained_tokens']} trained ({report['trained_share']:.1%})",
            ),
            ("too long", f"{overlength}, {report['truncated']} truncated"),
        ]
    if everything["images"]:
        rows.append(("images", str(everything["images"])))
    rows += [
        (
            "tokens each",
            f"mean {lengths['mean']}, half have at most {lengths['p50']}, 90 % {lengths['p90']}, "
            f"95 % {lengths['p95']}, 99 % {lengths['p99']}, longest {lengths['max']}",
        ),
        ("fingerprint", everything["fingerprint"][:16]),
    ]
    held = everything["eval_report"]
    if held:
        dropped = _counts("dropped", held["dropped"], held["first_dropped"]) if with_counts else []
        rows += [(f"eval {name}", value) for name, value in _sets(held) + dropped]
    return rows


def _sets(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            "data set",
            f"{part['path']}: {part['examples']} of {part['rows_read']} rows, {part['format']}, "
            f"template {part['template']}" + (", from the cache" if part["cached"] else ""),
        )
        for part in report["sets"]
    ]


def _counts(name: str, counts: dict[str, int], first: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, f"{count} {reason}, first {first[reason]}") for reason, count in counts.items()]


def _histogram(lengths: dict[str, Any]) -> list[tuple[str, str]]:
    most = max(lengths["counts"])
    starts = zip(lengths["edges"], lengths["counts"], strict=True)
    return [(f"from {first}", f"{'█' * round(_BAR * count / most)} {count}") for first, count in starts]


def training_rows(outlook: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) rows about an epoch, a step and the run."""
    kind = "packed" if outlook["packed"] else "padding-free" if outlook["padding_free"] else "padded"
    return [
        ("an epoch", f"{outlook['rows']} rows, {kind}: {outlook['fill']:.1%} of the slots are tokens"),
        (
            "slots used",
            f"packed {outlook['fill_packed']:.1%}, padded in groups of one length {outlook['fill_grouped']:.1%}, "
            f"padded as shuffled {outlook['fill_shuffled']:.1%}, "
            f"padded to max_length {outlook['fill_to_max_length']:.1%}",
        ),
        (
            "a step",
            f"{outlook['rows_per_step']} rows over all of {outlook['processes']} processes, "
            f"about {outlook['tokens_per_step']:,.0f} tokens",
        ),
        (
            "the run",
            f"{outlook['steps']} steps ({outlook['steps_per_epoch']:.1f} an epoch), about {outlook['tokens']:,} tokens"
            f", {outlook['trained_tokens']:,} of them trained",
        ),
    ]


def report_notes(report: dict[str, Any]) -> list[str]:
    """Return the remarks on the data."""
    notes = list(report["notes"])
    if report["straddling"]:
        notes.append(
            f"{report['straddling']} tokens begin in the prompt and reach into the answer (line breaks, mostly): "
            "they are not trained."
        )
    if report["literal"]:
        notes.append(f"{report['literal']} rows hold text that looks like a control token: it is taken as text.")
    return notes
