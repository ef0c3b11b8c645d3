"""A run of ligertune whose memory after loading is measured, for benchmarks of whole models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.sides.peft_loop import peak_now

if TYPE_CHECKING:
    from ligertune.report import Report
    from ligertune.training.setup import Job


def our_run(job: Job) -> tuple[Report, dict[str, int], list[dict[str, Any]]]:
    """Train as planned; return (report, bytes as of `peak_now` when the model is loaded, logged lines).

    All ranks call it.
    """
    from ligertune.progress import Phases
    from ligertune.run import run

    loaded: list[dict[str, int]] = []
    lines: list[dict[str, Any]] = []
    with Phases() as phases:
        report = run(job, lines.append, change=lambda model: loaded.append(peak_now()), phases=phases)
    return report, loaded[0], lines
