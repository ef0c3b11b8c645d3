"""Plots: the only module that imports matplotlib, and the curves of a run (curves.png)."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligertune.files.storage import read_metrics, write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes  # also for the modules that draw
    from matplotlib.figure import Figure

NAME = "curves.png"


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; sizes are in inches. It needs no display: `save_figure` draws it with the Agg backend."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Draw a figure as PNG, and write it as `write_bytes` does."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(dpi)
    drawn = io.BytesIO()
    FigureCanvasAgg(figure).print_png(drawn)  # `savefig` lays out and draws twice, for the same bytes
    write_bytes(path, drawn.getvalue())


def label_steps(axes: Axes) -> None:
    """Label the x axis as optimizer steps, with ticks at integers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")


def draw_curves(output_dir: Path, *, title: str, loss_unit: str) -> Path | None:
    """Draw `output_dir/curves.png` from metrics.jsonl; None without a logged step or without matplotlib."""
    lines = read_metrics(output_dir / "metrics.jsonl")
    trained = [line for line in lines if "loss" in line]
    if not trained or not has_matplotlib():
        return None
    figure = new_figure(8, 8)
    loss, rate, speed = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    _plot(loss, trained, "loss", label="training")
    evaluated = [line for line in lines if "eval_loss" in line]
    if evaluated:
        _plot(loss, evaluated, "eval_loss", marker="o", label="evaluation")
        loss.legend()
    _plot(rate, trained, "learning_rate")
    _plot(speed, trained, "tokens_per_second")
    for axis, name in ((loss, f"loss, {loss_unit}"), (rate, "learning rate"), (speed, "tokens/s without padding")):
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    speed.set_ylim(0, 1.1 * max(line.get("tokens_per_second") or 0 for line in trained) or None)
    label_steps(speed)
    figure.suptitle(title)
    save_figure(figure, output_dir / NAME, dpi=120)
    return output_dir / NAME


def _plot(axis: Axes, lines: list[dict[str, Any]], key: str, **options: Any) -> None:
    known = [line for line in lines if line.get(key) is not None]  # a file that was damaged can lack some
    axis.plot([line["step"] for line in known], [line[key] for line in known], **options)
