"""Files of a comparison: compare.json, compare.csv, charts, and report.html, one self-contained page."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ligertune.compare.summary import Comparison, Point, SideResult
from ligertune.compare.trial import label
from ligertune.errors import UserError, format_bytes, plural
from ligertune.files.plots import has_matplotlib, label_steps, new_figure, save_figure
from ligertune.files.storage import check_replaceable, write_json, write_text
from ligertune.planning.preflight import check_out_folder, make_out_folder
from ligertune.report.svg_chart import Series, line_chart, render_template

if TYPE_CHECKING:
    from ligertune.files.plots import Axes

# columns of the table in the terminal and on the page; the first is the side
HEADER = (
    "", "tokens/s", "median step", "peak", "reserved", "MFU", "tokens/s ratio", "memory ratio", "loss, first → last",
)  # fmt: skip
CPU_COLUMNS = (0, 1, 2, 3, 8)  # on a CPU ratios say nothing about the kernels, and the others do not exist
CPU_REMARK = (
    "This device is a CPU: the kernels run as their PyTorch references. Compare the losses; what the kernels gain in "
    "speed and memory shows only on a GPU."
)
COLUMNS = (
    "setting", "side", "tokens_per_second", "standard_error", "median_tokens_per_second", "median_step_seconds",
    "peak_allocated", "peak_reserved", "mfu", "speed_ratio", "memory_ratio", "loss_first", "loss_last",
    "loss_difference", "grad_norm_difference", "same", "slow_steps", "failure",
)  # fmt: skip
# A side keeps its colour in every chart. ligertune is red, to stand out.
COLOURS = {
    "with": "#d62728", "no-rope": "#e6b0aa", "no-norm": "#f5b041", "no-mlp": "#a04000", "no-fused-loss": "#ff9896",
    "no-attention": "#784212", "no-lora": "#73c6b6", "no-optimizer": "#5d6d7e",
    "no-mixer": "#229954",
    "with-recompute": "#e377c2", "with-recompute-norms": "#f7b6d2", "with-recompute-mlps": "#ad1457",
    "with-attention": "#bcbd22", "with-lora": "#17becf", "with-offload": "#c5b0d5", "with-offload-gate": "#9467bd",
    "with-offload-both": "#5b3a86", "with-cuda-graphs": "#e6b800", "with-compile": "#8c1a1b", "with-fp8": "#ff7f0e",
    "with-torchao": "#c49c94",
    "without": "#7f7f7f", "hf-chunked": "#bcbcbc", "compile": "#2ca02c", "liger": "#1f77b4",
}  # fmt: skip
GIB = 2**30
LOSSES = "losses.png"

Bar = tuple[float, float | None]  # height, standard error
BarOf = Callable[[SideResult], Bar | None]


def check_folder(folder: Path) -> None:
    """Make the folder. Raises UserError if it cannot be made, or already holds a comparison: nothing is overwritten."""
    if (folder / "compare.json").exists():
        raise UserError(f"--out: {folder} already holds a comparison.", hint="Name another folder.")
    check_out_folder(folder, "--out", may_hold=None)
    for path in folder.glob("*.*"):
        if path.suffix in (".json", ".csv", ".png", ".html"):
            check_replaceable(path)
    make_out_folder(folder, "--out")


def write_files(result: Comparison, folder: Path) -> tuple[list[Path], list[Path]]:
    """Write all files. Returns (their paths, the charts among them); there are no charts without matplotlib."""
    write_json(folder / "compare.json", result.as_dict())
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(COLUMNS)
    writer.writerows(_csv_row(point, side) for point in result.points for side in point.sides)
    write_text(folder / "compare.csv", table.getvalue())
    charts = draw_comparison(result, folder) if has_matplotlib() else []
    write_text(folder / "report.html", _page(result, charts))
    return [folder / "compare.json", folder / "compare.csv", *charts, folder / "report.html"], charts


def results_table(result: Comparison, point: Point) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows). A side without a result has only two cells: its label and its failure."""
    shown = CPU_COLUMNS if result.on_cpu else range(len(HEADER))
    rows = [_table_row(point, side) for side in point.sides]
    return [HEADER[i] for i in shown], [row if len(row) == 2 else [row[i] for i in shown] for row in rows]


