"""`ligertune compare`: train the same recipe with and without the kernels, and print speed, memory and loss parity."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import Json, Overrides
from ligertune.cli.render import console as render
from ligertune.errors import pip_install, plural

if TYPE_CHECKING:
    from ligertune.compare.comparison import Setting
    from ligertune.compare.summary import Comparison


def compare(
    recipe: Annotated[Path | None, typer.Argument(help="Recipe (YAML file). Default: the quickstart recipe.")] = None,
    with_: Annotated[bool, typer.Option("--with-liger", "--with", help="Run only the side with our kernels.")] = False,
    without: Annotated[
        bool, typer.Option("--without-liger", "--without", help="Run only the side without our kernels.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also run without each kernel in turn, to show what it gains.")
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(metavar="AXIS=A,B", help="Compare at each value: batch=4,8,16 or length=512,1024.")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Side to add: hf, hf-chunked, compile; with our kernels: with-recompute, with-recompute-norms, "
            "with-recompute-mlps, with-attention, with-lora, with-offload, with-offload-gate, with-offload-both, "
            "with-compile, with-cuda-graphs, with-fp8, with-torchao; without a kernel: no-lora, ... May be repeated.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Library to add: liger, if liger-kernel is installed.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Measured steps per run. Default: 20; 8 on a CPU.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Runs per side. Default: 5; 3 on a CPU.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes (GPUs) per run.")] = 1,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the report, recipes, logs and metrics.")] = None,
    json: Json = False,
) -> None:
    """Train with and without the kernels in new processes, and compare speed, memory and losses.

    Example: ligertune compare configs/quickstart/stories260k.yaml --ablate
    """
    from ligertune.compare.compare_files import CPU_REMARK, check_folder
    from ligertune.compare.comparison import CPU_DEFAULTS, GPU_DEFAULTS, compare, kernels_in_use
    from ligertune.compare.side import check_losses, choose_sides
    from ligertune.compare.trial import TrialOptions, label, read_target

    render.people_on_stderr(json)
    baselines = baseline or ["hf"]
    only = {(True, False): "with", (False, True): "without"}.get((with_, without))
    choose_sides(only=only, baselines=baselines, peers=peer or [])  # refuse unknown names before the device is queried
    settings = _settings(recipe, set_ or [], sweep)
    folder = out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    check_folder(folder)
    target = read_target()
    kernels = kernels_in_use(settings[0].recipe, target["arch"]) if ablate else ()
    sides = choose_sides(only=only, ablate=kernels, baselines=baselines, peers=peer or [])
    check_losses(sides, settings[0].recipe.task)
    most = CPU_DEFAULTS if target["vendor"] == "cpu" else GPU_DEFAULTS
    options = TrialOptions(repeats or most[0], steps or most[1], processes, folder.absolute())
    render.sentence(label(target, processes=processes) + (f"\n{CPU_REMARK}" if target["vendor"] == "cpu" else ""))
    result = compare(settings, sides, options, target=target, show=render.text)
    _show(result, folder)
    if json:
        render.json_report(result.as_dict())
    if result.problems:
        raise typer.Exit(1)


def _settings(recipe: Path | None, overrides: list[str], sweep: str | None) -> tuple[Setting, ...]:
    """Load the recipe for each value of the sweep. Raises UserError if one is invalid or names a missing path."""
    from ligertune.compare.comparison import load_settings
    from ligertune.planning.preflight import check_sources
    from ligertune.recipe.read import bundled

    path = recipe or bundled("quickstart/stories260k.yaml")
    if recipe is None:
        render.sentence(f"No recipe given: comparing on the quickstart recipe, {path}")
        # trials write to their own folders: an earlier quickstart run in output_dir is no obstacle
        overrides = [*overrides, "checkpoint.output_dir=compare"]
    settings = load_settings(path, overrides, sweep)
    for setting in settings:
        check_sources(setting.recipe)
    return settings


def _show(result: Comparison, folder: Path) -> None:
    """Write the files, then print a table and remarks for each setting."""
    from ligertune.compare.compare_files import ablation_table, ablation_title, remarks, results_table, write_files

    # before the output: a closed terminal must not lose an hour of measurements
    written, charts = write_files(result, folder)
    runs = plural(result.repeats, "run")
    steps = plural(result.steps, "step")
    if len(result.points) > 1:
        render.text(f"\n{result.title}")
    for point in result.points:
        render.text()
        batch = f"{point.label}, {point.batch}" if point.label and point.batch else point.label
        render.columns(f"{batch or result.title}: {runs} of {steps} per side", *results_table(result, point))
        for side in point.sides:
            for remark in remarks(side):
                render.sentence(remark, indent="  ")
        if point.ablations:
            render.text()
            render.columns(ablation_title(result), *ablation_table(result, point))
    for problem in result.problems:
        render.sentence(f"Failed: {problem}")
    if not charts:
        render.text(f"No charts: matplotlib is not installed ({pip_install('matplotlib')}).")
    render.text(f"Wrote {', '.join(str(path) for path in written)}")
