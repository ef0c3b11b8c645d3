"""Charts of benchmark pages, drawn from the rows of their tables with matplotlib."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.files.plots import new_figure

if TYPE_CHECKING:
    from benchmarks.pages import Page

# Okabe and Ito's colours, which colour-blind readers tell apart; ligertune is always the first
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
OTHER = "#8C8C8C"
MARKERS = "osD^vPX"
STYLES = ("-", "--", ":", "-.")
MAX_SERIES = len(COLOURS) * len(STYLES)
TICKS = "{x:,.10g}"  # 1,000,000, where "g" alone writes 1e+06


def series_style(number: int) -> tuple[str, str, str]:
    """Return colour, marker and line style of a series. No two of MAX_SERIES have the same colour and marker.

    From the eighth on colours come again, with the next marker and the next line style.
    """
    if number >= MAX_SERIES:
        raise ValueError(f"a chart has at most {MAX_SERIES} series")
    again, place = divmod(number, len(COLOURS))
    return COLOURS[place], MARKERS[(place + again) % len(MARKERS)], STYLES[again]


def draw(page: Page, path: Path) -> None:
    """Draw the chart of a page, 800 pixels wide at its natural size.

    chart["limit"]: values above it are drawn at it.
    """
    if (limit := page.chart.get("limit")) is not None:
        page = dataclasses.replace(page, rows=[_limited(row, page.chart["values"], limit) for row in page.rows])
    kind, rows = page.chart["kind"], len(page.rows)
    height = {"bars": 1.3 + 0.32 * rows, "dots": 1.6 + 0.24 * rows, "lines": 3.8, "curves": 3.8}[kind]
    figure = new_figure(8.0, height)
    {"bars": _bars, "dots": _dots, "lines": _lines, "curves": _curves}[kind](figure, page)
    where = f"{page.count} x {page.device}" if page.count > 1 else page.device
    figure.supxlabel(f"{where}, torch {page.versions['torch']}, {page.date}", fontsize=8, color="#555555")
    figure.savefig(path, dpi=160, bbox_inches="tight")


def _limited(row: dict, keys: Iterable[str], limit: float) -> dict:
    return row | {key: min(row[key], limit) for key in keys if row.get(key) is not None}


def _bars(figure: Any, page: Page) -> None:
    """Draw a panel per value, a bar per row that has it.

    chart: values {key: axis label}, labels (keys), ours (bar in colour).
    """
    chart, rows = page.chart, page.rows
    formats = {key: how for key, _, how in page.columns}
    panels = figure.subplots(1, len(chart["values"]), sharey=True, squeeze=False)[0]
    for panel, (key, label) in zip(panels, chart["values"].items(), strict=True):
        drawn = {i: row for i, row in enumerate(rows) if row.get(key) is not None}
        colours = [COLOURS[0] if row.get(chart.get("ours", "ours")) else OTHER for row in drawn.values()]
        bars = panel.barh(list(drawn), [row[key] for row in drawn.values()], 0.72, color=colours)
        panel.bar_label(bars, [format(row[key], formats[key]) for row in drawn.values()], padding=3, fontsize=9)
        panel.set_xlabel(label, fontsize=9)
        panel.set_xlim(0, 1.22 * max(row[key] for row in drawn.values()))
        panel.locator_params(axis="x", nbins=5)
        panel.xaxis.set_major_formatter(TICKS)
        _tidy(panel, "x")
    panels[0].set_yticks(range(len(rows)), [_name(row, chart["labels"]) for row in rows], fontsize=9)
    panels[0].invert_yaxis()
    figure.suptitle(page.title, fontsize=11)


def _dots(figure: Any, page: Page) -> None:
    """Draw a line of dots per row. chart: values {key: name in the legend}, labels (keys), axis (label).

    Only the first value has filled markers, which stay visible in the outlines of others at the same place.
    """
    chart, rows = page.chart, page.rows
    panel = figure.subplots()
    for number, (key, name) in enumerate(chart["values"].items()):
        colour, marker, _ = series_style(number)
        drawn = [(row[key], i) for i, row in enumerate(rows) if row.get(key) is not None]
        if drawn:
            first = number == 0
            fill = {"s": 28, "facecolors": colour} if first else {"s": 52, "facecolors": "none", "linewidths": 1.4}
            panel.scatter(*zip(*drawn, strict=True), edgecolors=colour, marker=marker, label=name, zorder=3, **fill)
    panel.set_ylim(-0.7, len(rows) - 0.3)
    panel.set_yticks(range(len(rows)), [_name(row, chart["labels"]) for row in rows], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.xaxis.set_major_formatter(TICKS)
    panel.set_xlabel(chart["axis"], fontsize=9)
    _tidy(panel, "both")
    _legend(figure, page, panel)


def _lines(figure: Any, page: Page) -> None:
    """Draw a panel per value over x. chart: x (key, label), values {key: axis label}, colour and style (keys).

    A chart without style has one line per colour. A row without a panel's value is not drawn there.
    """
    chart, rows = page.chart, page.rows
    (x, x_label), style = chart["x"], chart.get("style")
    colours, styles = _distinct(rows, chart["colour"]), _distinct(rows, style) if style else [None]
    panels = figure.subplots(1, len(chart["values"]), squeeze=False)[0]
    for panel, (key, label) in zip(panels, chart["values"].items(), strict=True):
        for i, first in enumerate(colours):
            for j, second in enumerate(styles):
                mine = [row for row in rows if (row[chart["colour"]], row.get(style)) == (first, second)]
                drawn = [row for row in mine if row.get(key) is not None]
                if mine:
                    colour, marker, again = series_style(i)
                    fill = "none" if i else colour  # outlines leave the first side's markers visible
                    name = f"{first}, {second} {style}" if style else first
                    panel.plot([row[x] for row in drawn], [row[key] for row in drawn], STYLES[j] if style else again,
                               color=colour, marker=marker, markersize=5 + 3 * min(i, 2), markerfacecolor=fill,
                               zorder=max(4 - i, 1), label=name)  # fmt: skip
        places = _distinct(rows, x)
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [f"{place / 1024:g}k" if place >= 1024 else place for place in places])
        # room for the highest marker; 0 on a CPU, which measures no memory
        top = 1.08 * max((row[key] for row in rows if row.get(key) is not None), default=0)
        panel.set(xlabel=x_label, ylabel=label, ylim=(0, top or None))
        _tidy(panel, "y")
        panel.yaxis.set_major_formatter(TICKS)
    _legend(figure, page, panels[0])


def _curves(figure: Any, page: Page) -> None:
    """Draw losses by step, and their relative differences from the first curve. chart: curves {label: losses}."""
    losses, differences = figure.subplots(1, 2)
    first = next(iter(page.chart["curves"].values()))
    for i, (label, curve) in enumerate(page.chart["curves"].items()):
        steps = range(1, len(curve) + 1)
        colour, _, _ = series_style(i)
        # Curves lie on each other, and dashes show the one below. 7 colours and 4 styles repeat together after 28.
        style = STYLES[i % len(STYLES)]
        losses.plot(steps, curve, style, color=colour, label=label, linewidth=1.6)
        if i:
            apart = [value / expected - 1 for value, expected in zip(curve, first, strict=True)]
            differences.plot(steps, apart, style, color=colour, linewidth=1.2)
    losses.set(xlabel="step", ylabel="loss, nats per trained token")
    differences.set(xlabel="step", ylabel=f"difference relative to {next(iter(page.chart['curves']))}")
    for panel in (losses, differences):
        _tidy(panel, "y")
    _legend(figure, page, losses)


def _legend(figure: Any, page: Page, panel: Any) -> None:
    """Write the title and, below it, the names of the markers."""
    figure.legend(*panel.get_legend_handles_labels(), title=page.title, title_fontsize=11, fontsize=9,
                  loc="outside upper center", ncols=4, frameon=False)  # fmt: skip


def _distinct(rows: Sequence[dict], key: str) -> list:
    return list(dict.fromkeys(row[key] for row in rows))


def _name(row: dict, keys: Sequence[str]) -> str:
    return ", ".join(str(row[key]) for key in keys if row.get(key) not in (None, ""))


def _tidy(panel: Any, axis: str) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=axis, alpha=0.3)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8)
