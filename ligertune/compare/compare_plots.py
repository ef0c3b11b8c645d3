"""Bar charts of a comparison: throughput.png and memory.png, with one group per setting and one bar per side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.compare.summary import Comparison, SideResult
from ligertune.compare.target import label
from ligertune.plots import new_figure

if TYPE_CHECKING:
    from ligertune.plots import Axes

# A side keeps its colour in every chart. ligertune is red, to stand out.
COLOURS = {
    "with": "#d62728", "no-fused-loss": "#ff9896", "with-recompute": "#e377c2", "with-recompute-norms": "#f7b6d2",
    "with-attention": "#bcbd22", "with-lora": "#17becf", "with-offload": "#c5b0d5", "with-offload-gate": "#9467bd",
    "with-offload-both": "#5b3a86", "with-cuda-graphs": "#e6b800", "with-compile": "#8c1a1b", "with-fp8": "#ff7f0e",
    "without": "#7f7f7f", "hf-chunked": "#bcbcbc", "compile": "#2ca02c", "liger": "#1f77b4",
}  # fmt: skip
GIB = 2**30

Bar = tuple[float, float | None]  # height, standard error
BarOf = Callable[[SideResult], Bar | None]


def draw_comparison(result: Comparison, folder: Path) -> list[Path]:
    """Draw both charts into the folder, and return their paths."""

    def rate(side: SideResult) -> Bar | None:
        found = side.tokens_per_second
        return (found.mean, found.standard_error) if found else None

    def memory(side: SideResult) -> Bar | None:
        return (side.peak / GIB, None) if side.peak else None

    return [
        _chart(result, folder / "throughput.png", "real tokens/s, mean ± standard error", rate, "{:,.0f}"),
        _chart(result, folder / "memory.png", "peak memory per device, GiB", memory, "{:.3g}"),
    ]


def _chart(result: Comparison, path: Path, title: str, bar: BarOf, number: str) -> Path:
    sides = result.points[0].sides
    width = max(6.5, 1.0 + 0.9 * len(sides) * len(result.points))
    figure = new_figure(min(width, 16.0), 4.2)
    axes = figure.subplots()
    for i in range(len(sides)):
        _bars(axes, result, i, bar, number)
    axes.set_xticks(range(len(result.points)), [point.label for point in result.points])
    if not result.points[0].label:
        axes.set_xticks([])
    axes.set_title(title, fontsize=11)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, loc="outside upper center", ncols=min(len(sides), 3), frameon=False)
    figure.supxlabel(label(result.target, processes=result.processes), fontsize=6.5, color="#555555", wrap=True)
    figure.savefig(path, dpi=140)
    return path


def _bars(axes: Axes, result: Comparison, index: int, bar: BarOf, number: str) -> None:
    """Draw the bars of one side over all settings; a failure is written where the bar would be."""
    of_side = [point.sides[index] for point in result.points]
    n_sides = len(result.points[0].sides)
    width = 0.8 / n_sides
    places = [x + (index - (n_sides - 1) / 2) * width for x in range(len(of_side))]
    bars = [bar(side) for side in of_side]
    heights, errors = [each[0] if each else 0.0 for each in bars], [(each and each[1]) or 0.0 for each in bars]
    axes.bar(places, heights, width * 0.92, yerr=errors if any(errors) else None, capsize=3,
             color=COLOURS.get(of_side[0].name), label=of_side[0].label)  # fmt: skip
    for side, x, height, error, each in zip(of_side, places, heights, errors, bars, strict=True):
        words = number.format(height) if each else (side.failure.kind if side.failure else "")
        axes.annotate(words, (x, height + error), xytext=(0, 5), textcoords="offset points", ha="center", va="bottom",
                      fontsize=7.5, rotation=0 if each else 90, color="black" if each else "#b00000")  # fmt: skip
