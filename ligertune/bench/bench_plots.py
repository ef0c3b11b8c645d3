"""Plots of `ligertune bench`: time and memory against size. One figure per op, with a panel per direction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ligertune.bench.case import Mode
from ligertune.bench.measure import BENCHMARKS, Row
from ligertune.errors import UserError, pip_install
from ligertune.files.plots import has_matplotlib, new_figure, save_figure

if TYPE_CHECKING:
    from ligertune.files.plots import Axes

TITLES: dict[Mode, str] = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
# A provider has the same colour in all figures.
COLOURS = {"ours": "#d62728", "ours, in place": "#ff9896", "eager": "#7f7f7f", "torch": "#1f77b4",
           "torch.compile": "#2ca02c"}  # fmt: skip
PANEL_INCHES = (4.2, 3.6)


def check_matplotlib() -> None:
    """Raise UserError if matplotlib is not installed."""
    if not has_matplotlib():
        raise UserError(
            "Plots need matplotlib, which is not installed.",
            hint=f"Install it with {pip_install('matplotlib')}, or leave --plots out.",
        )


def draw(rows: list[Row], folder: Path, *, device: str) -> Path:
    """Write `<op>.png` from the rows of one op; return its path.

    Bands lie between the 20 % and 80 % quantiles; the dotted line is the roofline.
    """
    benchmark = BENCHMARKS[rows[0].case.op]
    modes = list(rows[0].floors)
    place = benchmark.axis
    with_memory = any(row.peak_bytes is not None for row in rows)
    n_panels = len(modes) + with_memory
    figure = new_figure(PANEL_INCHES[0] * n_panels, PANEL_INCHES[1])
    panels = figure.subplots(1, n_panels, squeeze=False)[0]
    fixed = [f"{name} = {size}" for name, size in zip(benchmark.dims, rows[0].case.sizes, strict=True)]
    name = benchmark.dims[place]
    del fixed[place]
    for panel, mode in zip(panels, modes, strict=False):
        _panel(panel, rows, place, partial(_time, mode=mode), f"{TITLES[mode]}, ms")
        floors = sorted({(row.case.sizes[place], 1e3 * row.floors[mode]) for row in rows})
        panel.plot(*zip(*floors, strict=True), color="black", linestyle=":", linewidth=1.2, label="roofline")
    if with_memory:
        _panel(panels[-1], rows, place, _memory, "peak memory above the inputs, GiB")
    for panel in panels:
        panel.set_xlabel(f"{name} ({', '.join(fixed)})" if fixed else name)
    panels[0].legend(fontsize=8)
    dtype = str(rows[0].case.dtype).removeprefix("torch.")
    figure.suptitle(f"{benchmark.op}, {dtype}, {device}", fontsize=11)
    path = folder / f"{benchmark.op}.png"
    save_figure(figure, path, dpi=120)
    return path


Point = tuple[float, float, float]  # a value and the ends of its band


def _time(row: Row, mode: Mode) -> Point | None:
    timing = row.device.get(mode)
    return None if timing is None else (1e3 * timing.median, 1e3 * timing.p20, 1e3 * timing.p80)


def _memory(row: Row) -> Point | None:
    return None if row.peak_bytes is None else (row.peak_bytes / 2**30,) * 3


def _panel(panel: Axes, rows: list[Row], place: int, point: Callable[[Row], Point | None], title: str) -> None:
    """Draw one line per provider over the sizes, on a logarithmic axis with the sizes as ticks."""
    for name in dict.fromkeys(row.provider for row in rows):
        found = [(row.case.sizes[place], point(row)) for row in rows if row.provider == name and point(row)]
        if not found:
            continue
        found.sort()
        sizes = [size for size, _ in found]
        values, low, high = zip(*(p for _, p in found), strict=True)
        colour = COLOURS.get(name)
        width = 2.2 if name.startswith("ours") else 1.4
        (line,) = panel.plot(sizes, values, marker="o", markersize=4, linewidth=width, color=colour, label=name)
        panel.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    panel.set_title(title, fontsize=10)
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    ticks = sorted({row.case.sizes[place] for row in rows})
    panel.set_xticks(ticks, [str(tick) for tick in ticks], rotation=30, fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
