"""`ligertune export`: merge an adapter, or write a checkpoint as a Hugging Face model; upload it to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligertune.cli.options import ExportCheckpoint, ExportDtype, Json, TrustRemoteCode, check_of_feature
from ligertune.cli.render import console as render
from ligertune.errors import UserError
from ligertune.progress import importing

if TYPE_CHECKING:
    from ligertune.training.checkpoint.export_run import ExportPlan


ExportedRun = Annotated[
    str, typer.Argument(help="Folder of a run, a model, an adapter or a checkpoint.", show_default=False)
]
Repository = Annotated[
    str | None,
    typer.Option("--push", metavar="USER/NAME", help="Upload to this repository on the hub.", show_default=False),
]
BaseFormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="mxfp4|fp8",
        help="Merge the adapter into the quantised format of its base, shard by shard.",
        show_default=False,
    ),
]

GgufKind = Annotated[
    str | None,
    typer.Option(
        "--gguf",
        metavar="f16|bf16|f32|q8_0",
        help="Also write a GGUF file for llama.cpp and Ollama, and a Modelfile.",
        show_default=False,
    ),
]


def export(
    run: ExportedRun,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write. Default: RUN/exported.", show_default=False)
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter without merging it.")] = False,
    checkpoint: ExportCheckpoint = None,
    dtype: ExportDtype = None,
    push: Repository = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make the new repository public.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the logits of the trained, the saved and the exported model.")
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="With --check: compare on this text. Default: rows of the data."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the model card only, and list what --push would upload.")
    ] = False,
    base_format: BaseFormatName = None,
    gguf: GgufKind = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Write a run's model in Hugging Face format, or as GGUF: merge its adapter, convert a checkpoint, upload it.

    Example: ligertune export runs/llama-lora --out merged

    --check loads the export, or an earlier one, in transformers and PEFT, and ends with exit code 1 if logits differ.

    The model card, README.md, is written unless there is one. A model without an adapter is uploaded from its folder,
    and --gguf reads it there; of an adapter, --gguf also writes the merged model.
    """
    if gguf is not None:
        _refuse_with_gguf(adapter, push, public, check, prompt, dry_run, base_format)
        return _export_gguf(run, out, gguf, checkpoint, dtype=dtype, trust_remote_code=trust_remote_code, json=json)
    _refuse_options(push=push, public=public, check=check, prompt=prompt, dry_run=dry_run)
    _refuse_with_format(base_format, adapter=adapter, check=check, dtype=dtype)
    render.people_on_stderr(json)
    if check and (rows := check_of_feature(Path(run).expanduser(), prompt, trust_remote_code)) is not None:
        return _show_rows(rows, json=json)
    _check_base_model(run, merges=not (adapter or dry_run or checkpoint))
    with render.status("reading the run ..."):
        with importing():
            from ligertune.training.checkpoint.export_run import check_repository, plan_export
        if push is not None:
            check_repository(push)
        plan = _plan_format(run, out, base_format, checkpoint, trust_remote_code=trust_remote_code) or plan_export(
            run, out, adapter=adapter, checkpoint=checkpoint, in_place=push is not None or dry_run, check=check,
            trust_remote_code=trust_remote_code, dtype=dtype,
        )  # fmt: skip
    done: dict[str, Any] = {"folder": str(plan.folder), "kind": plan.kind, "source": plan.source.name}
    _write(plan, dry_run=dry_run)
    done["commands"] = _write_card(plan, push, dry_run=dry_run)
    if check:
        done["check"] = _check(plan, prompt, report=done if json else None)
    done |= _upload(plan, push=push, public=public, dry_run=dry_run)
    if json:
        render.json_report(done)


def _show_rows(rows: list[dict[str, Any]], *, json: bool) -> None:
    """Print what a feature has compared."""
    render.columns("checked files", tuple(rows[0]), [tuple(map(str, row.values())) for row in rows])
    if json:
        render.json_report({"check": rows})


def _refuse_with_gguf(*others: object) -> None:
    if any(others):
        raise UserError(
            "--gguf cannot be combined with --adapter, --push, --public, --check, --prompt, --dry-run or --format.",
            hint="Run export once more for them.",
        )


def _export_gguf(
    run: str,
    out: Path | None,
    kind: str,
    checkpoint: str | None,
    *,
    dtype: str | None,
    trust_remote_code: bool,
    json: bool,
) -> None:
    """Write the model as one GGUF file; an adapter or a checkpoint as a folder first."""
    _check_base_model(run, merges=not checkpoint)
    render.people_on_stderr(json)
    with render.status("reading the run ..."):
        with importing():
            from ligertune.gguf_export.export_gguf import plan_gguf
        planned = plan_gguf(run, out, kind, checkpoint=checkpoint, dtype=dtype, trust_remote_code=trust_remote_code)
    _write(planned.plan, dry_run=False)
    with render.waiting(f"writing {planned.file.name} ..."):
        written = planned.write()
    for note in written.notes:
        render.note(note)
    render.text(f"{kind} from {planned.plan.folder}: {written.file}")
    render.text(f"Modelfile: {written.modelfile}")
    render.text(f"model card: {planned.write_card(written)}")
    commands = _show_commands(*planned.plan.serve(written.names()))
    if json:
        render.json_report(
            {"file": str(written.file), "modelfile": str(written.modelfile), "folder": str(planned.plan.folder),
             "kind": kind, "notes": list(written.notes), "commands": commands}
        )  # fmt: skip


