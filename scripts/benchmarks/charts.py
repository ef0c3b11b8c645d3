"""Charts of benchmark pages, drawn from the rows of their tables with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.files.plots import new_figure

if TYPE_CHECKING:
    from benchmarks.pages import Page

# Okabe and Ito's colours, which colour-blind readers tell apart; ligertune is always the first
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# light with a dark edge, because a middle grey has the brightness of ligertune's orange where a page is printed
OTHER, OTHER_EDGE = "#D0D0D0", "#6E6E6E"
MARKERS = "osD^vPX*h<>pd8"  # twice as many as colours, so that printed in grey 14 series differ
STYLES = ("-", "--", ":", "-.")
MAX_SERIES = len(COLOURS) * len(STYLES)
TICKS = "{x:,.10g}"  # 1,000,000, where "g" alone writes 1e+06


def series_style(number: int) -> tuple[str, str, str]:
    """Return colour, marker and line style of a series. No two of MAX_SERIES have the same colour and marker.

    From the eighth on colours come again, with the next line style. The first 14 have a marker each.
    """
    if number >= MAX_SERIES:
        raise ValueError(f"a chart has at most {MAX_SERIES} series")
    again, place = divmod(number, len(COLOURS))
    return COLOURS[place], MARKERS[(number + again // 2) % len(MARKERS)], STYLES[again]


def draw(page: Page, path: Path) -> None:
    """Draw the chart of a page, 800 pixels wide at its natural size.

    chart["limit"]: values above it are drawn at it.
    """
    kind, rows = page.chart["kind"], len(page.rows)
    lines = rows + len(_bar_places(page)[1])
    height = {"bars": 1.3 + 0.3 * lines, "dots": 1.6 + 0.24 * rows, "lines": 3.8, "curves": 3.8}[kind]
    figure = new_figure(8.0, height)
    {"bars": _bars, "dots": _dots, "lines": _lines, "curves": _curves}[kind](figure, page)
    figure.supxlabel(f"{page.devices}, torch {page.versions['torch']}, {page.date}", fontsize=8, color="#555555")
    figure.savefig(path, dpi=160, bbox_inches="tight")


def _limited(chart: dict, value: float) -> float:
    return min(value, chart.get("limit", value))


def _bar_places(page: Page) -> tuple[list[int], dict[int, str]]:
    """Return the line of each row, and those of the headings: chart["group"], above the rows that share its value.

    There are no headings where the values of all rows differ.
    """
    settings = [row.get(page.chart.get("group")) for row in page.rows]
    if not any(settings) or len(set(settings)) == len(settings) > 1:
        return list(range(len(settings))), {}
    places: list[int] = []
    headings: dict[int, str] = {}
    for number, setting in enumerate(settings):
        if number == 0 or setting != settings[number - 1]:
            headings[number + len(headings)] = setting
        places.append(number + len(headings))
    return places, headings


def _bars(figure: Any, page: Page) -> None:
    """Draw a panel per value, a bar per row that has it.

    chart: values {key: axis label}, labels (keys), group (key of the headings), ours (bar in colour).
    """
    chart, rows = page.chart, page.rows
    formats = {key: how for key, _, how in page.columns}
    places, headings = _bar_places(page)
    labels = chart["labels"] if headings else [*chart["labels"], chart.get("group")]
    figure.get_layout_engine().set(wspace=0.04)  # between the last tick of a panel and the 0 of the next
    panels = figure.subplots(1, len(chart["values"]), sharey=True, squeeze=False)[0]
    for panel, (key, label) in zip(panels, chart["values"].items(), strict=True):
        drawn = {place: row for place, row in zip(places, rows, strict=True) if row.get(key) is not None}
        ours = [bool(row.get(chart.get("ours", "ours"))) for row in drawn.values()]
        widths = [_limited(chart, row[key]) for row in drawn.values()]
        bars = panel.barh(list(drawn), widths, 0.72, color=[COLOURS[0] if mine else OTHER for mine in ours],
                          edgecolor=[COLOURS[0] if mine else OTHER_EDGE for mine in ours], linewidth=0.8)  # fmt: skip
        said = [format(row[key], formats[key]) if row[key] == width else f"over {width:g}"
                for row, width in zip(drawn.values(), widths, strict=True)]  # fmt: skip
        panel.bar_label(bars, said, padding=3, fontsize=9)
        for place in set(places) - set(drawn):  # an empty place reads as 0
            panel.annotate("not known", (0, place), (3, 0), textcoords="offset points", va="center", fontsize=9)
        panel.set_xlabel(label.replace(" (", "\n(") if len(chart["values"]) > 1 else label, fontsize=9)
        panel.set_xlim(0, 1.3 * max(widths))
        panel.locator_params(axis="x", nbins=5)
        panel.xaxis.set_major_formatter(TICKS)
        _tidy(panel, "x")
    panels[0].set_yticks(places, [_name(row, labels) for row in rows], fontsize=9)
    panels[0].set_ylim(places[-1] + 0.6, -0.6)
    for place, heading in headings.items():
        # from the left edge over the axis, so that a long one takes no room from the panels
        panels[0].annotate(heading, (0.01, place + 0.1), xycoords=("figure fraction", "data"), va="center", fontsize=9,
                           fontweight="bold", annotation_clip=False,
                           bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    figure.suptitle(page.title, fontsize=11)


def _dots(figure: Any, page: Page) -> None:
    """Draw a line of dots per row. chart: values {key: name in the legend}, labels (keys), axis (label).

    Only the first value has filled markers, which stay visible in the outlines of others at the same place.
    """
    chart, rows = page.chart, page.rows
    panel = figure.subplots()
    for number, (key, name) in enumerate(chart["values"].items()):
        colour, marker, _ = series_style(number)
        drawn = [(_limited(chart, row[key]), i) for i, row in enumerate(rows) if row.get(key) is not None]
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
