"""HTML report of a comparison: one self-contained page, rendered from compare_page.html.j2."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from ligertune.compare.compare_plots import COLOURS
from ligertune.compare.summary import Comparison, Point, SideResult
from ligertune.compare.target import label

HEADER = (
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
_WIDTH, _HEIGHT = 720, 160  # pixels of the step-time curves
GIB, MIB = 2**30, 2**20


def page(result: Comparison, charts: Sequence[Path]) -> str:
    """Render the whole document. `charts` are PNG files to embed."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ligertune.compare", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("compare_page.html.j2").render(
        title=Path(result.recipe).name or "Comparison",
        target=label(result.target, processes=result.processes),
        result=result,
        charts=[{"name": path.stem, "base64": base64.b64encode(path.read_bytes()).decode()} for path in charts],
        header=HEADER,
        points=[_point(point) for point in result.points],
        width=_WIDTH,
        height=_HEIGHT,
    )


def _point(point: Point) -> dict[str, Any]:
    notes = [
        f"{side.label}: step {slow.step} of run {slow.repeat} took {slow.seconds:.2f} s, {slow.times_median:.1f} x the "
        "median: something else ran in it, such as a compiler"
        for side in point.sides
        for slow in side.slow_steps
    ]
    notes += [f"{side.label}: {side.kernels}" for side in point.sides if side.kernels]
    return {"label": point.label, "rows": [_row(point, side) for side in point.sides], "notes": notes, **_curves(point)}


def _row(point: Point, side: SideResult) -> dict[str, Any]:
    rate, gain = side.tokens_per_second, point.gain(side)
    if rate is None:
        failure = side.failure
        kind, sentence = (failure.kind, failure.sentence) if failure else ("nothing measured", "")
        return {"side": side.label, "failure": kind, "title": sentence}
    error = f" ± {rate.standard_error:,.0f}" if rate.standard_error is not None else ""
    same = "reference" if side.name == point.reference else side.parity and side.parity.sentence.split(":")[0]
    cells = (
        f"{rate.mean:,.0f}{error}",
        f"{1e3 * side.median_step_seconds:,.1f} ms",
        _size(side.peak),
        _size(side.peak_memory.get("reserved_steady")),
        f"{100 * side.mfu:.1f} %" if side.mfu is not None else "",
        f"{gain[0]:.2f}" if gain else "",
        f"{gain[1]:.2f}" if gain else "",
        same or "",
    )
    return {"side": side.label, "failure": "", "cells": cells, "title": side.parity.sentence if side.parity else ""}


def _size(n_bytes: int | None) -> str:
    if n_bytes is None:
        return ""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


def _curves(point: Point) -> dict[str, Any]:
    """Return the seconds of every step of each side's first run as curves in pixels.

    Warm-up steps are included, so that the curve shows where a slow run was slow.
    """
    runs = [(side, next((t for t in side.trials if t.steps and not t.failure), None)) for side in point.sides]
    runs = [(side, trial) for side, trial in runs if trial and len(trial.steps) > 1]
    slowest = max((step.seconds for _, trial in runs for step in trial.steps), default=0.0)
    curves = []
    for side, trial in runs:
        last = len(trial.steps) - 1
        dots = [
            f"{_WIDTH * i / last:.1f},{_HEIGHT * (1 - step.seconds / slowest):.1f}"
            for i, step in enumerate(trial.steps)
        ]
        curves.append({"path": " ".join(dots), "colour": COLOURS.get(side.name, "black"), "label": side.label})
    return {"curves": curves, "slowest": slowest}
