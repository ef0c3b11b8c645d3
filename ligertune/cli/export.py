"""`ligertune export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.render import console as render


def export(
    run: Annotated[Path, typer.Argument(help="output_dir of a run, or a folder with an adapter.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; RUN/exported if not given.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, not merged.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Take it from a checkpoint: step-200, or newest.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON report on stdout.")] = False,
) -> None:
    """Write a run's model for other tools: an adapter merged into its weights, or a checkpoint as a model.

    Example: ligertune export runs/llama-lora --out merged
    """
    import dataclasses

    from ligertune.train.checkpoint.export_run import export_run

    render.people_on_stderr(json)
    folder = out or run / "exported"
    with render.waiting("loading and merging ..."):
        done = export_run(run, folder, adapter=adapter, checkpoint=checkpoint)
    render.text(f"{done.kind} from {done.source}: {done.folder}")
    if json:
        render.json_report(dataclasses.asdict(done))
