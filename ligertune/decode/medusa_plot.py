"""The report on heads as a picture: accuracy by head, and speed beside plain decoding."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ligertune.decode.medusa_report import MedusaReport


def plots_are_possible() -> bool:
    """Whether matplotlib is here (pip install 'ligertune[plots]')."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(report: MedusaReport, path: Path) -> None:
    """A PNG with two panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heads = range(1, len(report.top1) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.bar([h - 0.2 for h in heads], report.top1, width=0.4, label="top-1", color="#1f5fa8")
    left.bar([h + 0.2 for h in heads], report.top5, width=0.4, label="top-5", color="#9cc3ea")
    left.set(title="Accuracy on held-out data", xlabel="head", ylabel="share of targets", ylim=(0, 1))
    left.set_xticks(list(heads))
    left.legend(frameon=False)
    if report.decoding is not None:
        found = report.decoding
        bars = right.bar(
            ["plain generate", "with heads"],
            [found.plain_tokens_per_second, found.tokens_per_second],
            color=["#8a8a8a", "#1f5fa8"],
        )
        right.bar_label(bars, fmt="%.0f")
        right.set(
            title=f"{found.accepted_length:.2f} tokens a pass, {found.speed_up:.2f}x", ylabel="tokens/s, one prompt"
        )
    else:
        right.set_axis_off()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
