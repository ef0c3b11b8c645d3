"""`ligertune compare`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.render import console as render

if TYPE_CHECKING:
    from ligertune.compare.summary import Comparison, Point, SideResult

HEADER = [
    "",
    "real tokens/s",
    "median",
    "peak",
    "reserved",
    "MFU",
    "tokens/s ratio",
    "memory ratio",
    "loss, first → last",
]


def compare(
    recipe: Annotated[Path | None, typer.Argument(help="YAML recipe; the quickstart's if none is given.")] = None,
    with_: Annotated[bool, typer.Option("--with-liger", "--with", help="Only the side with our kernels.")] = False,
    without: Annotated[bool, typer.Option("--without-liger", "--without", help="Only the side without.")] = False,
    ablate: Annotated[bool, typer.Option("--ablate", help="Also all kernels but the fused loss.")] = False,
    sweep: Annotated[str | None, typer.Option(metavar="AXIS=A,B", help="batch=4,8,16 or length=512,1024.")] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="hf, hf-chunked, compile; ours: with-rebuild, with-rebuild-norms, with-attention, with-lora, "
            "with-offload, with-offload-gate, with-offload-both, with-compile, with-cuda-graphs, with-fp8. May be "
            "repeated.",
        ),
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(metavar="NAME", help="liger, if liger-kernel is installed.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Measured steps of a run; 20, on a CPU 8.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Runs of each side; 5, on a CPU 3.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes (GPUs) of each run.")] = 1,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report, recipes, logs and metrics.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON on stdout.")] = False,
) -> None:
    """Train with and without the kernels in fresh processes: speed, memory, and whether the losses are the same.

    Example: ligertune compare configs/quickstart/stories260k.yaml --ablate
    """
    from ligertune.compare.compare_files import check_folder, write_files
    from ligertune.compare.comparison import CPU_EFFORT, GPU_EFFORT, Effort, bundled_recipe, compare, settings_of
    from ligertune.compare.side import choose_sides
    from ligertune.compare.target import label, read_target
    from ligertune.planning.preflight import check_paths

    render.people_on_stderr(json)
    path, overrides = recipe or bundled_recipe(), list(set_ or [])
    if recipe is None:  # its output folder is not used, and must not be asked for
        render.text(f"No recipe given: comparing on the quickstart's, {path}")
        overrides.append("checkpoint.output_dir=compare")
    only = {(True, False): "with", (False, True): "without"}.get((with_, without))
    sides = choose_sides(only=only, ablate=ablate, baselines=baseline or ["hf"], peers=peer or [])
    settings = settings_of(path, overrides, sweep)
    for setting in settings:
        check_paths(setting.recipe)
    folder = out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    check_folder(folder)
    target = read_target()
    usual = CPU_EFFORT if target["vendor"] == "cpu" else GPU_EFFORT
    effort = Effort(repeats=repeats or usual.repeats, steps=steps or usual.steps)
    render.text(label(target, processes=processes))
    result = compare(
        settings, sides, effort, target=target, processes=processes, folder=folder.absolute(), show=render.text
    )
    written, charts = write_files(result, folder)
    _show(result)
    if not charts:
        render.text("No charts: they need matplotlib (pip install 'ligertune[plots]').")
    render.text(f"Written: {', '.join(str(path) for path in written)}")
    if json:
        render.json_report(result.as_dict())
    if not result.good:
        raise typer.Exit(1)


def _show(result: Comparison) -> None:
    """A table for each point, then what one should know of it."""
    for point in result.points:
        title = f"{point.label or Path(result.recipe).name}: {result.repeats} x {result.steps} steps"
        render.text()
        render.columns(title, HEADER, [_row(point, side) for side in point.sides])
        for side in point.sides:
            if side.kernels:
                render.text(f"  {side.label}: {side.kernels}")
            if side.failure:
                render.text(f"  {side.label}: {side.failure.kind}: {side.failure.sentence}")
            if side.parity:
                render.text(f"  {side.label}: losses {side.parity.sentence}")
            for slow in side.slow_steps:
                render.text(
                    f"  {side.label}: step {slow.step} of run {slow.repeat} took {slow.seconds:.2f} s, "
                    f"{slow.times_median:.1f} x the median"
                )
    for problem in result.problems:
        render.text(f"Failed: {problem}")


def _row(point: Point, side: SideResult) -> list[str]:
    rate, gain = side.tokens_per_second, point.gain(side)
    if rate is None:
        return [side.label, side.failure.kind if side.failure else "nothing measured", *[""] * 7]
    error = f" ± {rate.standard_error:,.0f}" if rate.standard_error is not None else ""
    reserved = side.peak_memory.get("reserved_steady")
    losses = next(trial.steps for trial in side.trials if trial.steps and not trial.failure)
    return [
        side.label,
        f"{rate.mean:,.0f}{error}",
        f"{side.median_tokens_per_second:,.0f}",
        render.size(side.peak),
        render.size(reserved) if reserved else "",
        f"{100 * side.mfu:.1f} %" if side.mfu is not None else "",
        f"{gain[0]:.2f}" if gain else "",
        f"{gain[1]:.2f}" if gain else "",
        f"{losses[0].loss:.4f} → {losses[-1].loss:.4f}",
    ]
