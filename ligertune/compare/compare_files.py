"""Files of a comparison: compare.json, compare.csv, two charts, and report.html, one self-contained page."""

from __future__ import annotations

import base64
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ligertune.compare.summary import Comparison, Point, SideResult
from ligertune.compare.trial import label
from ligertune.errors import UserError, format_bytes, plural
from ligertune.plots import has_matplotlib, new_figure
from ligertune.storage import write_json

if TYPE_CHECKING:
    from ligertune.plots import Axes

# columns of the table in the terminal and on the page; the first is the side
HEADER = (
    "", "real tokens/s", "median step", "peak", "reserved", "MFU", "tokens/s ratio", "memory ratio",
    "loss, first → last",
)  # fmt: skip
COLUMNS = (
    "setting", "side", "tokens_per_second", "standard_error", "median_tokens_per_second", "median_step_seconds",
    "peak_allocated", "peak_reserved", "mfu", "speed_ratio", "memory_ratio", "loss_first", "loss_last",
    "loss_difference", "grad_norm_difference", "same", "slow_steps", "failure",
)  # fmt: skip
WIDTH, HEIGHT = 720, 160  # pixels of the step-time curves
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


def check_folder(folder: Path) -> None:
    """Raise UserError if the folder already holds a comparison: nothing is overwritten."""
    if (folder / "compare.json").exists():
        raise UserError(f"--out: {folder} already holds a comparison.", hint="Name another folder.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file.", hint="Name a folder.")


def write_files(result: Comparison, folder: Path) -> tuple[list[Path], list[Path]]:
    """Write all files. Returns (their paths, the charts among them); there are no charts without matplotlib."""
    write_json(folder / "compare.json", result.as_dict())
    with (folder / "compare.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(COLUMNS)
        writer.writerows(_csv_row(point, side) for point in result.points for side in point.sides)
    charts = draw_comparison(result, folder) if has_matplotlib() else []
    (folder / "report.html").write_text(_page(result, charts), encoding="utf-8")
    return [folder / "compare.json", folder / "compare.csv", *charts, folder / "report.html"], charts


def table_row(point: Point, side: SideResult) -> list[str]:
    """Return the cells of HEADER for one side; a side without a result has its failure in the second cell."""
    rate = side.tokens_per_second
    if rate is None:
        return [side.label, side.failure.kind if side.failure else "nothing measured"]
    speed, memory = point.gain(side) or (None, None)
    return [
        side.label,
        f"{rate.mean:,.0f}" + ("" if rate.standard_error is None else f" ± {rate.standard_error:,.0f}"),
        f"{1e3 * side.median_step_seconds:,.1f} ms",
        format_bytes(side.peak),
        format_bytes(reserved) if (reserved := side.peak_memory.get("reserved_steady")) else "",
        "" if side.mfu is None else f"{100 * side.mfu:.1f} %",
        "" if speed is None else f"{speed:.2f}",
        "" if memory is None else f"{memory:.2f}",
        f"{side.first_run[0].loss:.4f} → {side.first_run[-1].loss:.4f}",
    ]


def remarks(side: SideResult) -> list[str]:
    """Return what the table does not show of a side: kernels, failure, parity, slow steps."""
    found = [side.kernels] if side.kernels else []
    if side.failure:
        found.append(str(side.failure))
    if side.parity:
        found.append(f"losses {side.parity.sentence}")
    found += [
        f"step {slow.step} of run {slow.repeat} took {slow.seconds:.2f} s, {slow.times_median:.1f} x the median"
        for slow in side.slow_steps
    ]
    return [f"{side.label}: {remark}" for remark in found]


def _csv_row(point: Point, side: SideResult) -> tuple:
    steps, rate = side.first_run, side.tokens_per_second
    return (
        point.label, side.name, rate and rate.mean, rate and rate.standard_error,
        side.median_tokens_per_second, side.median_step_seconds, side.peak,
        side.peak_memory.get("reserved_steady"), side.mfu, *(point.gain(side) or (None, None)),
        steps[0].loss if steps else None, steps[-1].loss if steps else None,
        side.parity and side.parity.worst, side.parity and side.parity.first_grad_norm,
        side.parity and side.parity.same, len(side.slow_steps), side.failure and side.failure.kind,
    )  # fmt: skip


def _page(result: Comparison, charts: Sequence[Path]) -> str:
    """Render report.html. charts: PNG files to embed."""
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
        plural=plural,
        points=[
            {
                "label": point.label,
                "rows": [table_row(point, side) for side in point.sides],
                "notes": [remark for side in point.sides for remark in remarks(side)],
                **_curves(point),
            }
            for point in result.points
        ],
        width=WIDTH,
        height=HEIGHT,
    )


def _curves(point: Point) -> dict[str, Any]:
    """Return the step times of each side's first run as SVG points; warm-up steps are included."""
    runs = [(side, side.first_run) for side in point.sides if len(side.first_run) > 1]
    slowest = max((step.seconds for _, steps in runs for step in steps), default=0.0)
    curves = []
    for side, steps in runs:
        x_of, y_of = WIDTH / (len(steps) - 1), HEIGHT / slowest
        dots = [f"{x_of * i:.1f},{HEIGHT - y_of * step.seconds:.1f}" for i, step in enumerate(steps)]
        curves.append({"path": " ".join(dots), "colour": COLOURS.get(side.name, "black"), "label": side.label})
    return {"curves": curves, "slowest": slowest}


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