def _table_row(point: Point, side: SideResult) -> list[str]:
    rate = side.tokens_per_second
    if rate is None:
        return [side.label, side.failure.kind if side.failure else "nothing measured"]
    speed, memory = point.gain(side) or (None, None)
    return [
        side.label,
        f"{rate.mean:,.0f}" + ("" if rate.standard_error is None else f" ± {rate.standard_error:,.0f}"),
        "" if side.median_step_seconds is None else f"{1e3 * side.median_step_seconds:,.1f} ms",
        "" if side.peak is None else format_bytes(side.peak),
        format_bytes(reserved) if (reserved := side.peak_memory.get("reserved_steady")) else "",
        "" if side.mfu is None else f"{100 * side.mfu:.1f} %",
        "" if speed is None else f"{speed:.2f}",
        "" if memory is None else f"{memory:.2f}",
        f"{side.first_run[0].loss:.4f} → {side.first_run[-1].loss:.4f}",
    ]


def ablation_title(result: Comparison) -> str:
    return "Losses without each kernel" if result.on_cpu else "What each kernel gains"


def ablation_table(result: Comparison, point: Point) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows) of what each kernel gains; on a CPU of how far the losses without it differ."""
    rows = []
    for one in point.ablations:
        speed = "" if one.speed is None else f"{100 * (one.speed - 1):+.1f} %"
        speed += "" if one.speed_error is None else f" ± {100 * one.speed_error:.1f}"
        sign = "-" if one.memory and one.memory < 0 else ""
        memory = "" if one.memory is None else f"{sign}{format_bytes(abs(one.memory))}"
        side = point.side(one.side)
        parity = None if side is None else side.parity
        losses = f"{parity.worst:.1e} at step {parity.worst_step}" if parity else ""
        rows.append([one.kernel, losses] if result.on_cpu else [one.kernel, speed, memory, losses])
    gains = [] if result.on_cpu else ["gain in tokens/s", "peak memory saved"]
    return ["kernel", *gains, "largest difference of losses without it"], rows


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


def _csv_row(point: Point, side: SideResult) -> tuple[Any, ...]:
    steps = side.first_run
    rate = side.tokens_per_second
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
    return render_template(
        "ligertune.compare",
        "compare_page.html.j2",
        title=result.title,
        target=label(result.target, processes=result.processes),
        recipe=Path(result.recipe).name,
        result=result,
        ablation_title=ablation_title(result),
        cpu_remark=CPU_REMARK if result.on_cpu else "",
        charts=[
            {"name": path.stem, "base64": base64.b64encode(path.read_bytes()).decode()}
            for path in charts
            if path.name != LOSSES  # the page draws these curves itself
        ],
        plural=plural,
        points=[
            {
                "label": ", ".join(filter(None, [point.label, point.batch])) if point.label else "Results",
                "table": results_table(result, point),
                "ablations": ablation_table(result, point),
                "notes": [remark for side in point.sides for remark in remarks(side)],
                "curves": _curves(point),
            }
            for point in result.points
        ],
    )


def _curves(point: Point) -> list[tuple[str, Markup]]:
    """Return (title, SVG) of the curves of each side's first run; warm-up steps are included."""
    losses, differences = loss_series(point)
    seconds = [
        Series(side.label, COLOURS[side.name], [(step.step, step.seconds) for step in side.first_run])
        for side in point.sides
    ]
    reference = point.reference_side.label if point.reference_side else ""
    charts = {
        "Loss": line_chart("Loss", "nats per trained token", losses),
        "Difference of losses": line_chart("Difference of losses", f"relative to {reference}", differences),
        "Duration of each step": line_chart("Duration of each step", "seconds", seconds, from_zero=True),
    }
    return [(title, chart) for title, chart in charts.items() if chart is not None]


def loss_series(point: Point) -> tuple[list[Series], list[Series]]:
    """Return the losses of each side's first run, and their relative differences from the reference's.

    The reference comes first. The others are dashed, because curves that agree lie on it.
    """
    reference = point.reference_side
    sides = sorted((side for side in point.sides if side.first_run), key=lambda side: side is not reference)
    losses = [
        Series(side.label, COLOURS[side.name], [(step.step, step.loss) for step in side.first_run],
               dash="" if side is reference else "5 3")
        for side in sides
    ]  # fmt: skip
    expected = {step.step: step.loss for step in reference.first_run} if reference else {}
    differences = [
        Series(one.label, one.colour, [(x, (y - expected[x]) / expected[x]) for x, y in one.points if expected.get(x)])
        for one in losses[1:]
    ]
    return losses, differences


