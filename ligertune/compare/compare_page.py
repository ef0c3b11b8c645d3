"""A comparison as one HTML page: charts inside it, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ligertune.compare.summary import Comparison, Point, SideResult
from ligertune.compare.target import label

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: right; vertical-align: top; }
td:first-child, th:first-child { text-align: left; } td { font-variant-numeric: tabular-nums; }
th { font-weight: 600; color: #555; border-bottom: 1px solid #ccc; } .bad { color: #b00000; font-weight: 600; }
img { max-width: 100%; height: auto; background: white; margin-right: 1rem; } .d { color: #666; font-size: .9em; }
svg { max-width: 100%; height: auto; } polyline { fill: none; stroke-width: 1.5; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_HEAD = (
    "",
    "real tokens/s",
    "median step",
    "peak allocated",
    "reserved",
    "MFU",
    "tokens/s ratio",
    "memory ratio",
    "losses",
)
GIB, MIB = 2**30, 2**20


def page(result: Comparison, charts: Sequence[Path]) -> str:
    """The whole document. `charts` are PNG files that it takes in."""
    pictures = [
        f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for path in charts
    ]
    verdict = "".join(f"<p class=bad>{escape(problem)}</p>" for problem in result.problems)
    about = (
        f"{result.repeats} runs of each side, interleaved, each in a process of its own; {result.steps} measured steps "
        f"after {result.warmup} of warm-up. Rates are real tokens of all devices, mean ± standard error over the runs."
    )
    body = "\n".join(
        [
            f"<h1>{escape(Path(result.recipe).name or 'Comparison')}</h1>",
            f"<p>{escape(label(result.target, processes=result.processes))}<br>{escape(result.date)}</p>",
            f"<p class=d>{escape(about)}</p>",
            verdict or "<p>Losses are the same on every side of ours.</p>",
            *pictures,
            *(_point(point) for point in result.points),
        ]
    )
    return (
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>ligertune compare</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _point(point: Point) -> str:
    rows = [_row(point, side) for side in point.sides]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in _HEAD)
    notes = [
        f"{side.label}: step {slow.step} of run {slow.repeat} took {slow.seconds:.2f} s, {slow.times_median:.1f} x the "
        "median: something else ran in it, such as a compiler"
        for side in point.sides
        for slow in side.slow_steps
    ]
    notes += [f"{side.label}: {side.kernels}" for side in point.sides if side.kernels]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f"<h2>{escape(point.label or 'Results')}</h2><table><tr>{head}</tr>{''.join(rows)}</table><ul>{listed}</ul>"
        f"<h3>Seconds of each step, first runs</h3>{_curves(point)}"
    )


def _row(point: Point, side: SideResult) -> str:
    rate, gain = side.tokens_per_second, point.gain(side)
    if rate is None:
        said = side.failure.sentence if side.failure else ""
        kind = side.failure.kind if side.failure else "nothing measured"
        return (
            f'<tr><td>{escape(side.label)}</td><td class=bad colspan=8 title="{escape(said)}">{escape(kind)}</td></tr>'
        )
    error = f" ± {rate.standard_error:,.0f}" if rate.standard_error is not None else ""
    same = "reference" if side.name == point.reference else side.parity and side.parity.sentence.split(":")[0]
    cells = (
        side.label,
        f"{rate.mean:,.0f}{error}",
        f"{1e3 * side.median_step_seconds:,.1f} ms",
        _size(side.peak),
        _size(side.peak_memory.get("reserved_steady")),
        f"{100 * side.mfu:.1f} %" if side.mfu is not None else "",
        f"{gain[0]:.2f}" if gain else "",
        f"{gain[1]:.2f}" if gain else "",
        same or "",
    )
    title = escape(side.parity.sentence) if side.parity else ""
    return f'<tr title="{title}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return ""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


def _curves(point: Point) -> str:
    """Every step's seconds of each side's first run, warm-up included: a slow run shows where it was slow."""
    from ligertune.compare.compare_plots import COLOURS

    runs = [(side, next((t for t in side.trials if t.steps and not t.failure), None)) for side in point.sides]
    runs = [(side, trial) for side, trial in runs if trial and len(trial.steps) > 1]
    if not runs:
        return ""
    width, height = 720, 160
    most = max(step.seconds for _, trial in runs for step in trial.steps)
    lines = []
    for side, trial in runs:
        last = len(trial.steps) - 1
        path = " ".join(
            f"{width * i / last:.1f},{height * (1 - step.seconds / most):.1f}" for i, step in enumerate(trial.steps)
        )
        colour = COLOURS.get(side.name, "black")
        lines.append(f'<polyline points="{path}" stroke="{colour}"><title>{escape(side.label)}</title></polyline>')
    key = ", ".join(
        f'<span style="color:{COLOURS.get(side.name, "black")}">{escape(side.label)}</span>' for side, _ in runs
    )
    return (
        f'<svg viewBox="0 -4 {width} {height + 8}" width="{width}" role="img">{"".join(lines)}</svg>'
        f"<p class=d>from the first step to the last; the top is {most:.3f} s. {key}</p>"
    )
