"""What a comparison leaves in its folder: compare.json, compare.csv, report.html, and charts if they can be drawn."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

from ligertune.compare.compare_page import page
from ligertune.compare.summary import Comparison
from ligertune.errors import UserError
from ligertune.storage import write_json

COLUMNS = (
    "setting", "side", "tokens_per_second", "standard_error", "median_tokens_per_second", "median_step_seconds",
    "peak_allocated", "peak_reserved", "mfu", "speed_ratio", "memory_ratio", "loss_first", "loss_last",
    "loss_difference", "grad_norm_difference", "same", "slow_steps", "failure",
)  # fmt: skip


def check_folder(folder: Path) -> None:
    """Refuse one that holds a comparison: nothing is overwritten."""
    if (folder / "compare.json").exists():
        raise UserError(f"--out: {folder} already holds a comparison.", hint="Name another folder.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file.", hint="Name a folder.")


def write_files(result: Comparison, folder: Path) -> tuple[list[Path], list[Path]]:
    """(all files written, the charts among them). Without matplotlib there are none."""
    write_json(folder / "compare.json", result.as_dict())
    with (folder / "compare.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerows(rows(result))
    charts: list[Path] = []
    if importlib.util.find_spec("matplotlib"):
        from ligertune.compare.compare_plots import draw

        charts = draw(result, folder)
    (folder / "report.html").write_text(page(result, charts), encoding="utf-8")
    return [folder / "compare.json", folder / "compare.csv", *charts, folder / "report.html"], charts


def rows(result: Comparison) -> list[dict]:
    """One for each side at each point; bytes, seconds and tokens as they are."""
    found = []
    for point in result.points:
        for side in point.sides:
            gain, steps = point.gain(side), next((t.steps for t in side.trials if not t.failure), ())
            rate = side.tokens_per_second
            values = (
                point.label, side.name, rate and rate.mean, rate and rate.standard_error,
                side.median_tokens_per_second, side.median_step_seconds, side.peak,
                side.peak_memory.get("reserved_steady"), side.mfu, *(gain or (None, None)),
                steps[0].loss if steps else None, steps[-1].loss if steps else None,
                side.parity and side.parity.worst, side.parity and side.parity.first_grad_norm,
                side.parity and side.parity.same, len(side.slow_steps), side.failure and side.failure.kind,
            )  # fmt: skip
            found.append(dict(zip(COLUMNS, values, strict=True)))
    return found