def draw_comparison(result: Comparison, folder: Path) -> list[Path]:
    """Draw the charts into the folder, and return their paths. On a CPU only the losses: see CPU_REMARK."""

    def rate(side: SideResult) -> Bar | None:
        found = side.tokens_per_second
        return (found.mean, found.standard_error) if found else None

    def memory(side: SideResult) -> Bar | None:
        return (side.peak / GIB, None) if side.peak else None

    losses = _draw_losses(result, folder / LOSSES)
    if result.on_cpu:
        return [losses]
    error = ", mean ± standard error" if result.repeats > 1 else ""
    return [
        _chart(result, folder / "throughput.png", f"tokens/s without padding{error}", rate, "{:,.0f}"),
        _chart(result, folder / "memory.png", "peak memory per device, GiB", memory, "{:.3g}"),
        losses,
    ]


def _draw_losses(result: Comparison, path: Path) -> Path:
    """Draw the losses of all sides, and below them their relative differences; one column per setting."""
    points = result.points
    figure = new_figure(min(max(7.0, 4.5 * len(points)), 18.0), 6.0)
    panels = figure.subplots(2, len(points), squeeze=False, sharex="col", height_ratios=(3, 2))
    for point, (above, below) in zip(points, panels.T, strict=True):
        for axes, series in zip((above, below), loss_series(point), strict=True):
            for one in series:
                axes.plot(*zip(*one.points, strict=True), "--" if one.dash else "-", color=one.colour,
                          label=one.label, linewidth=1.6 if one.dash else 2.4)  # fmt: skip
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        above.set_title(point.label, fontsize=10)
        label_steps(below)
    reference = points[0].reference_side.label if points[0].reference_side else "the reference"
    panels[0, 0].set_ylabel("loss, nats per trained token")
    panels[1, 0].set_ylabel(f"difference relative\nto {reference}")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(result.title, fontsize=10, wrap=True)
    save_figure(figure, path, dpi=140)
    return path


def _chart(result: Comparison, path: Path, y_label: str, bar: BarOf, number: str) -> Path:
    sides = result.points[0].sides
    width = max(6.5, 1.0 + 0.9 * len(sides) * len(result.points))
    figure = new_figure(min(width, 16.0), 4.2)
    axes = figure.subplots()
    for i in range(len(sides)):
        _bars(axes, result, i, bar, number)
    axes.set_xticks(range(len(result.points)), [point.label for point in result.points])
    if not result.points[0].label:
        axes.set_xticks([])
    axes.set_title(result.title, fontsize=9, wrap=True)
    axes.set_ylabel(y_label)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, loc="outside upper center", ncols=min(len(sides), 3), frameon=False)
    figure.supxlabel(label(result.target, processes=result.processes), fontsize=6.5, color="#555555", wrap=True)
    save_figure(figure, path, dpi=140)
    return path


def _bars(axes: Axes, result: Comparison, index: int, bar: BarOf, number: str) -> None:
    """Draw the bars of one side over all settings; a failure is written where the bar would be."""
    of_side = [point.sides[index] for point in result.points]
    n_sides = len(result.points[0].sides)
    width = 0.8 / n_sides
    places = [x + (index - (n_sides - 1) / 2) * width for x in range(len(of_side))]
    bars = [bar(side) for side in of_side]
    heights = [each[0] if each else 0.0 for each in bars]
    errors = [(each and each[1]) or 0.0 for each in bars]
    axes.bar(places, heights, width * 0.92, yerr=errors if any(errors) else None, capsize=3,
             color=COLOURS.get(of_side[0].name), label=of_side[0].label)  # fmt: skip
    for side, x, height, error, each in zip(of_side, places, heights, errors, bars, strict=True):
        words = number.format(height) if each else (side.failure.kind if side.failure else "")
        axes.annotate(words, (x, height + error), xytext=(0, 5), textcoords="offset points", ha="center", va="bottom",
                      fontsize=7.5, rotation=0 if each else 90, color="black" if each else "#b00000")  # fmt: skip
