"""Line charts of HTML pages as inline SVG: ticks, paths and legend. They need neither scripts nor matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from ligertune.errors import printable

WIDTH = 480  # of a chart, in units that scale with the page
HEIGHT = 230  # in the same units
# margins around the plot
LEFT = 58
RIGHT = 16
TOP = 26
BOTTOM = 38
TICK_INTERVALS = 5  # between the ticks of an axis, before rounding: more labels of the y axis would touch
MAX_POINTS = 2000  # of a series; a page stays small after a long run


@dataclass(frozen=True)
class Series:
    """A line of a chart: (step, value) pairs.

    colour: a CSS colour, or a variable of the page's style. dots: draw a dot at each point. dash: lengths of dashes and
    gaps, "5 3"; empty: a solid line.
    """

    label: str
    colour: str
    points: Sequence[tuple[int, float]]
    dots: bool = False
    dash: str = ""


def render_template(package: str, name: str, **values: Any) -> str:
    """Render a template in a package's folder. Every value is escaped, and a missing one is an error."""
    return _environment(package).get_template(name).render(**values)


@cache  # with it templates are compiled once, which takes longer than to render them
def _environment(package: str) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable_value,
    )


def _printable_value(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def line_chart(
    title: str, y_label: str, series: Sequence[Series], *, from_zero: bool = False, legend: bool = True
) -> Markup | None:
    """Return a chart of values against optimizer steps; None without a finite value.

    from_zero: y starts at 0. legend: names the series below the chart, if there are several.
    """
    series = [one for one in map(_thinned, series) if one.points]
    if not series:
        return None
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    x_ticks = ticks(min(xs), max(xs), whole=True)
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
    left, right = min(xs), max(max(xs), min(xs) + 1)
    bottom = y_ticks[0]
    top = y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left)
        up = (y - bottom) / (top - bottom)
        return round(LEFT + across * (WIDTH - LEFT - RIGHT), 1), round(
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1
        )

    return Markup(
        render_template(
            "ligertune.report",
            "chart.svg.j2",
            title=title,
            y_label=y_label,
            width=WIDTH,
            height=HEIGHT,
            plot={"left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM},
            x_ticks=[(place(x, bottom)[0], f"{x:,.0f}") for x in x_ticks if left <= x <= right],
            y_ticks=[(place(left, y)[1], words) for y, words in zip(y_ticks, tick_labels(y_ticks), strict=True)],
            legend=_legend([one.label for one in series] if legend else []),
            series=[{"line": one, "places": [place(x, y) for x, y in one.points]} for one in series],
        )
    )


def _legend(labels: Sequence[str]) -> list[tuple[float, float]]:
    """Return the place of each label below the plot, in as many lines as they need; none for a single label."""
    places: list[tuple[float, float]] = []
    x = 4.0
    y = HEIGHT + 12.0
    for label in labels if len(labels) > 1 else ():
        width = 34 + 6.9 * len(label)  # of the text in system fonts, roughly
        if places and x + width > WIDTH:
            x = 4.0
            y = y + 17
        places.append((x, y))
        x += width
    return places


def _thinned(series: Series) -> Series:
    """Return a series without values that are not finite, and with at most MAX_POINTS points."""
    points = [point for point in series.points if math.isfinite(point[1])]
    stride = -(-len(points) // MAX_POINTS) or 1
    kept = [*points[:-1:stride], *points[-1:]]
    return Series(series.label, series.colour, kept, series.dots or len(kept) == 1, series.dash)


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that enclose low and high. whole: integers only."""
    if high <= low:  # a constant line lies in the middle of the chart, and 0 at its bottom
        low, high = (low, low + 1) if whole or low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    raw = (high - low) / TICK_INTERVALS
    power = 10.0 ** math.floor(math.log10(raw))
    # 1e-9 below: a quotient that should be whole can miss it by rounding, which would add a tick
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return equally precise labels: "12,000", "0.25", or "2e-05" for small values."""
    step = values[1] - values[0]
    largest = max(map(abs, values))
    if largest < 1e-3:
        return [f"{value:.3g}" if abs(value) > step / 2 else "0" for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]
