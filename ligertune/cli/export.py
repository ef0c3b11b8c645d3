"""`ligertune export`: merge an adapter, or write a checkpoint as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligertune.cli.options import Json
from ligertune.cli.render import console as render


def export(
    run: Annotated[Path, typer.Argument(help="output_dir of a run, or a folder with an adapter.", show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write. Default: RUN/exported.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter without merging it.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Export a checkpoint: step-200 or newest, for example.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's model in Hugging Face format: merge its adapter, or convert a checkpoint.

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
