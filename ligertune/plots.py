"""A picture of a run: its losses, learning rate and throughput over the steps. Without matplotlib there is none."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ligertune.storage import read_metrics

NAME = "curves.png"


def draw_curves(output_dir: Path) -> Path | None:
    """`output_dir/curves.png` from its metrics.jsonl; None where there is nothing to draw, or nothing to draw with."""
    lines = read_metrics(output_dir / "metrics.jsonl")
    trained = [line for line in lines if "loss" in line]
    if not trained or find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    loss, rate, speed = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    steps = [line["step"] for line in trained]
    loss.plot(steps, [line["loss"] for line in trained], label="training")
    evaluated = [line for line in lines if "eval_loss" in line]
    if evaluated:
        values = [line["eval_loss"] for line in evaluated]
        loss.plot([line["step"] for line in evaluated], values, marker="o", label="evaluation")
        loss.legend()
    rate.plot(steps, [line["learning_rate"] for line in trained])
    speed.plot(steps, [line["tokens_per_second"] for line in trained])
    for axis, name in ((loss, "loss"), (rate, "learning rate"), (speed, "real tokens/s")):
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    speed.set_xlabel("step")
    figure.savefig(output_dir / NAME, dpi=120)
    return output_dir / NAME
