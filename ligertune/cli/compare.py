"""`ligertune compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli import render

if TYPE_CHECKING:
    from ligertune.compare import Comparison


def compare(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe; the quickstart's if none is given.")] = None,
    with_: Annotated[bool, typer.Option("--with-liger", "--with", help="Only the side with our kernels.")] = False,
    without: Annotated[bool, typer.Option("--without-liger", "--without", help="Only the side without.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side, interleaved.")] = 2,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep recipes, logs and metrics of all runs here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON on stdout.")] = False,
) -> None:
    """Train with and without the kernels in fresh processes: speed, memory, and whether the losses are the same.

    Example: ligertune compare configs/quickstart/stories260k.yaml --steps 20
    """
    import tempfile

    from ligertune.compare import SIDES, bundled_recipe, compare
    from ligertune.preflight import check_paths
    from ligertune.recipe import load_recipe

    render.people_on_stderr(json)
    path = recipe or bundled_recipe()
    if recipe is None:
        render.text(f"No recipe given: comparing on the quickstart's, {path}")
    overrides = list(set_ or [])
    if recipe is None:  # its output folder is not used, and must not be asked for
        overrides.append("checkpoint.output_dir=compare")
    loaded = load_recipe(path, overrides=overrides)
    check_paths(loaded)
    sides = tuple(name for name in SIDES if {"with": with_, "without": without}[name]) or tuple(SIDES)
    with tempfile.TemporaryDirectory(prefix="ligertune-compare-") as scratch:
        result = compare(
            loaded, sides=sides, steps=steps, repeats=repeats, folder=out or Path(scratch), show=render.text
        )
    _show(result)
    if json:
        render.json_report(result.as_dict())
    if not result.good:
        raise typer.Exit(1)


def _show(result: Comparison) -> None:
    from ligertune.compare import peak_of

    rows = []
    for side in result.sides:
        if side.failure:
            rows.append([f"{side.name} kernels", "failed", "", "", ""])
            continue
        error = f" ± {side.standard_error:,.0f}" if side.standard_error is not None else ""
        rows.append(
            [
                f"{side.name} kernels",
                f"{side.tokens_per_second:,.0f}{error}",
                render.size(peak_of(side.peak_memory)),
                f"{side.loss_first:.4f}",
                f"{side.loss_last:.4f}",
            ]
        )
    title = f"{result.device}, {result.dtype}, {result.steps} steps x {result.repeats}"
    render.columns(title, ["", "real tokens/s", "peak memory", "loss, first step", "loss, last step"], rows)
    for side in result.sides:
        if side.failure:
            render.text(f"The side {side.name} the kernels failed: {side.failure}")
    if result.kernels:
        render.text(f"Kernels: {result.kernels}")
    if result.speed_ratio and result.memory_ratio:
        render.text(
            f"With the kernels: {result.speed_ratio:.2f} x the tokens/s, {result.memory_ratio:.2f} x the memory"
        )
    if result.parity:
        found, verdict = result.parity, "the same" if result.parity.same else "DIFFERENT"
        render.text(
            f"Loss curves: {verdict}. Largest relative difference {found.worst:.1e} at step {found.worst_step} "
            f"(allowed {found.tolerance_each:g}), last step {found.last:.1e} (allowed {found.tolerance_last:g})"
        )
