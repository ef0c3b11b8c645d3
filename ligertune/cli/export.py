"""`ligertune export`: merge an adapter, or write a checkpoint as a Hugging Face model; upload it to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligertune.cli.options import Json, TrustRemoteCode
from ligertune.cli.render import console as render
from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.train.checkpoint.export_run import ExportPlan


def export(
    run: Annotated[
        str, typer.Argument(help="Folder of a run, a model, an adapter or a checkpoint.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write. Default: RUN/exported.", show_default=False)
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter without merging it.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Export a checkpoint: step-200 or newest, for example.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="USER/NAME", help="Upload to this repository on the hub.", show_default=False),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make the new repository public.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the model card only, and list what --push would upload.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Write a run's model in Hugging Face format: merge its adapter, or convert a checkpoint; upload it if asked.

    Example: ligertune export runs/llama-lora --out merged

    README.md, the model card, is written from the run's report unless there is one. A model that needs no merging is
    uploaded from its own folder.
    """
    if public and push is None:
        raise UserError("--public belongs to --push.", hint="Write --push USER/NAME --public.")
    render.people_on_stderr(json)
    with render.status("reading the run ..."):
        from ligertune.train.checkpoint import export_run

        if push is not None:
            export_run.check_repository(push)
        uploads = push is not None or dry_run
        plan = export_run.plan_export(
            run, out, adapter=adapter, checkpoint=checkpoint, in_place=uploads, trust_remote_code=trust_remote_code
        )
    done = {"folder": str(plan.folder), "kind": plan.kind, "source": plan.source.name}
    if not dry_run and plan.how != "in place":
        with render.waiting("loading and merging ..." if plan.kind == "merged model" else "writing ..."):
            plan.write()
        render.text(f"{plan.kind} from {plan.source.name}: {plan.folder}")
    card = plan.write_card(push)
    render.text(f"model card: {card}")
    if uploads:
        done["files"] = export_run.files_to_upload(plan.folder)
        _show_upload(plan, done["files"], push=push, dry_run=dry_run)
    if push is not None and not dry_run:
        done["address"] = export_run.upload(plan.folder, push, public=public)
        render.text(f"uploaded: {done['address']} ({'public' if public else 'private if it is new'})")
    if json:
        render.json_report(done)


def _show_upload(plan: ExportPlan, files: dict[str, int], *, push: str | None, dry_run: bool) -> None:
    if plan.upload_warning:
        render.note(plan.upload_warning)
    rows = [(name, f"{size:,} bytes") for name, size in files.items()]
    if dry_run and plan.how != "in place":
        rows.append(("weights, tokenizer", "written by the export"))
    render.table(f"{'would be uploaded' if dry_run else 'uploading'} to {push or 'the hub'}", rows)