def _write_card(plan: ExportPlan, push: str | None, *, dry_run: bool) -> dict[str, str]:
    """Write the model card, and print and return the commands that serve the folder."""
    render.text(f"model card: {plan.write_card(push)}")
    return {} if dry_run else _show_commands(*plan.serve())


def _show_commands(commands: list[tuple[str, str]], words: str) -> dict[str, str]:
    """Print the command of each server and a note, and return the commands by the server's name."""
    for server, command in commands:
        render.text(f"{server}: {command}")
    if words:
        render.note(words)
    return dict(commands)


def _write(plan: ExportPlan, *, dry_run: bool) -> None:
    if dry_run or plan.how in ("in place", "there already"):
        return
    with render.waiting("loading and merging ..." if plan.kind == "merged model" else "writing ..."):
        note = plan.write()
    if note:
        render.note(note)
    render.text(f"{plan.kind} from {plan.source.name}: {plan.folder}")
    render.hub_notes()


def _refuse_with_format(wanted: str | None, *, adapter: bool, check: bool, dtype: str | None) -> None:
    if wanted is None:
        return
    if dtype is not None:
        raise UserError("--format and --dtype both choose how weights are stored.", hint="Leave one out.")
    if adapter:
        raise UserError("--format merges the adapter, and --adapter keeps it apart.", hint="Leave one out.")
    if check:
        raise UserError(
            "--check compares within the rounding of 16 bits, and --format rounds to fewer.", hint="Leave one out."
        )


def _plan_format(
    run: str, out: Path | None, wanted: str | None, checkpoint: str | None, *, trust_remote_code: bool
) -> ExportPlan | None:
    """Return the export of --format; None without it."""
    if wanted is None:
        return None
    from ligertune.training.checkpoint.export_format import plan_format_export

    return plan_format_export(run, out, wanted=wanted, checkpoint=checkpoint, trust_remote_code=trust_remote_code)


def _check_base_model(run: str, *, merges: bool) -> None:
    """Check the base model of an adapter that is to be merged, before torch is imported."""
    if not merges:
        return
    from ligertune.planning.saved_model import check_base_model

    folder = Path(run).expanduser()
    for place in (folder, folder / "model"):
        check_base_model(place, key="RUN")


def _refuse_options(*, push: str | None, public: bool, check: bool, prompt: str | None, dry_run: bool) -> None:
    if public and push is None:
        raise UserError("--public belongs to --push.", hint="Write --push USER/NAME --public.")
    if prompt is not None and not check:
        raise UserError("--prompt belongs to --check.", hint="Write --check --prompt TEXT.")
    if prompt is not None and not prompt.strip():
        raise UserError("--prompt: the text is empty.", hint="Give a few words.")
    if check and dry_run:
        raise UserError("--check needs the exported model, which --dry-run does not write.", hint="Leave one out.")


def _check(plan: ExportPlan, prompt: str | None, *, report: dict[str, Any] | None) -> dict[str, Any]:
    """Print the comparison of the trained, the saved and the exported model. Raises UserError if they differ."""
    with render.waiting("loading and comparing ..."):
        from ligertune.training.checkpoint.export_check import check_export

        found = check_export(plan, prompt=prompt)
    rows = [
        (one.name, f"{one.largest:.1e}", f"{one.relative:.1e}", f"{one.tolerance:.0e} ({one.dtype})",
         f"{one.same_argmax:.1%}", "yes" if one.is_equal else "NO")
        for one in found.comparisons
    ]  # fmt: skip
    header = ("", "largest difference", "relative", "rounding", "same argmax", "equal")
    render.columns(f"logits against the trained model, on {found.compared_on}", header, rows)
    for note in found.notes:
        render.note(note)
    if report is not None and not all(one.is_equal for one in found.comparisons):
        render.json_report({**report, "check": found.as_dict()})
    found.raise_if_different()
    return found.as_dict()


def _upload(plan: ExportPlan, *, push: str | None, public: bool, dry_run: bool) -> dict[str, Any]:
    """Upload the files, or list them in a dry run, and return what the JSON report says of them; {} for neither."""
    if push is None and not dry_run:
        return {}
    from ligertune.training.checkpoint.export_run import files_to_upload, upload

    done: dict[str, Any] = {"files": files_to_upload(plan.folder)}
    _show_upload(plan, done["files"], push=push, dry_run=dry_run)
    if push is not None and not dry_run:
        done["address"] = upload(plan.folder, push, public=public)
        render.text(f"uploaded: {done['address']} ({'public' if public else 'private if it is new'})")
    return done


def _show_upload(plan: ExportPlan, files: dict[str, int], *, push: str | None, dry_run: bool) -> None:
    if plan.upload_warning:
        render.note(plan.upload_warning)
    rows = [(name, f"{size:,} bytes") for name, size in files.items()]
    if dry_run and plan.how != "in place":
        rows.append(("weights, tokenizer", "written by the export"))
    render.table(f"{'would be uploaded' if dry_run else 'uploading'} to {push or 'the hub'}", rows)
